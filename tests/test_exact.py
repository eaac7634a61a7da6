"""The normal form of whole models computes what the models do, in training, at every batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pd2bw_fx.models.bert import Bert, BertConfig
from pd2bw_fx.models.encdec import EncDec, EncDecConfig
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.models.mlp import MLP, MLPConfig
from pd2bw_fx.models.moe import MoE, MoEConfig
from pd2bw_fx.models.resnet import ResNet, ResNetConfig
from pd2bw_fx.models.vgg import VGG, VGGConfig
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.trace import trace
from tests.exact import Batch, assert_same, double, graph_of
from tests.slow import slow

VOCABULARY = 61


OWN_MODELS = {
    "mlp": lambda: MLP.from_config(MLPConfig.small()),
    "gpt": lambda: GPT.from_config(GPTConfig.small()),
    "bert": lambda: Bert.from_config(BertConfig.small()),
    "resnet": lambda: ResNet.from_config(ResNetConfig.small()),
    "vgg": lambda: VGG.from_config(VGGConfig.small()),
    "encdec": lambda: EncDec.from_config(EncDecConfig.small()),
    "moe": lambda: MoE.from_config(MoEConfig.small()),
}


@pytest.mark.parametrize("name", OWN_MODELS)
def test_the_projects_models_are_exact_with_dropout_at_every_batch_size(name: str) -> None:
    torch.manual_seed(0)
    model: Any = OWN_MODELS[name]().double().train()
    graph = normalise(trace(model, model.example_inputs(4)))

    for batch_size in (4, 3, 1):
        values = [v.double() if v.is_floating_point() else v for v in model.example_inputs(batch_size)]
        assert_same(model, graph, dict(zip(graph.inputs, values, strict=True)))


def _tokens(batch_size: int) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (batch_size, 7))
    mask = (torch.arange(7) < torch.randint(3, 8, (batch_size, 1))).long()
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def _images(batch_size: int) -> Batch:
    return {"pixel_values": torch.randn(batch_size, 3, 32, 32), "labels": torch.randint(0, 3, (batch_size,))}


def _hugging_face(name: str) -> tuple[nn.Module, Callable[[int], Batch]]:
    transformers = pytest.importorskip("transformers")
    special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    width = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "gpt2":
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, use_cache=False, **drops, **special)
        return transformers.GPT2LMHeadModel(config), _tokens
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**width, **quiet, **special)), _tokens
    if name == "llama":
        config = transformers.LlamaConfig(**width, num_key_value_heads=1, use_cache=False, **special)
        return transformers.LlamaForCausalLM(config), _tokens
    if name == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "decoder_start_token_id": 0}
        config = transformers.T5Config(**sizes, dropout_rate=0.0, use_cache=False, **special)
        return transformers.T5ForConditionalGeneration(config), _tokens
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(**sizes, num_labels=3)
    ), _images


@pytest.mark.parametrize(
    "name",
    ["gpt2", "bert", "llama", *slow(["t5", "resnet"])],
)
def test_hugging_face_models_are_exact_in_training_mode_at_every_batch_size(name: str) -> None:
    torch.manual_seed(0)
    model, batch = _hugging_face(name)
    model = model.double().train()
    graph = graph_of(model, double(batch(4)))

    assert graph.loss == "loss"
    assert all(
        not operator.target.split(".")[1].endswith("_") or operator.writes_buffers
        for operator in graph.operators.values()
        if operator.target.startswith("aten.") and not operator.target.startswith("aten.__")
    )
    for batch_size in (4, 3, 1):
        # Run eagerly, Llama looks whether a mask masks anything, and leaves it to the kernel if not.
        tolerance = 1e-12 if name == "llama" else 0.0
        assert_same(model, graph, double(batch(batch_size)), tolerance=tolerance)
