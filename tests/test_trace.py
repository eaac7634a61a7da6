"""Front ends: what they accept, in which order they are tried, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import pd2bw_fx
from pd2bw_fx.errors import InputError, TraceError
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.trace import find_example_inputs, trace


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class _Scaled(nn.Module):
    """Nested and non-tensor arguments, and a dict with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any], *, scale: float = 1.0, mode: str = "sum") -> dict[str, Any]:
        hidden = self.linear(batch["pixels"]) * scale + batch["state"][1]
        loss = hidden.sum() if mode == "sum" else hidden.mean()
        return {"hidden": (hidden, None), "loss": loss, "kind": mode}


def test_export_with_a_dynamic_batch_comes_first() -> None:
    traced = trace(_mlp(), (torch.randn(4, 4),))

    assert traced.report.tracer == "export"
    assert traced.dynamic_batch
    assert traced.report.attempts == ()


def test_nested_arguments_are_flattened_under_the_path_that_leads_to_them() -> None:
    batch = {"pixels": torch.randn(3, 4), "state": (torch.ones(3, 4), torch.zeros(3, 4))}

    traced = trace(_Scaled(), (batch,), {"scale": 2.0, "mode": "mean"})

    assert traced.inputs == ("batch_pixels", "batch_state_0", "batch_state_1")
    assert traced.outputs == ("loss", "hidden_0")
    assert traced.loss == "loss"
    assert any("kind (str)" in note for note in traced.report.notes)
    assert normalise(traced).unused_inputs == ("batch_state_0",)


def test_one_tensor_given_for_two_arguments_stays_two_inputs() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return ((a * self.w).exp() - b).sum()

    x = torch.randn(2, 3)
    graph = normalise(trace(Product(), (x, x)))

    assert graph.unused_inputs == ()
    assert graph.fx is not None
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(graph.fx(a, b)[0], (a.exp() - b).sum())


def test_without_example_inputs_a_plain_module_goes_through_without_shapes() -> None:
    model = _mlp()

    graph = normalise(trace(model))

    assert [operator.parameters for operator in graph.operators.values()] == [
        ("0.weight", "0.bias"),
        (),
        ("2.weight", "2.bias"),
    ]
    assert all(spec.shape is None for operator in graph.operators.values() for spec in operator.outputs)
    x = torch.randn(5, 4)
    assert graph.fx is not None
    assert torch.equal(graph.fx(x)[0], model(x))


def test_a_layer_of_torch_is_a_model_without_example_inputs_too() -> None:
    model = nn.Linear(2, 3)

    pipe = pd2bw_fx.split(model, cluster=1)

    assert pipe.state_dict().keys() == model.state_dict().keys()
    x = torch.randn(4, 2)
    torch.testing.assert_close(pipe.stages[0].module(x), model(x))


def test_a_program_of_the_users_own_is_accepted_as_it_is() -> None:
    model, x = _mlp(), torch.randn(4, 4)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))

    for program, args in ((exported, None), (fx.symbolic_trace(model), (x,))):
        traced = trace(program, args)
        graph = normalise(traced)
        assert traced.report.tracer == "given"
        assert list(graph.parameters) == list(model.state_dict())
        assert graph.fx is not None
        assert torch.equal(graph.fx(x)[0], model(x))
        assert traced.call is not None
        assert torch.equal(traced.call({traced.inputs[0]: x})["output"], model(x))


def test_a_batch_of_one_sample_is_no_constant() -> None:
    graph = normalise(trace(_mlp(), (torch.randn(1, 4),)))

    assert graph.inputs["input"].shape == ("batch", 4)
    assert graph.inputs["input"].example_shape == (1, 4)


def test_a_model_for_one_batch_size_only_is_traced_with_a_warning_that_names_the_reason() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum() if x.shape[0] == 4 else self.linear(x).mean()

    traced = trace(Fixed(), (torch.randn(4, 2),))

    assert traced.report.tracer == "export-static"
    assert traced.report.attempts[0].tracer == "export"
    assert "batch" in traced.report.attempts[0].reason
    assert any("batch size 4 alone" in note for note in traced.report.notes)
    assert normalise(traced).batch_symbol is None


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if hidden.sum() > 0:
            return hidden.sum()
        return hidden.mean()


def test_a_model_that_cannot_be_traced_gets_every_reason_and_the_line_that_stops_it() -> None:
    with pytest.raises(TraceError) as caught:
        trace(_Branching(), (torch.randn(4, 2),))

    message = str(caught.value)
    assert all(f"  {name}: " in message for name in ("export", "export at the example's sizes", "fx"))
    assert "if hidden.sum() > 0" in message
    assert "test_trace.py:" in message
    assert "Try:" in message


class _Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 2, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, last = self.layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
        return last.sum()


