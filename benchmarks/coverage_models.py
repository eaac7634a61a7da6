"""The models that go through: each from a small configuration, with weights drawn at random and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import pd2bw_fx.models

BATCH, LENGTH, WORDS = 3, 12, 96

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its inputs, and what `split` is told beside them."""

    name: str
    build: Build
    note: str = ""
    tracer: str = "auto"


def words(seed: int = 0, length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def _mask() -> Tensor:
    """Rows of different lengths, padded on the right."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, -3:], mask[1, -1:] = 0, 0
    return mask


def images(size: int) -> Tensor:
    return torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0))


def language(model: str, config: Any, **config_kwargs: Any) -> Callable[..., Build]:
    """A causal or masked language model by its class, for any inputs beside the text."""

    def with_inputs(**extra: Any) -> Build:
        def build() -> tuple[nn.Module, dict[str, Any]]:
            network = getattr(hf, model)(config(vocab_size=WORDS, **config_kwargs))
            return network, {"input_ids": words(), "labels": words(1)} | {k: v() for k, v in extra.items()}

        return build

    return with_inputs


def vision(model: str, config: Any, size: int = 32, **config_kwargs: Any) -> Build:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        network = getattr(hf, model)(config(num_labels=5, **config_kwargs))
        return network, {"pixel_values": images(size), "labels": torch.tensor([1, 4, 0])}

    return build


def _own(name: str) -> Build:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        network: Any = pd2bw_fx.models.build(name)
        inputs = network.example_inputs(batch_size=BATCH)
        names = list(network.forward.__code__.co_varnames[1:])
        return network, dict(zip(names, inputs, strict=False))

    return build


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LLAMA = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64}
BERT = SMALL | {"max_position_embeddings": 64}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
TWO_BLOCKS = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}


def _t5() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config), {"input_ids": words(), "labels": words(1, 7)}


def _t5_with_mask() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = _t5()
    return model, inputs | {"attention_mask": _mask()}


def _whisper() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.WhisperConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=16, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    features = torch.randn(BATCH, 8, 32, generator=torch.Generator().manual_seed(0))
    return hf.WhisperForConditionalGeneration(config), {"input_features": features, "labels": words(1, 7)}


def _resnet() -> Build:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}
    return vision("ResNetForImageClassification", hf.ResNetConfig, layer_type="basic", **sizes)


def _bart() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.BartConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config), {"input_ids": words(), "labels": words(1, 7)}


def _clip() -> tuple[nn.Module, dict[str, Any]]:
    """Without its contrastive loss, which is no mean over the samples: all of its outputs are compared."""
    ends = {"eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1, "vocab_size": WORDS}
    config = hf.CLIPConfig(
        text_config=SMALL | ends | {"max_position_embeddings": 32},
        vision_config=SMALL | {"image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    return hf.CLIPModel(config), {"input_ids": words(), "pixel_values": images(32)}


def _wav2vec2() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.Wav2Vec2Config(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    waves = torch.randn(BATCH, 400, generator=torch.Generator().manual_seed(0))
    return hf.Wav2Vec2ForSequenceClassification(config), {
        "input_values": waves,
        "labels": torch.tensor([0, 1, 0]),
    }


def _detr() -> tuple[nn.Module, dict[str, Any]]:
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = hf.DetrConfig(
        backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=5, num_labels=3,
    )  # fmt: skip
    return hf.DetrForObjectDetection(config), {"pixel_values": images(64)}


def _segformer() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.SegformerConfig(**TWO_BLOCKS, decoder_hidden_size=16, num_labels=4)
    classes = torch.randint(0, 4, (BATCH, 32, 32), generator=torch.Generator().manual_seed(1))
    return hf.SegformerForSemanticSegmentation(config), {"pixel_values": images(32), "labels": classes}


_gpt2 = language("GPT2LMHeadModel", hf.GPT2Config, **_GPT2)
_bert = language("BertForMaskedLM", hf.BertConfig, **BERT)
_roberta = language("RobertaForMaskedLM", hf.RobertaConfig, **BERT, pad_token_id=1)
_llama = language("LlamaForCausalLM", hf.LlamaConfig, **LLAMA)
_mistral = language("MistralForCausalLM", hf.MistralConfig, **LLAMA, sliding_window=4)
_qwen2 = language("Qwen2ForCausalLM", hf.Qwen2Config, **LLAMA)
_qwen3 = language("Qwen3ForCausalLM", hf.Qwen3Config, **LLAMA, head_dim=8)
_mixtral = language("MixtralForCausalLM", hf.MixtralConfig, **LLAMA, **_EXPERTS, output_router_logits=True)
_mamba = language("MambaForCausalLM", hf.MambaConfig, hidden_size=32, num_hidden_layers=2, state_size=4)
_deberta = language("DebertaForMaskedLM", hf.DebertaConfig, **BERT, relative_attention=True)
_deberta_v2 = language("DebertaV2ForMaskedLM", hf.DebertaV2Config, **BERT, relative_attention=True)

_BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
_MAMBA2 = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8}
_OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
_XLNET = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
# Beyond the models that this project is made for: whatever else there is works, or says why not.
_OTHERS = (
    Case("hf-albert", language("AlbertForMaskedLM", hf.AlbertConfig, **BERT, embedding_size=16)()),
    Case("hf-bart", _bart),
    Case("hf-bloom", language("BloomForCausalLM", hf.BloomConfig, **_BLOOM)()),
    Case("hf-clip", _clip, "its outputs"),
    Case("hf-detr", _detr, "clamps where a value is not finite", tracer="export-as-example"),
    Case("hf-electra", language("ElectraForMaskedLM", hf.ElectraConfig, **BERT, embedding_size=16)()),
    Case("hf-falcon", language("FalconForCausalLM", hf.FalconConfig, hidden_size=32,
                                num_hidden_layers=2, num_attention_heads=4)()),
    Case("hf-gemma2", language("Gemma2ForCausalLM", hf.Gemma2Config, **LLAMA, head_dim=8,
                                sliding_window=4)(), "sliding window"),
    Case("hf-gpt-neox", language("GPTNeoXForCausalLM", hf.GPTNeoXConfig, **BERT)()),
    Case("hf-mamba2", language("Mamba2ForCausalLM", hf.Mamba2Config, **_MAMBA2, expand=2, n_groups=2,
                                chunk_size=4)()),
    Case("hf-opt", language("OPTForCausalLM", hf.OPTConfig, **_OPT, max_position_embeddings=64,
                             word_embed_proj_dim=32)()),
    Case("hf-phi", language("PhiForCausalLM", hf.PhiConfig, **BERT)()),
    Case("hf-segformer", _segformer),
    Case("hf-wav2vec2", _wav2vec2, "layerdrop=0"),
    Case("hf-xlnet", language("XLNetLMHeadModel", hf.XLNetConfig, **_XLNET)()),
)  # fmt: skip

CASES = (
    *(Case(name, _own(name), "this project's") for name in sorted(pd2bw_fx.models.MODELS)),
    Case("hf-gpt2", _gpt2()),
    Case("hf-gpt2-mask", _gpt2(attention_mask=_mask), "padded batch"),
    Case("hf-bert", _bert()),
    Case("hf-bert-mask", _bert(attention_mask=_mask), "padded batch"),
    Case("hf-roberta", _roberta()),
    Case("hf-roberta-mask", _roberta(attention_mask=_mask), "padded batch"),
    Case("hf-llama", _llama()),
    Case("hf-llama-mask", _llama(attention_mask=_mask), "padded batch"),
    Case("hf-mistral", _mistral(), "sliding window"),
    Case("hf-mistral-mask", _mistral(attention_mask=_mask), "sliding window, padded batch"),
    Case("hf-qwen2", _qwen2()),
    Case("hf-qwen2-mask", _qwen2(attention_mask=_mask), "padded batch"),
    Case("hf-qwen3", _qwen3()),
    Case("hf-qwen3-mask", _qwen3(attention_mask=_mask), "padded batch"),
    Case("hf-mixtral", _mixtral(), "experts_implementation='batched_mm'"),
    Case("hf-mixtral-mask", _mixtral(attention_mask=_mask), "the same, padded batch"),
    Case("hf-t5", _t5),
    Case("hf-t5-mask", _t5_with_mask, "padded batch"),
    Case("hf-whisper", _whisper),
    Case("hf-mamba", _mamba()),
    Case("hf-resnet", _resnet()),
    Case(
        "hf-vit",
        vision("ViTForImageClassification", hf.ViTConfig, image_size=32, patch_size=8, **SMALL),
    ),
    Case(
        "hf-swin",
        vision(
            "SwinForImageClassification", hf.SwinConfig, image_size=32, patch_size=4, embed_dim=16,
            depths=[2, 2], num_heads=[2, 4], window_size=4,
        ),
    ),
    Case(
        "hf-convnext",
        vision("ConvNextForImageClassification", hf.ConvNextConfig, hidden_sizes=[8, 16], depths=[2, 2],
                num_stages=2),
    ),
    Case("hf-deberta", _deberta()),
    Case("hf-deberta-v2", _deberta_v2()),
    *_OTHERS,
)  # fmt: skip


def built(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """The model in training mode and in float64, with its inputs, the same every time."""
    torch.manual_seed(0)
    model, inputs = case.build()
    double = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model.double().train(), double
