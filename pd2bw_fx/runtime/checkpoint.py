"""Checkpoints of a training run: everything that the ranks need to go on as if nothing had happened.

    folder/
      latest                       the name of the newest complete checkpoint
      update_000120/
        checkpoint.json            what this is: updates so far, method, stages, ranks
        rank_0.safetensors         all weight versions, buffers, optimizer state, by the model's own names
        rank_0.json                learning rates and the like, the scheduler, fp16's loss scale

A checkpoint is written beside the last one and named in `latest` when it is complete, so that a run that is
killed at any moment finds a good one. Tensors have the model's names: a checkpoint of four stages can be read
on two.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pd2bw_fx.errors import InputError, PlanMismatchError
from pd2bw_fx.files import make_durable, sha256
from pd2bw_fx.graph import ParameterSpec
from pd2bw_fx.tensor_files import save_tensors, shape_in, tensor_in

_NAME = re.compile(r"update_(\d{6,})")
_LATEST = "latest"
_HASH = "hash"  # the key of a JSON file's hash of its other values
_KEPT = 2
_SCHEMA = 4


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's part of a checkpoint.

    `tensors` are named kind/name, optimizer state `optimizer/NAME/KEY`. `numbers[name]` is optimizer state
    that is not a tensor, `options[name]` are the options of a parameter's group, `groups` those of all groups
    (a rank may have none of a group's parameters). `random` is the state of this rank's generators.
    """

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Mapping[str, float]]
    options: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    scheduler: Mapping[str, Any] | None
    loss_scale: Mapping[str, Any] | None
    random: Mapping[str, Tensor]
    optimizer: str | None = None  # the class of the optimizer; None where the rank has no parameters


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a checkpoint that all ranks share."""

    updates: int
    method: str
    num_stages: int
    num_ranks: int
    seed: int  # of the model's random numbers


def save(
    folder: str | Path,
    header: Header,
    rank: int,
    state: Callable[[], RankState],
    *,
    together: Callable[[], AbstractContextManager[None]],
) -> None:
    """Writes this rank's part; all ranks do so, on a file system that they share, and rank 0 completes it.

    Each part of it that runs within `together` ends alike on all ranks: where one raises InputError, they all
    do. InputError is raised for a scheduler or optimizer whose options are not plain numbers and strings, and
    where the folder cannot be written or differs from machine to machine; what was written is then removed.
    """
    folder = Path(folder)
    name = f"update_{header.updates:06d}"
    partial = folder / f".{name}.partial"
    with together():
        if rank == 0:
            with _writing(folder):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
    try:
        with together():
            if not partial.is_dir():
                raise InputError(
                    f"{folder} has not what rank 0 has just made there; checkpoints want a folder on a file "
                    "system that all ranks share, by the same path"
                )
            with _writing(folder):
                _write(partial, rank, state())
        with together():
            if rank == 0:
                described = {"schema": _SCHEMA} | asdict(header)
                with _writing(folder):
                    (partial / "checkpoint.json").write_text(_sealed(described), encoding="utf-8")
                    make_durable(partial)
                    _publish(folder, partial, name)
    except InputError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # the disk may be full of it
        raise


def _write(partial: Path, rank: int, state: RankState) -> None:
    tensors = dict(state.tensors) | {f"random/{kind}": value for kind, value in state.random.items()}
    parts = ("numbers", "options", "groups", "scheduler", "loss_scale", "optimizer")
    details: dict[str, Any] = {name: getattr(state, name) for name in parts}
    file = partial / f"rank_{rank}.safetensors"
    save_tensors(tensors, file)
    details["sha256"] = sha256(file)
    (partial / f"rank_{rank}.json").write_text(_sealed(details), encoding="utf-8")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"no checkpoint can be written to {folder}: {error.strerror or error}; what it has stays as it is"
        ) from error


def updates_of(folder: str | Path) -> int:
    """Returns the updates made before a folder's newest checkpoint. Raises what `Checkpoint` raises."""
    return Checkpoint(folder).header.updates