def test_packed_sequences_have_advice_of_their_own() -> None:
    inputs = (torch.randn(3, 5, 3), torch.tensor([5, 4, 2]))
    with pytest.raises(TraceError, match="Try: the recurrent layer on the padded batch"):
        trace(_Packing(), inputs)


def test_inputs_that_the_model_rejects_are_told_from_a_model_that_cannot_be_traced() -> None:
    with pytest.raises(InputError, match="mat1 and mat2 shapes cannot be multiplied"):
        trace(_mlp(), (torch.randn(4, 5),))
    with pytest.raises(InputError, match="missing a required argument: 'input'"):
        trace(_mlp(), ())
    with pytest.raises(InputError, match="no example input has a batch dimension"):
        trace(_mlp(), (torch.tensor(1.0),))
    with pytest.raises(InputError, match="expected a tuple"):
        trace(_mlp(), torch.randn(4, 4))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected one of 'auto', 'export', "):
        trace(_mlp(), (torch.randn(4, 4),), tracer="dynamo")


def test_without_example_inputs_the_advice_is_to_pass_some() -> None:
    with pytest.raises(TraceError, match="Try: example inputs"):
        trace(_Branching())


def test_an_autocast_around_the_call_is_not_the_models_own() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        traced = trace(_mlp(), (torch.randn(4, 4),))
        graph = normalise(traced)

    assert any("autocast" in note for note in traced.report.notes)
    dtypes = {spec.dtype for operator in graph.operators.values() for spec in operator.outputs}
    assert dtypes == {torch.float32}


class _SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 2)

    def forward(self, steps: Tensor, start: Tensor, table: Tensor, labels: Tensor) -> Tensor:
        last = self.layer(steps)[0][-1] + start
        return F.cross_entropy(last + table.sum(), labels)


def test_an_input_without_the_batch_in_front_is_told() -> None:
    inputs = (torch.randn(7, 4, 3), torch.randn(4, 2), torch.randn(5), torch.tensor([0, 1, 1, 0]))
    notes = trace(_SequenceFirst(), inputs).report.notes
    steps, table = (note for note in notes if note.startswith("input"))

    assert steps.startswith("input steps of shape (7, 4, 3) does not have the batch size 4 in dimension 0")
    assert steps.endswith("if dimension 1 is its batch, transpose it in the forward")
    assert table.endswith("every microbatch gets all of it")


def test_a_model_in_evaluation_mode_is_traced_as_it_is_and_said_to_be() -> None:
    traced = trace(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval(), (torch.randn(3, 2),))

    assert any("evaluation mode" in note for note in traced.report.notes)
    assert not any(operator.is_random for operator in normalise(traced).operators.values())


def test_example_inputs_are_the_models_own_or_none() -> None:
    class Offering(nn.Linear):
        def example_inputs(self) -> dict[str, Tensor]:
            return {"input": torch.zeros(2, self.in_features)}

    offered = find_example_inputs(Offering(3, 3))

    assert offered is not None
    assert offered[0] == ()
    assert offered[1]["input"].shape == (2, 3)
    assert find_example_inputs(nn.Linear(3, 3)) is None


def test_a_hugging_face_language_model_gets_its_dummy_tokens_as_labels() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20)

    offered = find_example_inputs(transformers.GPT2LMHeadModel(config))

    assert offered is not None
    assert offered[0] == ()
    assert torch.equal(offered[1]["labels"], offered[1]["input_ids"])
    assert offered[1]["use_cache"] is False


def test_tracing_leaves_the_model_and_the_generators_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()

    with torch.no_grad():
        graph = normalise(trace(model, (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),)))

    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert graph.operators["linear"].requires_grad


def test_hooks_that_a_first_forward_registers_are_not_left_behind() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.watched = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.watched:
                self.linear.register_forward_hook(lambda module, args, output: output + 1)
                self.watched = True
            return self.linear(x).sum()

    model, x = Watched(), torch.randn(3, 4)

    trace(model, (x,))

    assert not model.linear._forward_hooks
    assert model(x).item() == pytest.approx(
        (torch.nn.functional.linear(x, *model.parameters()) + 1).sum().item()
    )


class _Shifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden.roll(int(hidden.abs().max()), 1)).square().mean()


@pytest.mark.parametrize("tracer", ["auto", "export-as-example"])
def test_the_front_end_that_has_failed_is_not_what_to_try(tracer: str) -> None:
    with pytest.raises(TraceError) as raised:
        trace(_Shifting(), (torch.randn(4, 6),), tracer=tracer)
    advice = str(raised.value).rpartition("Try: ")[2]
    assert "ask the tensor itself or its item(), as `if x.max() > 1` does" in advice
    assert "tracer=" not in advice
