"""Batches: every way of giving one comes to the same named inputs, and wrong ones are refused."""

from __future__ import annotations

import copy
import enum
import json
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.batch import BatchLayout
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.trace.inputs import flatten_arguments
from pd2bw_fx.size_range import SizeRange


class Model(nn.Module):
    def forward(
        self, x: Tensor, pair: Any = None, *rest: Tensor, extra: Any = None, mask: Any = None
    ) -> Tensor:
        raise AssertionError("no batch is run here")


X, A, B, Y = torch.randn(6, 3), torch.randn(6, 2), torch.arange(6), torch.randn(6)
TABLE = torch.randn(4, 4)
EXTRA = {"first image": A, "nested": [B, {"t": TABLE}]}


@pytest.mark.parametrize(
    ("args", "kwargs", "targets"),
    [
        ((X,), {}, None),
        ((X, (A, B)), {}, Y),
        ((X, (A, B), Y, TABLE), {"mask": B}, None),
        ((), {"mask": B, "x": X}, None),
        ((X,), {"extra": EXTRA, "mask": A}, {"labels": B, "weights": (Y,)}),
    ],
)
def test_inputs_have_the_names_and_the_order_of_the_trace(args: Any, kwargs: Any, targets: Any) -> None:
    traced = flatten_arguments(Model(), args, kwargs, targets)

    layout = BatchLayout.of(Model(), args, kwargs, targets)

    assert tuple(known.name for known in layout.inputs) == traced.names


def test_tuple_list_dict_and_tensor_are_the_same_batch() -> None:
    layout = BatchLayout.of(Model(), (X, (A, B)), {}, Y)
    expected = {"x": X, "pair_0": A, "pair_1": B, "targets": Y}

    for batch in [(X, (A, B), Y), [X, [A, B], Y], {"x": X, "pair": (A, B), "targets": Y}]:
        found = layout.flatten(batch)
        assert list(found) == list(expected)
        assert all(found[name] is expected[name] for name in expected)
    assert BatchLayout.of(Model(), (X,)).flatten(X) == {"x": X}


def test_tensors_are_one_batch_where_they_are_as_many_as_its_arguments() -> None:
    layout = BatchLayout.of(Model(), (X, A), {}, Y)

    with pytest.raises(
        InputError, match=r"batches is a single batch; .* such as \[\(x, pair, targets\), \.\.\]"
    ):
        layout.require_batches((X, A, Y))
    layout.require_batches([X, X])
    layout.require_batches([(X, A, Y)])
    with pytest.raises(
        InputError, match="the batch is one tensor, which would be its targets; expected x, pair"
    ):
        layout.flatten(X)


def test_what_has_no_batch_dimension_goes_to_every_microbatch_whole() -> None:
    layout = BatchLayout.of(Model(), (X,), {"extra": EXTRA})

    pieces = layout.cut(layout.flatten({"x": X, "extra": EXTRA}), 3)

    assert [piece["x"].tolist() for piece in pieces] == [X[0:2].tolist(), X[2:4].tolist(), X[4:6].tolist()]
    assert [piece["extra_nested_0"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]
    assert all(piece["extra_nested_1_t"] is TABLE for piece in pieces)


def test_a_layout_survives_json() -> None:
    layout = BatchLayout.of(Model(), (X, (A, B), Y), {"extra": EXTRA}, Y, microbatch_sizes=SizeRange.only(2))

    assert BatchLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ((X, (A, B)), r"no 'pair'.*found 'x', 'targets'|is a tuple"),
        (
            {"x": X, "targets": Y},
            r"no 'pair' \(found 'x', 'targets'\); expected x, pair\[0\], pair\[1\], targets",
        ),
        ((X, (A,), Y), r"no pair\[1\]: 1 is not in a tuple"),
        ((X, (A, B.float()), Y), r"pair\[1\] is float32 with 1 dimension; expected int64 with 1"),
        ((X, (A, 3), Y), r"pair\[1\] is a int; a tensor was expected"),
        ((X.to_sparse(), (A, B), Y), r"x is in layout torch.sparse_coo; a dense tensor with values was exp"),
        ((X.to("meta"), (A, B), Y), r"x has no values, on the meta device; a dense tensor with values was"),
        ((X[0], (A, B), Y), r"x is float32 with 1 dimension; expected float32 with 2"),
        (X, r"the batch is one tensor, which would be its targets; expected x, pair\[0\]"),
        ([Y], r"the batch is one tensor, which would be its targets"),
        ("words", r"the batch is a str; expected a tuple of the model's arguments"),
        ({"x": X, "pair": (A, B), "targets": Y, "mask": A}, r"has 'mask', which the example inputs did not"),
    ],
)
def test_a_wrong_batch_is_refused_by_name(batch: Any, complaint: str) -> None:
    layout = BatchLayout.of(Model(), (X, (A, B)), {}, Y)

    with pytest.raises(InputError, match=complaint):
        layout.flatten(batch)


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    layout = BatchLayout.of(Model(), (X, (A, B)))
    fixed = BatchLayout.of(Model(), (X,), microbatch_sizes=SizeRange.only(2))

    told = r"6 samples, which cannot be cut into 4 equal .* multiple of 4, set microbatches_per_update=3, or"
    with pytest.raises(InputError, match=told):
        layout.cut(layout.flatten((X, (A, B))), 4)
    with pytest.raises(InputError, match=r"'x' has 3 samples, .* cut into 4 microbatches; .*drop_last=True"):
        layout.cut(layout.flatten((X[:3], (A[:3], B[:3]))), 4)
    parts = [fixed.flatten(X[:2]), fixed.flatten(X[:0])]
    with pytest.raises(InputError, match=r"'x' has 0 samples in microbatch 1; .*drop_last=True"):
        fixed.pieces(parts, 2)
    told = (
        r"differ in dimension 0 \(x: 6, pair\[0\]: 5, pair\[1\]: 6\).* split with another number of samples"
    )
    with pytest.raises(InputError, match=told):
        layout.cut(layout.flatten((X, (A[:5], B))), 2)
    with pytest.raises(InputError, match="traced for 2 only: pass 4 samples"):
        fixed.cut(fixed.flatten(X), 2)
    with pytest.raises(InputError, match=r"^pair\[0\] has 6 samples, which cannot be cut into 4 equal"):
        layout.restricted(["pair_0"]).cut({"pair_0": A}, 4)
    assert len(fixed.cut(fixed.flatten(X), 3)) == 3


