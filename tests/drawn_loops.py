"""The source of a model with loops over numbers, drawn at random: cells over time, shared layers, lists."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

LENGTH = 6

_HEAD = f"""\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.gru = nn.GRUCell(8, 8)
        self.lstm = nn.LSTMCell(8, 8)
        self.mix = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range({LENGTH}))
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, {LENGTH}))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.embed(x)
        h = x.mean(1)
        c = torch.zeros_like(h)
        y = h + 1
"""


def drawn_loops(seed: int) -> str:
    """Its forward takes (batch, LENGTH, 8), and returns a loss."""
    return _HEAD + "".join(f"        {line}\n" for line in _Writer(random.Random(seed)).body())


@dataclass
class _Writer:
    draw: random.Random
    lists: list[str] = field(default_factory=list)  # in what is being written
    number: int = 0

    def body(self) -> Iterator[str]:
        results = ["h", "y"]
        for _ in range(self.draw.randint(1, 3)):
            if self.draw.random() < 0.3:
                yield self.draw.choice(["y = self.mix(y)", "h = h + y", "c = c * 0.5", "y = h - c"])
            filled = [self.fresh("outs") for _ in range(self.draw.choice([0, 1, 1, 2]))]
            yield from (f"{name} = []" for name in filled)
            self.lists = filled
            yield from self.loop()
            for name in filled:
                made = self.fresh("made")
                yield f"{made} = {self.joined(name)}"
                results.append(made)
        yield f"total = {' + '.join(f'self.head({name}).square().mean()' for name in results)}"
        yield 'return {"loss": total}'

    def fresh(self, name: str) -> str:
        self.number += 1
        return f"{name}_{self.number}" if self.draw.random() < 0.5 else f"{name}{'abcdefghijk'[self.number]}"

    def loop(self, depth: int = 0) -> Iterator[str]:
        counter = self.draw.choice(["t", "step", "i"]) + ("" if depth == 0 else "_inside")
        spans = [f"range({LENGTH})", f"range(1, {LENGTH})", "range(0, 6, 2)", "range(5, -1, -1)"]
        over = "range(2)" if depth else self.draw.choice(spans)
        yield f"for {counter} in {over}:"
        body = [list(self.statement(counter, depth)) for _ in range(self.draw.randint(1, 4))]
        kept = self.draw.choice(["h", "y", "self.mix(h)", "y * c"])
        body += [[f"{name}.append({kept})"] for name in self.lists]
        self.draw.shuffle(body)
        yield from (f"    {line}" for lines in body for line in lines)

    def statement(self, counter: str, depth: int) -> Iterator[str]:
        t = counter
        kind = self.draw.randrange(16 if depth == 0 else 13)
        yield from [
            [f"y = x[:, {t}]"],
            [f"y = x[:, {t} : {t} + 2].mean(1) + y"],
            [f"y = x[:, : {t} + 1].sum(1)"],
            [f"h = self.gru(x[:, {t}], h)"],
            ["h, c = self.lstm(y, (h, c))"],
            [f"h, _ = self.lstm(x[:, {t}], (h, c))"],
            ["h = torch.tanh(self.mix(h) + y)"],
            [f"h = self.steps[{t}](h)"],
            [f"c = c + self.scales[{t}] * h"],
            [f"y = y * ({t} / 4)"],
            [f"y = y + {t}"],
            ["before = h", "h = F.relu(self.mix(h))", "h = h + before"],
            [f"y = x[:, {LENGTH - 1} - {t}] - y"],
            ["for layer in self.layers:", "    h = layer(h)"],
            [f"if {t} % 2:", "    y = self.mix(y)"],
            list(self.loop(depth=1)) if depth == 0 else [],
        ][kind]

    def joined(self, name: str) -> str:
        return self.draw.choice(
            [
                f"torch.stack({name}, dim=1).mean(1)",
                f"torch.stack({name}[::-1], dim=1)[:, 0]",
                f"torch.cat([h, *{name}], dim=0)",
                f"sum({name})",
                f"{name}[-1] + {name}[0]",
                f"torch.stack([y, *{name}]).sum(0)",
            ]
        )