def _publish(folder: Path, partial: Path, name: str) -> None:
    before = _before(folder, name)  # a second one of the same update: what is read until the new one is there
    if (folder / name).exists():
        shutil.rmtree(before, ignore_errors=True)
        (folder / name).rename(before)
    partial.rename(folder / name)
    shutil.rmtree(before, ignore_errors=True)
    pointer = folder / f".{_LATEST}"
    with pointer.open("w", encoding="utf-8") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    pointer.replace(folder / _LATEST)
    for left in folder.glob(".update_*.partial"):  # left by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    # Later ones are those of another run, which is not this one's to delete.
    numbers = _numbers(folder)
    whole = [path for path in numbers if (path / "checkpoint.json").exists()]
    earlier = sorted(
        (path for path in whole if numbers[path] < numbers[folder / name]), key=numbers.__getitem__
    )
    for path in earlier[: 1 - _KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def _before(folder: Path, name: str) -> Path:
    return folder / f".{name}.before"


def _numbers(folder: Path) -> dict[Path, int]:
    """Returns the update's number of each checkpoint in a folder: the names do not sort beyond a million.

    Folders of other names than "update_000123", such as copies that somebody made, are left out.
    """
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("update_*"))
    return {path: int(match[1]) for path, match in named if match is not None}


def _sealed(details: Mapping[str, Any]) -> str:
    """Returns JSON with a hash of its own values, by which a turned bit is noticed."""
    try:
        written = json.loads(json.dumps(details))  # as it will be read: with texts as keys, and lists
    except TypeError as error:
        raise InputError(
            f"the optimizer or scheduler has options that cannot be written as JSON ({error}); use one whose "
            "state is made of numbers, texts and tensors"
        ) from error
    return json.dumps(written | {_HASH: _hash_of(written)}, indent=1)


def _hash_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _newest(folder: Path) -> Path:
    """Returns the checkpoint that `latest` names."""
    pointer = folder / _LATEST
    if not pointer.exists():
        raise InputError(
            f"{folder} holds no checkpoint; the file {_LATEST!r} was expected in it: look for a mistyped "
            "path, or begin without loading if nothing was saved yet"
        )
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise PlanMismatchError(
            f"{pointer} cannot be read ({error}); write the name of a checkpoint of {folder} into it"
        ) from error
    if not name:
        raise PlanMismatchError(f"{pointer} is empty; write the name of a checkpoint of {folder} into it")
    path, before = folder / name, _before(folder, name)
    if not path.exists() and before.exists():
        return before  # killed while another of the same update took its place
    if not path.exists():
        raise PlanMismatchError(
            f"{pointer} names {name!r}, which {folder} does not hold; write the name of a checkpoint of "
            f"{folder} into it"
        )
    return path