def test_sizes_that_the_program_has_as_numbers_are_kept_to() -> None:
    layout = BatchLayout.of(Model(), (X, (A, B)), {}, Y, sizes={"x": (6, 3), "pair_0": (None, None)})

    assert layout.flatten((X[:2], (A, B), Y))["x"].shape == (2, 3)
    assert layout.flatten((X, (torch.randn(6, 5), B), Y))["pair_0"].shape == (6, 5)
    for known in (layout, BatchLayout.from_json(layout.to_json())):
        with pytest.raises(
            InputError, match=r"batch's x has shape \(6, 4\), .* made for \(any, 3\); .*dynamic_shapes=\.\.\)"
        ):
            known.flatten((torch.randn(6, 4), (A, B), Y))

    whole = BatchLayout.of(Model(), (X,), {"mask": TABLE}, sizes={"mask": (4, 4)})
    with pytest.raises(InputError, match=r"batch's mask has shape \(6, 4\), .* made for \(4, 4\)"):
        whole.flatten({"x": X, "mask": torch.randn(6, 4)})


def test_numbers_and_flags_are_those_that_the_model_was_traced_with() -> None:
    class Annealed(nn.Module):
        def forward(self, x: Tensor, beta: float, *, flag: bool = False, more: Any = None) -> Tensor:
            raise AssertionError("no batch is run here")

    layout = BatchLayout.of(Annealed(), (X, 0.5), {"more": {"rate": [1, "a"]}})

    for known in (layout, BatchLayout.from_json(layout.to_json())):
        assert list(known.flatten({"x": X, "beta": 0.5, "more": {"rate": (1.0, "a")}})) == ["x"]
        assert list(known.flatten({"x": X, "beta": 0.5, "flag": False, "more": {"rate": [1, "a"]}})) == ["x"]
        for wrong, name in (
            ({"beta": 1.0}, r"beta is 1\.0, and the model was traced with 0\.5"),
            ({"flag": True}, "flag is True, and the model was traced with False"),
            ({"more": {"rate": [2, "a"]}}, r"more\['rate'\]\[0\] is 2, .* with 1,"),
        ):
            with pytest.raises(InputError, match=name):
                known.flatten({"x": X, "beta": 0.5, "more": {"rate": [1, "a"]}, **wrong})


def test_what_is_nested_deeper_than_in_the_example_is_refused() -> None:
    nested = {"views": [X, X], "mask": None, "rates": (1, 2)}
    layout = BatchLayout.of(Model(), (X,), {"extra": nested})
    Views = namedtuple("Views", "one other")

    for alike in ({"views": (X, X)}, {"views": Views(X, X)}, {"rates": [1, 2]}, {"more": None}):
        assert len(layout.flatten({"x": X, "extra": {**nested, **alike}})) == 3
    for wrong, name in (
        ({"views": [X, X, X]}, r"has extra\['views'\]\[2\], which the example inputs did not have"),
        ({"views": [X, X, None]}, r"has extra\['views'\]\[2\], which"),
        ({"mask": X}, r"has extra\['mask'\], which"),
        ({"more": X}, r"has extra\['more'\], which"),
        ({"more": 2}, r"has extra\['more'\], which"),
        ({"rates": (1, 2, 3)}, r"has extra\['rates'\]\[2\], which"),
        ({"rates": (1,)}, r"has no extra\['rates'\]\[1\], and the model was traced with 2 there"),
        ({"rates": ()}, r"has no extra\['rates'\]\[0\], and"),
    ):
        with pytest.raises(InputError, match=name):
            layout.flatten({"x": X, "extra": {**nested, **wrong}})


