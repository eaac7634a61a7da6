"""How rounds become a loop, line by line: what is counted, and which bodies compute the same."""

from __future__ import annotations

import pytest

from pd2bw_fx.passes.codegen.attributes import Attributes
from pd2bw_fx.passes.codegen.loops import entries, rolling, rounds
from pd2bw_fx.passes.codegen.loops.counted import counting, spelled
from pd2bw_fx.passes.codegen.loops.rolling import in_rounds
from pd2bw_fx.passes.codegen.loops.tokens import Line, computed, line_of
from pd2bw_fx.passes.codegen.written import Statement


@pytest.mark.parametrize(
    ("columns", "header", "written"),
    [
        ([["0", "1", "2"]], "for t in range(3):", "x[:, t]"),
        ([["7", "5", "3"]], "for t in range(7, 1, -2):", "x[:, t]"),
        ([["1", "2", "4"]], "for t in (1, 2, 4):", "x[:, t]"),
        ([["0.5", "1.0"]], "for t in (0.5, 1.0):", "x[:, t]"),
        ([["0", "2"], ["2", "4"]], "for t in range(0, 4, 2):", "x[:, t : t + 2]"),
        ([["1", "2"], ["3", "5"]], "for t in range(1, 3):", "x[:, t : 2 * t + 1]"),
        ([["3", "4"], ["4", "3"]], "for t in range(3, 5):", "x[:, t : 7 - t]"),
    ],
)
def test_numbers_are_counted(columns: list[list[str]], header: str, written: str) -> None:
    line = line_of("x[:, 11]" if len(columns) == 1 else "x[:, 11:12]")
    places = [at for at, token in enumerate(line.tokens) if token.kind == "number"]
    found = counting({(0, at): column for at, column in zip(places, columns, strict=True)}, len(columns[0]))
    assert found is not None
    assert found.header("t") == header
    tokens = [found.tokens.get((0, at), token) for at, token in enumerate(line.tokens)]
    assert spelled(tokens, "t") == written


def test_numbers_that_no_counter_gives() -> None:
    assert counting({(0, 0): ["1", "2", "4"], (0, 1): ["1", "3", "9"]}, 3) is None
    assert counting({(0, 0): ["0", "2", "4"], (0, 1): ["0", "3", "6"]}, 3) is None


_FILLED = ["a = []", "y = f(x)", "a.append(y)", "y = f(y)", "a.append(y)"]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (["y = f(x)", "z = f(y)"], ["x = f(x)", "x = f(x)"], True),
        (["y = f(x)", "z = f(x)"], ["x = f(x)", "x = f(x)"], False),
        (["y = f(x)", "z = g(y)"], ["y = x", "z = g(f(y))"], False),
        (["y = f(x)", "z = g([y, x])"], ["a = []", "a.append(f(x))", "z = g([*a, x])"], True),
        (["y = f(x)", "z = f(y)", "w = g([z, y])"], [*_FILLED, "w = g(a[::-1])"], True),
        (["y = f(x)", "z = f(y)", "w = g([z, y])"], [*_FILLED, "w = g(a)"], False),
        (["y = f(x)", "z = f(y)", "w = y + 0 + z"], [*_FILLED, "w = sum(a)"], True),
        (["y = f(x)", "z = f(y)", "w = z + 0 + y"], [*_FILLED, "w = sum(a)"], False),
        (["y = f(x)", "z = f(y)", "w = g([z, y])"], [*_FILLED, "b = a[::-1]", "w = g(b)"], True),
        (["y = f(x)", "z = f(y)", "w = g([z, y, x])"], [*_FILLED, "b = [*a[::-1], x]", "w = g(b)"], True),
        (["y = f(x)", "z = f(y)", "w = g([z, y, x])"], [*_FILLED, "b = [*a, x]", "w = g(b)"], False),
        (["b = f(x)", "w = g([x, x])"], ["b = [x, x]", "b = f(x)", "w = g(b)"], False),
    ],
)
def test_bodies_compute_the_same_whatever_their_names(
    one: list[str], other: list[str], is_same: bool
) -> None:
    bodies = [list(computed(map(line_of, lines))) for lines in (one, other)]
    assert (bodies[0] == bodies[1]) == is_same


def test_a_long_body_that_has_no_loop_is_not_read_again_from_every_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []

    def counted_line(text: str, *, is_loop: bool = False) -> Line:
        read.append(text)
        return line_of(text, is_loop=is_loop)

    for module in (entries, rounds):
        monkeypatch.setattr(module, "line_of", counted_line)
    body = [
        Statement(text)
        for n in range(50)
        for text in (f"y = x * {n} + {n * n}.5", f"z = y.roll({n**3})", "x = x + z")
    ]
    in_rounds(body, Attributes("", {}.get, {}.get), ())

    assert len(read) <= 3 * len(body)


@pytest.mark.parametrize(
    ("line", "returned"),
    [
        ("h_{} = cell(given_{})", "return torch.stack([{}])"),
        ("h_{} = cell(h_{}, x[:, {}])", "return {}"),
    ],
)
def test_lines_that_take_or_give_what_crosses_a_cut_one_by_one_are_not_tried_as_rounds(
    line: str, returned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    class CountedRounds(rounds.Rounds):
        def __init__(self, body: entries.BodyLines, start: int, length: int) -> None:
            tried.append(start)
            super().__init__(body, start, length)

    monkeypatch.setattr(rolling, "Rounds", CountedRounds)
    body = [Statement(line.format(n + 1, n, n)) for n in range(200)]
    body.append(Statement(returned.format(", ".join(f"h_{n + 1}" for n in range(200)))))
    in_rounds(body, Attributes("", {}.get, {}.get), ())

    assert not tried
