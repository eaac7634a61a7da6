"""The source of a model drawn at random: classes in lists, sequences and dicts in classes, with the calls and
the weights of any of them reached from anywhere above. All values are (batch, 8)."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

_HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Named(nn.Sequential):
    pass


class Residual(nn.Sequential):
    def forward(self, x):
        for module in self:
            x = x + module(x)
        return x


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x, hidden=None, *, scale=1.0):
        y = self.linear(x)
        if hidden is not None:
            y = y + self.norm(hidden) * scale
        return y, x.mean(-1, keepdim=True)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Pair()
        self.others = nn.ModuleList([Pair(), Pair()])

    def forward(self, x):
        y, mean = self.first(x)
        for i, other in enumerate(self.others):
            y, _ = other(y, mean * x, scale=i + 0.5)
        last, mean = self.first(y, x)
        return last + mean


"""
_WEIGHT, _VECTOR = "weight", "vector"
_LAYERS = {
    "nn.Linear(8, 8)": _WEIGHT,
    "nn.Linear(8, 8, bias=False)": _WEIGHT,
    "nn.LayerNorm(8)": _VECTOR,
    "nn.BatchNorm1d(8)": _VECTOR,
    "nn.Dropout(0.1)": None,
    "nn.GELU()": None,
    "nn.Identity()": None,
    "Pairs()": None,
    "Named(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))": None,
    "Residual(nn.Linear(8, 8), nn.GELU())": None,
}
_NAMES = ("encoder", "norm", "blocks", "proj", "head", "weight", "forward_", "x", "out")
_DEEPEST = 4


@dataclass(frozen=True, slots=True)
class _Layer:
    text: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    text: str
    kind: str = _VECTOR


@dataclass(frozen=True, slots=True)
class _Class:
    name: str
    attributes: Mapping[str, _Thing] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return f"{self.name}()"


@dataclass(frozen=True, slots=True)
class _Holder:
    kind: str  # ModuleList, Sequential or ModuleDict
    members: Mapping[str, _Thing]

    @property
    def text(self) -> str:
        if self.kind == "ModuleDict":
            return f"nn.ModuleDict({{{', '.join(f'{k!r}: {m.text}' for k, m in self.members.items())}}})"
        joined = ", ".join(member.text for member in self.members.values())
        return f"nn.Sequential({joined})" if self.kind == "Sequential" else f"nn.ModuleList([{joined}])"


_Thing = _Layer | _Tensor | _Class | _Holder


@contextmanager
def imported(source: str, file: Path) -> Iterator[ModuleType]:
    """Imports source from a file, since generated code names a model's lines; forgets it after the block."""
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[file.stem]


def drawn_model(seed: int) -> str:
    """Source with a class `Model`, called as model(x, y), which returns its loss."""
    return _Drawing(random.Random(seed)).source()


def _is_called(thing: _Thing) -> bool:
    return isinstance(thing, _Layer | _Class) or (isinstance(thing, _Holder) and thing.kind == "Sequential")


def _reached(text: str, thing: _Thing, depth: int = 0) -> Iterator[tuple[str, _Thing]]:
    """The thing and all that is inside of it, with the expressions for them."""
    yield text, thing
    if depth == _DEEPEST:
        return
    if isinstance(thing, _Class):
        for name, inner in thing.attributes.items():
            yield from _reached(f"{text}.{name}", inner, depth + 1)
    elif isinstance(thing, _Holder):
        for key, inner in thing.members.items():
            yield from _reached(
                f"{text}[{key!r}]" if thing.kind == "ModuleDict" else f"{text}[{key}]", inner, depth + 1
            )
    elif isinstance(thing, _Layer) and _LAYERS[thing.text] is not None:
        yield f"{text}.weight", _Tensor("", str(_LAYERS[thing.text]))