class Mode(enum.Enum):
    TRAIN = 1
    DISTIL = 2


@dataclass
class Options:
    x: Tensor
    tags: tuple[str, ...] = ()
    mode: str | None = None


def scaled(factor: float) -> Any:
    return lambda x: x * factor


@pytest.mark.parametrize(
    ("traced", "other", "said"),
    [
        (Mode.TRAIN, Mode.DISTIL, r"how is Mode\.DISTIL, and the model was traced with Mode\.TRAIN"),
        (np.int64(2), np.int64(5), r"how is np\.int64\(5\), and the model was traced with 2"),
        (torch.float32, torch.int64, r"is torch\.int64, .* with torch\.float32"),
        (slice(0, 4), slice(4, 8), r"is slice\(4, 8, None\), .* with slice\(0, 4, None\)"),
        (torch.relu, torch.tanh, r"is torch\.tanh, .* with torch\.relu"),
        (scaled(2.0), scaled(3.0), r"<lambda>:\d+\[factor=3\.0\], .*\[factor=2\.0\]"),
        (SimpleNamespace(rate=1), SimpleNamespace(rate=2), r"rate=2\), .*rate=1\)"),
        ((1, 2), (1, 2, 3), r"has how\[2\], which the example inputs did not have"),
        ((), (1,), r"how is \[1\], and the model was traced with \[\]"),
        (Options(X, ("a",)), Options(X, ("a", "b")), r"has how\['tags'\]\[1\], which"),
        (Options(X), Options(X, mode="fast"), r"how\['mode'\]"),
    ],
)
def test_other_arguments_that_are_no_tensors_are_those_of_the_trace_too(
    traced: Any, other: Any, said: str
) -> None:
    class Told(nn.Module):
        def forward(self, x: Tensor, how: Any = None, **more: Any) -> Tensor:
            raise AssertionError("no batch is run here")

    by_argument, by_keywords = BatchLayout.of(Told(), (X, traced)), BatchLayout.of(Told(), (X,), {"a": 2})

    for known in (by_argument, BatchLayout.from_json(json.loads(json.dumps(by_argument.to_json())))):
        assert "x" in known.flatten((X, copy.copy(traced)))
        with pytest.raises(InputError, match=said):
            known.flatten((X, other))
        with pytest.raises(InputError, match=r"leaves out how|has no 'how'"):
            known.flatten((X,))
    with pytest.raises(InputError, match="the batch leaves out a, for which"):
        by_keywords.flatten({"x": X})
    with pytest.raises(InputError, match="the batch has 'b', which"):
        by_keywords.flatten({"x": X, "a": 2, "b": 3})


def test_an_argument_that_is_called_targets_is_refused_beside_a_loss_function() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            raise AssertionError("no batch is run here")

    assert BatchLayout.of(Both(), (X, Y)).has_targets is False
    with pytest.raises(InputError, match="is given an argument 'targets', as what loss_fn compares with"):
        BatchLayout.of(Both(), (X, Y), {}, Y)


def test_an_argument_targets_that_is_left_out_leaves_its_name_to_the_loss() -> None:
    class Either(nn.Module):
        def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
            raise AssertionError("no batch is run here")

    layout = BatchLayout.of(Either(), (X,), {}, Y)
    for batch in ((X, Y), {"x": X, "targets": Y}):
        assert layout.flatten(batch)["targets"] is Y
    with pytest.raises(InputError, match="3 entries, one of them for the forward's own argument 'targets'"):
        layout.flatten((X, Y, Y))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return (self.b(self.a(x)) * scale).square().mean()


def test_a_number_that_is_left_out_is_not_the_traced_one_where_the_forward_has_another() -> None:
    x = torch.randn(4, 4)
    pipe = pd2bw_fx.split(Scaled(), (x, 10.0), cluster=2, costs="analytic")
    assert pipe.run((x, 10.0))["loss"].item() > 0
    for left_out in ((x,), {"x": x}):
        with pytest.raises(InputError, match=r"the batch leaves out scale, .* is not the 10\.0 that"):
            pipe.run(left_out)
    assert pd2bw_fx.split(Scaled(), (x,), cluster=2, costs="analytic").run((x, 1.0))


def test_what_goes_by_name_alone_is_said_where_too_much_is_given_in_order() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return self.linear(x * scale)

    pipe = pd2bw_fx.split(
        ByName(), X, {"scale": X}, loss_fn=nn.MSELoss(), example_targets=X, cluster=1, costs="analytic"
    )

    with pytest.raises(
        InputError, match="takes x, scale, targets, of which scale by name alone: give a dict"
    ):
        pipe.run((X, X, X))
    assert set(pipe.run({"x": X, "scale": X, "targets": X})) == {"loss", "output"}
