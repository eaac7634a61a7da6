"""Models that people have go the whole way unchanged: in training mode, with labels, dropout as configured.

Built from small configurations, never downloaded. Each goes through trace, normalise, analytic costs,
coarsen, partition and codegen, and the stages are held against the live model on loss, every gradient and
every buffer. The whole list of models is `benchmarks/coverage_models.py`'s.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.coverage_models import CASES, built, words
from benchmarks.generated_code import page
from benchmarks.put_through import Through, put_through
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.program import tensors
from pd2bw_fx.stage import build_module
from tests.slow import slow

BY_NAME = {case.name: case for case in CASES}

# Traced, its attention is given a mask where the model itself takes the kernel that needs none.
OTHER_KERNEL = {"hf-llama", "hf-mixtral"}


@functools.cache
def through(name: str) -> Through:
    return put_through(*built(BY_NAME[name]))


# Each has a sibling that is built from the same parts, or more of them.
SIBLINGS = (
    "hf-bert-mask", "hf-llama-mask", "hf-t5-mask", "hf-mistral-mask", "hf-qwen2-mask", "hf-vit",
    "hf-convnext", "hf-deberta",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "hf-gpt2", "hf-gpt2-mask", "hf-bert", "hf-llama", "hf-t5", "hf-resnet", "hf-roberta-mask",
        "hf-qwen3-mask", "hf-mixtral", "hf-swin", "hf-whisper", "hf-deberta-v2",
        *slow(SIBLINGS),
    ],
)  # fmt: skip
def test_the_stages_train_as_the_model_does_bit_for_bit(name: str) -> None:
    found = through(name)

    assert found.traced.report.tracer == "export"
    assert found.traced.dynamic_batch
    assert found.verification.with_random_numbers
    if name in OTHER_KERNEL:
        assert found.verification.worst.relative < 1e-15
    else:
        assert found.verification.exact


@pytest.mark.parametrize("name", ["hf-gpt2", "hf-bert", "hf-t5"])
def test_tied_weights_are_one_parameter_with_one_gradient(name: str) -> None:
    found = through(name)
    model, _ = built(BY_NAME[name])

    assert set(found.graph.parameters) == {name for name, _ in model.named_parameters()}
    held = [set(program.parameters) for program in found.programs]
    tied = next(p.name for p in found.graph.parameters.values() if p.tied_names)
    assert all(tied in names for names in held)
    assert any(tied in program.ties.values() for program in found.programs)
    assert "tied to" in found.programs[-1].source


@pytest.mark.parametrize("name", ["hf-gpt2-mask", "hf-t5"])
def test_stages_run_at_another_batch_size_than_the_traced_one(name: str) -> None:
    model, inputs = built(BY_NAME[name])
    found = put_through(model, inputs, 3)
    larger = {key: torch.cat([value, value.flip(0)]) for key, value in inputs.items()}
    assert found.traced.call is not None

    torch.manual_seed(3)
    expected = found.traced.call(larger)
    torch.manual_seed(3)
    values: dict[str, torch.Tensor] = {}
    loss = None
    for program in found.programs:
        module = build_module(program, tensors(found.graph))
        returned = module(*(larger[p.value] if p.source is None else values[p.value] for p in program.inputs))
        results = returned if isinstance(returned, tuple) else (returned,)
        for port, value in zip(program.outputs, results, strict=True):
            values[port.value] = value
            loss = value if port.model_output == "loss" else loss

    assert loss is not None
    assert torch.equal(loss, expected["loss"])


def test_no_operator_is_printed_by_its_registered_name() -> None:
    for name in ("hf-gpt2", "hf-t5", "hf-swin"):
        assert not any("torch.ops" in program.source for program in through(name).programs)


def test_the_page_that_shows_a_generated_stage_is_current() -> None:
    written = (Path(__file__).parent.parent / "docs" / "GENERATED_CODE.md").read_text()
    if f"transformers {transformers.__version__}," not in written:
        pytest.skip("the page quotes line numbers of another release of transformers")

    assert written == page()


def test_a_llama_of_8_billion_parameters_is_printed_without_a_weight_in_memory() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=8,
                num_attention_heads=64, num_key_value_heads=8,
            )
        ).to(torch.bfloat16)  # fmt: skip
        tokens = torch.zeros(2, 512, dtype=torch.int64)
    cluster = Cluster.uniform(4, memory_bytes="80 GiB")

    traced = trace(model, (), {"input_ids": tokens, "labels": tokens})
    graph = normalise(traced)
    costs = profile(graph, traced.examples, device=cluster.devices[0], method="analytic")
    plan = partition(coarsen(graph, costs, cluster), cluster, num_stages=4)
    programs = generate(graph, plan)

    elements = sum(math.prod(p.spec.example_shape or ()) for p in graph.parameters.values())
    assert elements == sum(p.numel() for p in model.parameters()) > 8e9
    assert all(tensor.is_meta for tensor in tensors(graph).values() if tensor.numel() > 1000)
    assert len({name for program in programs for name in program.parameters}) == len(graph.parameters)
    assert all(program.source.count("\n") < 500 for program in programs)


def test_a_bert_of_8_layers_prints_about_as_long_as_one_of_4() -> None:
    from transformers import BertConfig, BertForMaskedLM

    def lines(num_layers: int) -> int:
        small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
        torch.manual_seed(0)
        model = BertForMaskedLM(BertConfig(vocab_size=96, num_hidden_layers=num_layers, **small))
        found = put_through(model.double(), {"input_ids": words(), "labels": words(1)})
        assert generate(found.graph, found.plan) == found.programs
        return sum(program.source.count("\n") for program in found.programs)

    assert lines(8) <= 1.1 * lines(4)
