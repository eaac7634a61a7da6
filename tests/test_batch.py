"""Batches: every way of giving one comes to the same named inputs, and wrong ones are refused."""

from __future__ import annotations

from typing import Any

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
        ((X, (A, B.float()), Y), r"pair\[1\] is float32 with 1 dimensions; expected int64 with 1"),
        ((X, (A, 3), Y), r"pair\[1\] is a int; a tensor was expected"),
        ((X[0], (A, B), Y), r"x is float32 with 1 dimensions; expected float32 with 2"),
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

    with pytest.raises(InputError, match="'x' has 6 samples, which cannot be cut into 4 equal"):
        layout.cut(layout.flatten((X, (A, B))), 4)
    with pytest.raises(InputError, match=r"differ in dimension 0 \(x: 6, pair_0: 5, pair_1: 6\)"):
        layout.cut(layout.flatten((X, (A[:5], B))), 2)
    with pytest.raises(InputError, match="traced for 2 only: pass 4 samples"):
        fixed.cut(fixed.flatten(X), 2)
    assert len(fixed.cut(fixed.flatten(X), 3)) == 3


def test_sizes_that_the_program_has_as_numbers_are_kept_to() -> None:
    layout = BatchLayout.of(Model(), (X, (A, B)), {}, Y, sizes={"x": (6, 3), "pair_0": (None, None)})

    assert layout.flatten((X[:2], (A, B), Y))["x"].shape == (2, 3)
    assert layout.flatten((X, (torch.randn(6, 5), B), Y))["pair_0"].shape == (6, 5)
    for known in (layout, BatchLayout.from_json(layout.to_json())):
        with pytest.raises(InputError, match=r"batch's x has shape \(6, 4\), .* made for \(any, 3\)"):
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
        assert list(known.flatten((X, 0.5))) == ["x"]
        assert list(known.flatten({"x": X, "beta": 0.5, "flag": False, "more": {"rate": [1, "a"]}})) == ["x"]
        for wrong, name in (
            ({"beta": 1.0}, r"beta is 1\.0, and the model was traced with 0\.5"),
            ({"beta": 0.5, "flag": True}, "flag is True, and the model was traced with False"),
            ({"beta": 0.5, "more": {"rate": [2, "a"]}}, r"more\['rate'\]\[0\] is 2, .* with 1,"),
        ):
            with pytest.raises(InputError, match=name):
                known.flatten({"x": X, **wrong})


def test_an_argument_that_is_called_targets_is_refused_beside_a_loss_function() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            raise AssertionError("no batch is run here")

    assert BatchLayout.of(Both(), (X, Y)).has_targets is False
    with pytest.raises(InputError, match="has an argument 'targets', as what loss_fn compares with"):
        BatchLayout.of(Both(), (X, Y), {}, Y)


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
