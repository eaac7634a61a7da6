"""Keeps measured times on disk: one small file for each machine, device and torch version.

The folder can be deleted at any time; operators are then measured again. So they are where a file cannot be
read, with a note in the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Hashable
from pathlib import Path

import torch

from pd2bw_fx.process_settings import flags, matmul_precision

from .keys import ONLY_HERE

_LOG = logging.getLogger(__name__)
_FORMAT = 1

Seconds = tuple[float, float]  # forward and backward


def default_cache_folder() -> Path | None:
    """`pd2bw_fx/profiles` in the user's cache directory; None for a user without a home."""
    if sys.platform != "darwin" and (base := os.environ.get("XDG_CACHE_HOME")):
        return Path(base) / "pd2bw_fx" / "profiles"
    try:
        home = Path.home()
    except RuntimeError as error:  # a container's user id that the system does not know
        _LOG.info("measured times cannot be kept for the next run: %s", error)
        return None
    caches = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return caches / "pd2bw_fx" / "profiles"


class ProfileCache:
    """Seconds by key for one device of this machine.

    A key is an operator with the shapes and types of its operands and its constants. `save` adds new entries
    to the file, all of them or none.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.environment = {
            "format": _FORMAT,
            "torch": torch.__version__,
            "machine": platform.node(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "threads": torch.get_num_threads(),
            "matmul": matmul_precision(),
            "flags": json.dumps(flags()),
        }
        self.path = folder / f"{_digest(tuple(self.environment.values()))}.json"
        self._seconds = self._read()
        self._new: dict[str, Seconds] = {}

    def get(self, key: Hashable) -> Seconds | None:
        return self._seconds.get(_digest(key))

    def put(self, key: Hashable, seconds: Seconds) -> None:
        """Adds an entry, unless its key only means something in this process."""
        if ONLY_HERE not in repr(key):
            self._new[_digest(key)] = seconds

    def drop(self, key: Hashable) -> None:
        """Forgets one entry."""
        self._seconds.pop(_digest(key), None)

    def forget(self) -> None:
        """Forgets all entries, so that they are measured again; `save` then replaces them."""
        self._seconds = {}

    def save(self) -> None:
        """Writes the file. Of two processes that save at the same time, one may lose its new entries."""
        if not self._new:
            return
        self._seconds = self._read() | self._new
        self._new = {}
        text = json.dumps({"environment": self.environment, "seconds": self._seconds})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, fresh = tempfile.mkstemp(prefix=".", dir=self.path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(fresh).replace(self.path)
        except OSError as error:
            _LOG.warning("measured times cannot be kept for the next run: %s", error)

    def _read(self) -> dict[str, Seconds]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["environment"] != self.environment:
                return {}
            return {key: (float(f), float(b)) for key, (f, b) in data["seconds"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _LOG.warning("%s cannot be read (%s); what it held is measured again", self.path, error)
            return {}


def _digest(key: Hashable) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]
