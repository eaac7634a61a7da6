"""Folders that are either complete or not there, and the hashes that tell whether a file was altered."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pd2bw_fx.errors import InputError, PlanMismatchError

MANIFEST = "manifest.json"
_WRITTEN_BY = {
    "pd2bw_fx pipeline": "pipe.save (pd2bw-fx split)",
    "pd2bw_fx onnx": "pipe.export_onnx (pd2bw-fx export)",
}
_FRESH = ".pd2bw_fx-"  # begins the name of a folder that is being written
_LEFT_S = 24 * 3600.0  # no folder is written for so long
_HALF = "half_written"  # in the manifest while files are being replaced
_WHERE = "name a file in a folder that is there and is yours"


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """Yields a new folder to write into, which takes its name only when everything in it is written.

    A folder of that name that is empty, or that is ours and of the same kind, is filled anew. Other files in
    it (checkpoints, notes) stay, and so does the folder itself: it may be what a link points to, a mount
    point, or a process's working directory. Raises InputError for a folder that is not ours, for one where a
    file of ours was edited by hand since (no work is lost), and where no folder can be made. After an error
    nothing is left behind; what a process that was killed has left is removed a day later.
    """
    try:
        target = Path(folder).resolve()
        is_there = target.exists()
        if is_there:
            _own_manifest(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        # It is made inside a folder that exists: another one may be on another disk.
        beside = target if is_there else target.parent
        _remove_left(beside)
        fresh = Path(tempfile.mkdtemp(prefix=_FRESH, dir=beside))
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{folder} cannot be written: {why}; give another folder") from error
    try:
        fresh.chmod(0o755)
        yield fresh
        if target.exists():
            _fill(target, fresh)
        else:
            fresh.rename(target)
    finally:
        if fresh.exists():
            shutil.rmtree(fresh)


def _remove_left(folder: Path) -> None:
    """Removes folders that nobody writes any more: the process was killed. One may be written just now."""
    for left in folder.glob(f"{_FRESH}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_S:
                shutil.rmtree(left, ignore_errors=True)


def _fill(target: Path, fresh: Path) -> None:
    """Moves what is in `fresh` into an existing folder, the manifest last; until then it says so."""
    before, after = _own_manifest(target), _own_manifest(fresh)
    _require_nothing_lost(target, fresh, before, after)
    # A caller that copied the folder itself has a copy of `fresh` in it.
    names = sorted({path.name for path in fresh.iterdir()} - {MANIFEST, fresh.name})
    mark = fresh / f"{MANIFEST}.half"
    mark.write_text(
        json.dumps({"kind": after["kind"], _HALF: True, "files": {**before["files"], **after["files"]}}),
        encoding="utf-8",
    )
    mark.replace(target / MANIFEST)
    shutil.rmtree(target / "__pycache__", ignore_errors=True)
    for name in before["files"].keys() - set(names):
        if (target / name).is_file():
            (target / name).unlink()
    for name in names:
        (fresh / name).replace(target / name)
    (fresh / MANIFEST).replace(target / MANIFEST)


@contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """Yields a file to write. Raises InputError where it cannot be written."""
    try:
        yield Path(path)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "make room, or name a file elsewhere" if is_full else _WHERE
        raise InputError(f"{path} cannot be written: {error.strerror or error}; {advice}") from error


def require_onnx_file(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"{path} is no file; give the path of an ONNX model")


def make_durable(folder: Path) -> None:
    """Writes what is in the folder to the disk, before anything names it, so that it outlives a loss of
    power.
    """
    for path in (*folder.iterdir(), folder):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _own_manifest(folder: Path) -> dict[str, Any]:
    """Returns what `write_manifest` wrote; for an empty folder, a manifest without files."""
    if folder.is_dir() and all(path.name.startswith(_FRESH) for path in folder.iterdir()):
        return {"kind": None, "files": {}}
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if (
        not isinstance(manifest, dict)
        or not isinstance(manifest.get("files"), dict)
        or any(Path(name).name != name for name in manifest["files"])
        or "kind" not in manifest
    ):
        raise InputError(f"{folder} exists and was not written by pd2bw_fx; give another folder or remove it")
    return manifest


def _require_nothing_lost(
    target: Path, fresh: Path, before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    """Raises InputError where something in a folder would be lost by what is to be moved into it."""
    if before["kind"] not in (None, after["kind"]):
        raise InputError(
            f"{target} holds {before['kind']!r}, which {after['kind']!r} would replace; give another folder"
        )
    for name, expected in before["files"].items():
        path = target / name
        if before.get(_HALF) or not path.is_file():
            continue  # a file of before or after, as far as the writing came
        if sha256(path) not in (expected, _sha256_if_there(fresh / name)):
            raise InputError(
                f"{path} was edited since it was written, and would be replaced; give another folder, or "
                "move it away"
            )
    ours = {MANIFEST, "__pycache__", fresh.name, *before["files"]}
    for name in sorted(path.name for path in target.iterdir() if path.name not in ours or path.is_dir()):
        if name not in (fresh.name, "__pycache__") and (fresh / name).exists():
            raise InputError(f"{target / name} is not ours, and would be replaced; give another folder")


def _sha256_if_there(path: Path) -> str | None:
    return sha256(path) if path.is_file() else None


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Writes `facts` and the hash of every file beside it; returns what is written."""
    files = {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    manifest = {**facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


_IF_ALTERED = "if you edited it on purpose, load(folder, edited=True)"
_IF_PLAN_ALTERED = "for other stages give the plan that you edited to split(model, .., plan=..)"


def read_manifest(
    folder: str | Path, *, kind: str, check: bool = True, if_altered: str | None = None
) -> dict[str, Any]:
    """Returns the manifest of a folder of this kind; all of its files are there and unaltered.

    Raises PlanMismatchError naming the file that is missing or altered (`if_altered` says what to do then),
    InputError where there is no folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"{folder} is no folder; one written by pd2bw_fx was expected: look for a mistyped path"
        )
    if not (folder / MANIFEST).is_file():
        raise PlanMismatchError(
            f"{folder} has no {MANIFEST}: it is no folder written by pd2bw_fx; look for a mistyped path"
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanMismatchError(f"{folder / MANIFEST} is no valid JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        found = manifest.get("kind") if isinstance(manifest, dict) else type(manifest).__name__
        wanted = f"; {_WRITTEN_BY[kind]} writes one" if kind in _WRITTEN_BY else ""
        raise PlanMismatchError(f"{folder} holds {found!r}; a folder of kind {kind!r} was expected{wanted}")
    if manifest.get(_HALF):
        raise PlanMismatchError(
            f"{folder} is half written: what was saved into it last was not saved to its end; save it again"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or any(Path(name).name != name for name in files):
        raise PlanMismatchError(f"{folder / MANIFEST} lists files of another folder; save it again")
    for name, expected in files.items():
        own = _IF_PLAN_ALTERED if name == "plan.json" else _IF_ALTERED
        _check_file(folder / name, expected, check=check, if_altered=if_altered or own)
    return manifest


def _check_file(path: Path, expected: str, *, check: bool, if_altered: str) -> None:
    if not path.is_file():
        raise PlanMismatchError(
            f"{path} is missing though the manifest lists it; copy the folder whole, or save it again"
        )
    if check and sha256(path) != expected:
        raise PlanMismatchError(
            f"{path} is not the file that was saved: its hash differs from the manifest's; {if_altered}"
        )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
