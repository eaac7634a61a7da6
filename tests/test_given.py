"""Programs that torch.export made already: taken as they are, in the one mode that they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram

import pd2bw_fx
from pd2bw_fx.errors import ExportError, TraceError


def exported(*between: nn.Module, training: bool) -> ExportedProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *between, nn.Linear(8, 2)).train(training)
    return torch.export.export(model, (torch.randn(4, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))


def split(program: ExportedProgram | fx.GraphModule) -> pd2bw_fx.Pipeline:
    args = None if isinstance(program, ExportedProgram) else (torch.randn(4, 4),)
    return pd2bw_fx.split(program, args, cluster=2, num_stages=2, costs="analytic")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["program", "module", "module without guards"])
def test_a_program_without_modes_is_exported_in_either(tmp_path: Path, form: str, *, training: bool) -> None:
    program = exported(nn.ReLU(), training=training)
    pipe = split(program if form == "program" else program.module(check_guards=form == "module"))

    for asked in (True, False):
        manifest = pipe.export_onnx(tmp_path / f"{asked}", training=asked)

        assert manifest["compared_with"] == "the original model"
        assert max(manifest["largest_differences_from_model"].values()) < 1e-6


@pytest.mark.parametrize("form", ["program", "module"])
def test_a_program_of_training_is_exported_as_that_alone(tmp_path: Path, form: str) -> None:
    program = exported(nn.BatchNorm1d(8), training=True)
    pipe = split(program if form == "program" else program.module())
    pipe.save(tmp_path / "folder")

    for name, of_training in (("split", pipe), ("loaded", pd2bw_fx.load(tmp_path / "folder"))):
        with pytest.raises(
            ExportError, match="one mode alone: split the model itself to evaluate, or export"
        ):
            of_training.export_onnx(tmp_path / name)
        assert not (tmp_path / name).exists()
        of_training.export_onnx(tmp_path / name, training=True)


class _Returning(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.last, self.form = nn.Linear(4, 4), nn.Linear(4, 4), form

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        loss, error = self.last(hidden).square().mean(), hidden.abs().mean()
        return {
            "loss last": {"error": error, "loss": loss},
            "loss first": {"loss": loss, "error": error},
            "nothing": {"loss": loss, "hidden": None, "error": error},
            "tuple": (loss, None, error),
            "alone": loss,
        }[self.form]


@pytest.mark.parametrize("kind", ["program", "module", "traced by torch.fx"])
@pytest.mark.parametrize("form", ["loss last", "loss first", "nothing", "tuple"])
def test_outputs_have_their_own_names_in_whatever_order_they_are_returned(form: str, kind: str) -> None:
    model, x = _Returning(form), torch.randn(4, 4)
    program = torch.export.export(model, (x,))
    given = {"program": program, "module": program.module(), "traced by torch.fx": fx.symbolic_trace(model)}

    pipe = split(given[kind])

    returned = model(x)
    assert pipe.graph.loss == (None if (form, kind) == ("tuple", "program") else "loss")
    if isinstance(returned, tuple):
        # Of a tuple in an ExportedProgram nothing tells which element has a gradient.
        returned = {"output_0" if kind == "program" else "loss": returned[0], "output_2": returned[2]}
    expected = {name: value for name, value in returned.items() if value is not None}
    found = pipe.run(x)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("kind", ["module", "traced by torch.fx"])
def test_a_graph_that_was_changed_by_hand_trains_on_the_loss_that_it_returns(kind: str) -> None:
    model, x = _Returning("alone"), torch.randn(4, 4)
    program = (
        fx.symbolic_trace(model)
        if kind == "traced by torch.fx"
        else torch.export.export(model, (x,)).module()
    )
    returned = program.graph.output_node()
    (value,) = returned.all_input_nodes
    with program.graph.inserting_before(returned):
        halved = program.graph.call_function(torch.mul, (value, 0.5))
    returned.replace_input_with(value, halved)
    program.recompile()

    pipe = split(program)

    assert pipe.graph.loss == "loss"
    torch.testing.assert_close(pipe.run(x)["loss"], 0.5 * model(x))


@pytest.mark.parametrize("kind", ["module", "traced by torch.fx", "traced by split"])
def test_what_was_split_holds_what_it_held_before(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    x = torch.randn(4, 4)
    if kind == "module":
        given = torch.export.export(model, (x,)).module()
    else:
        given = fx.symbolic_trace(model) if kind == "traced by torch.fx" else model
    held = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    tracer = "fx" if kind == "traced by split" else "auto"

    pipe = pd2bw_fx.split(given, x, cluster=2, costs="analytic", tracer=tracer)

    for state in (given.state_dict(), pipe.state_dict()):
        torch.testing.assert_close(state, held, rtol=0, atol=0)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": self.last(self.cells(x)[0]).square().mean()}


def test_a_recurrent_layer_in_a_graph_of_torch_fx_is_left_to_torch_export() -> None:
    with pytest.raises(TraceError, match=r"layer cells whole, .* is recurrent, .* torch\.export\.export\("):
        split(fx.symbolic_trace(_Recurrent()))


def test_a_decomposed_program_that_returns_its_buffers_is_refused_with_the_name_of_one() -> None:
    program = exported(nn.BatchNorm1d(8), training=True).run_decompositions()

    with pytest.raises(
        TraceError, match=r"writes '1\.running_mean' by returning it, which run_decompositions"
    ):
        split(program)