class _Drawing:
    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.classes: list[_Class] = []

    def source(self) -> str:
        count = self.draws.randint(1, 4)
        parts = [_HEAD, *(self._class(f"Block{i}", is_model=False) for i in range(count))]
        return "\n".join([*parts, self._class("Model", is_model=True)])

    def _class(self, name: str, *, is_model: bool) -> str:
        names = self.draws.sample(_NAMES, self.draws.randint(2, 4) if is_model else self.draws.randint(1, 3))
        attributes = {n: self._tensor() if self.draws.random() < 0.15 else self._thing() for n in names}
        init = [f"self.{n} = {a.text}" for n, a in attributes.items()]
        called = [n for n, a in attributes.items() if _is_called(a)]
        if called and self.draws.random() < 0.2:  # a second name
            attributes["again"] = attributes[called[0]]
            init.append(f"self.again = self.{called[0]}")
        reached = [found for n, a in attributes.items() for found in _reached(f"self.{n}", a)]
        weights = [text for text, thing in reached if thing == _Tensor("", _WEIGHT)]
        if len(weights) > 1 and self.draws.random() < 0.15:
            init.append(f"{weights[0]} = {weights[1]}")
        if is_model:  # enough for the stages, whatever else is called
            init.append("self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())")
        self.classes.append(_Class(name, attributes))
        body = self._statements(
            "x", reached, self.draws.randint(3, 7) if is_model else self.draws.randint(1, 4)
        )
        helper = self._statements("h", reached, self.draws.randint(0, 2))
        lines = [
            f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()",
            *(f"        {line}" for line in init), "",
            f"    def forward(self, x{', y' if is_model else ''}):", *(f"        {line}" for line in body),
            *(["        x = x + self.helper(x)"] if helper else []),
            f"        return {'F.mse_loss(self.last(x), y)' if is_model else 'x'}", "",
            "    def helper(self, h):", *(f"        {line}" for line in helper), "        return h", "", "",
        ]  # fmt: skip
        return "\n".join(lines)

    def _tensor(self) -> _Tensor:
        return _Tensor(self.draws.choice(["nn.Parameter(torch.rand(8))", "nn.Buffer(torch.rand(8))"]))

    def _thing(self, depth: int = 0, *, is_called: bool = False) -> _Thing:
        what = self.draws.random()
        if self.classes and what < 0.4:
            return self.draws.choice(self.classes)
        if depth < 2 and what < 0.7:
            kind = (
                "Sequential" if is_called else self.draws.choice(["ModuleList", "Sequential", "ModuleDict"])
            )
            keys: Sequence[str] = [str(i) for i in range(self.draws.randint(1, 3))]
            keys = self.draws.sample(["a", "b1", "0", "x y"], 2) if kind == "ModuleDict" else keys
            inner = kind == "Sequential"
            if self.draws.random() < 0.4:
                return _Holder(kind, dict.fromkeys(keys, self._thing(depth + 1, is_called=inner)))
            return _Holder(kind, {key: self._thing(depth + 1, is_called=inner) for key in keys})
        return _Layer(self.draws.choice(list(_LAYERS)))

    def _statements(self, value: str, reached: Sequence[tuple[str, _Thing]], count: int) -> list[str]:
        return [line for _ in range(count) for line in self._statement(value, reached)]

    def _statement(self, value: str, reached: Sequence[tuple[str, _Thing]]) -> list[str]:
        """Computes `value` anew, with something that can be reached."""
        calls = [text for text, thing in reached if _is_called(thing)]
        own = [text for text in calls if text.count(".") == 1 and "[" not in text]
        holders = [(t, h) for t, h in reached if isinstance(h, _Holder) and h.kind != "ModuleDict"]
        loops = [text for text, holder in holders if all(_is_called(m) for m in holder.members.values())]
        slices = [text for text, holder in holders if holder.kind == "Sequential" and len(holder.members) > 1]
        vectors = [text for text, thing in reached if isinstance(thing, _Tensor) and thing.kind == _VECTOR]
        weights = [text for text, thing in reached if thing == _Tensor("", _WEIGHT)]
        call = self.draws.choice(calls) if calls else "torch.tanh"
        ways = [
            [f"{value} = {self.draws.choice(own or [call])}({value})"],
            [f"{value} = {call}({value})"],
            [f"{value} = {value} + {call}({value})"],
            [f"{value} = checkpoint({call}, {value}, use_reentrant=False)"],
        ]
        if loops:
            ways.append([f"for block in {self.draws.choice(loops)}:", f"    {value} = block({value})"])
        kept = self.draws.choice(["kept", "residual"])
        ways.append([f"{kept} = {value}", f"{value} = {call}({value})", f"{value} = {value} * 0.5 + {kept}"])
        if loops:
            looped = [f"{kept} = {value}", f"{value} = block({value})", f"{value} = {kept} - {value}.sin()"]
            ways.append([f"for block in {self.draws.choice(loops)}:", *(f"    {line}" for line in looped)])
        if slices:
            ways.append(
                [f"{value} = {self.draws.choice(slices)}[{self.draws.choice(['1:', ':1'])}]({value})"]
            )
        if vectors:
            ways.append([f"{value} = {value} * {self.draws.choice(vectors)}"])
        if weights:
            ways.append([f"{value} = F.linear({value}, {self.draws.choice(weights)})"])
        return self.draws.choice([ways[0], *ways])