class Checkpoint:
    """The newest complete checkpoint in a folder, as `rank` reads it.

    Where several ranks have a tensor of the same name (running statistics of replicas), its own comes first.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0) -> None:
        """Raises InputError where there is no checkpoint, PlanMismatchError where a file of it is missing."""
        self.path = _newest(Path(folder))
        self.header = self._header()
        self._places: dict[str, Path] = {}
        self._hashes: dict[Path, str] = {}  # expected ones of files that are still to be read
        self.numbers: dict[str, Mapping[str, float]] = {}
        self.options: dict[str, Mapping[str, Any]] = {}
        self.groups: Sequence[Mapping[str, Any]] = ()
        self.scheduler: Mapping[str, Any] | None = None
        self.loss_scale: Mapping[str, Any] | None = None
        self.optimizer: str | None = None
        for other in sorted(range(self.header.num_ranks), key=lambda other: (other != rank, other)):
            self._add_rank(other)

    def _header(self) -> Header:
        described = self._json("checkpoint.json")
        if described.pop("schema", None) != _SCHEMA:
            raise PlanMismatchError(f"{self.path} was written by another version; expected schema {_SCHEMA}")
        try:
            return Header(**described)
        except TypeError as error:
            raise self._damaged("checkpoint.json", str(error)) from None

    def _add_rank(self, rank: int) -> None:
        """Adds what a rank has written, where no rank before it had it."""
        details = self._json(f"rank_{rank}.json")
        try:
            self.numbers = {**details["numbers"], **self.numbers}
            self.options = {**details["options"], **self.options}
            self.groups = self.groups or details["groups"]
            self.scheduler = self.scheduler or details["scheduler"]
            self.loss_scale = self.loss_scale or details["loss_scale"]
            self.optimizer = self.optimizer or details.get("optimizer")  # earlier versions wrote none
            self._hashes[self._file(rank)] = details["sha256"]
        except (KeyError, TypeError) as error:
            raise self._damaged(f"rank_{rank}.json", f"no {error}") from None
        with self._open(rank) as file:
            keys = [key for key in file.keys() if not key.startswith("random/")]  # noqa: SIM118
        self._places = {**dict.fromkeys(keys, self._file(rank)), **self._places}

    def require_model(self, parameters: Iterable[ParameterSpec], buffers: Iterable[ParameterSpec]) -> None:
        """Raises PlanMismatchError, naming the first difference, unless the checkpoint has these tensors.

        Buffers that are not persistent are not compared: they are constants of a trace, at one batch size.
        """
        other = f"{self.path} is a checkpoint of another model"
        expected = {f"weights_0/{spec.name}": spec.spec.example_shape for spec in parameters}
        expected |= {f"buffer/{spec.name}": spec.spec.example_shape for spec in buffers if spec.persistent}
        for key, shape in expected.items():
            kind, _, name = key.partition("/")
            what = f"{'buffer' if kind == 'buffer' else 'parameter'} {name!r}"
            if key not in self._places:
                raise PlanMismatchError(f"{other}: it has no {what}")
            with safe_open(self._places[key], framework="pt") as file:
                found = shape_in(file, key)
            if found != shape:
                raise PlanMismatchError(f"{other}: its {what} has shape {found}, and the pipeline's {shape}")
        unknown = [k for k in self._places if k.startswith("weights_0/") and k not in expected]
        if unknown:
            raise PlanMismatchError(
                f"{other}: the pipeline has no parameter {min(unknown).partition('/')[2]!r}"
            )

    def tensors(self, prefixes: Iterable[str]) -> dict[str, Tensor]:
        """Returns the tensors whose name, or its beginning up to a slash, is one of these."""
        wanted = set(prefixes)
        keys_in: dict[Path, list[str]] = {}
        for key, path in self._places.items():
            if key in wanted or key.rpartition("/")[0] in wanted:
                keys_in.setdefault(path, []).append(key)
        found: dict[str, Tensor] = {}
        for path, keys in keys_in.items():
            self._require_whole(path)
            with safe_open(path, framework="pt") as file:
                found |= {key: tensor_in(file, key) for key in keys}
        return {key: found[key] for key in self._places if key in found}

    def _require_whole(self, path: Path) -> None:
        """Raises PlanMismatchError for a file that is not as it was written."""
        if path in self._hashes and sha256(path) != self._hashes.pop(path):
            raise self._damaged(path.name, "its hash is another one")

    def _damaged(self, name: str, how: str) -> PlanMismatchError:
        folder, advice = self.path.parent, ""
        others = [(number, path.name) for path, number in _numbers(folder).items() if path != self.path]
        if others:
            advice = f"; to go on from {max(others)[1]}, write that name into {folder / _LATEST}"
        return PlanMismatchError(f"{self.path / name} is damaged ({how}){advice}")

    def random(self, rank: int) -> dict[str, Tensor]:
        """Returns the state of a rank's generators, by kind."""
        self._require_whole(self._file(rank))
        with self._open(rank) as file:
            keys = [key for key in file.keys() if key.startswith("random/")]  # noqa: SIM118
            return {key.partition("/")[2]: file.get_tensor(key) for key in keys}

    def _file(self, rank: int) -> Path:
        return self.path / f"rank_{rank}.safetensors"

    def _open(self, rank: int) -> Any:
        try:
            return safe_open(self._file(rank), framework="pt")
        except (OSError, SafetensorError) as error:
            raise self._damaged(self._file(rank).name, str(error)) from error

    def _json(self, name: str) -> dict[str, Any]:
        try:
            read = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._damaged(name, str(error)) from error
        if not isinstance(read, dict):
            raise self._damaged(name, "no object of JSON")
        if read.pop(_HASH, None) not in (None, _hash_of(read)):  # earlier versions wrote none
            raise self._damaged(name, "its hash is another one")
        return read


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns the state of this process's generators, by kind."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
