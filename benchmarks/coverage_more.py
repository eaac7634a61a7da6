"""More models that go through: of Hugging Face's, those that are least like the others."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from coverage_models import (
    BATCH,
    BERT,
    LLAMA,
    SMALL,
    TWO_BLOCKS,
    WORDS,
    Build,
    Case,
    images,
    language,
    vision,
    words,
)
from torch import nn

_DECODERS = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
_ENCODERS = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
_SEQUENCES = {"vocab_size": WORDS, "decoder_start_token_id": 2, **_DECODERS, **_ENCODERS}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_DELTAS = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "experts_implementation": "batched_mm",
}
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}


def _sequences(model: str, config: Any, **config_kwargs: Any) -> Build:
    """A model that reads one text and writes another."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        network = getattr(hf, model)(config(**{**_SEQUENCES, **config_kwargs}))
        return network, {"input_ids": words(), "labels": words(1, 8)}

    return build


def _sound(model: str, config: Any, **config_kwargs: Any) -> Build:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        network = getattr(hf, model)(
            config(
                vocab_size=16,
                conv_dim=(16, 16),
                conv_stride=(5, 2),
                conv_kernel=(10, 3),
                num_feat_extract_layers=2,
                num_conv_pos_embeddings=16,
                num_conv_pos_embedding_groups=2,
                apply_spec_augment=False,
                layerdrop=0.0,
                **SMALL,
                **config_kwargs,
            )
        )
        waves = torch.randn(BATCH, 400, generator=torch.Generator().manual_seed(0))
        return network, {"input_values": waves, "labels": torch.tensor([0, 1, 0])}

    return build


def _depths() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.GLPNConfig(**TWO_BLOCKS, decoder_hidden_size=16)
    return hf.GLPNForDepthEstimation(config), {"pixel_values": images(32)}


def _characters() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.CanineConfig(
        **BERT, num_hash_buckets=64, local_transformer_stride=4, downsampling_rate=4, num_labels=2
    )
    return hf.CanineForSequenceClassification(config), {
        "input_ids": words(length=16),
        "labels": torch.tensor([0, 1, 0]),
    }


def _prophet() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.ProphetNetConfig(
        vocab_size=WORDS,
        hidden_size=32,
        encoder_ffn_dim=64,
        num_encoder_layers=1,
        num_encoder_attention_heads=4,
        decoder_ffn_dim=64,
        num_decoder_layers=1,
        num_decoder_attention_heads=4,
        max_position_embeddings=64,
    )
    return hf.ProphetNetForConditionalGeneration(config), {"input_ids": words(), "labels": words(1, 8)}


MORE = (
    Case(
        "hf-beit", vision("BeitForImageClassification", hf.BeitConfig, image_size=32, patch_size=8, **SMALL)
    ),
    Case(
        "hf-big-bird",
        language("BigBirdForMaskedLM", hf.BigBirdConfig, **BERT, attention_type="original_full")(),
    ),
    Case("hf-canine", _characters, "characters"),
    Case("hf-cohere", language("CohereForCausalLM", hf.CohereConfig, **LLAMA)()),
    Case(
        "hf-deepseek-v3",
        language(
            "DeepseekV3ForCausalLM",
            hf.DeepseekV3Config,
            **SMALL,
            **_LATENT,
            **_GROUPS,
            **_EXPERTS,
            num_key_value_heads=4,
            moe_intermediate_size=32,
        )(),
        "experts_implementation='batched_mm'",
    ),
    Case(
        "hf-dinov2",
        vision("Dinov2ForImageClassification", hf.Dinov2Config, image_size=32, patch_size=8, **SMALL),
    ),
    Case(
        "hf-falcon-mamba",
        language(
            "FalconMambaForCausalLM", hf.FalconMambaConfig, hidden_size=32, num_hidden_layers=2, state_size=4
        )(),
    ),
    Case(
        "hf-fnet",
        language(
            "FNetForMaskedLM",
            hf.FNetConfig,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            max_position_embeddings=64,
        )(),
        "Fourier transforms",
    ),
    Case(
        "hf-focalnet",
        vision(
            "FocalNetForImageClassification",
            hf.FocalNetConfig,
            image_size=32,
            embed_dim=16,
            hidden_sizes=[16, 32],
            depths=[2, 1],
            focal_levels=[2, 2],
            focal_windows=[3, 3],
        ),
    ),
    Case(
        "hf-funnel",
        language(
            "FunnelForMaskedLM",
            hf.FunnelConfig,
            block_sizes=[1, 1],
            d_model=32,
            n_head=4,
            d_head=8,
            d_inner=64,
        )(),
    ),
    Case("hf-glpn", _depths, "its outputs"),
    Case(
        "hf-gptj", language("GPTJForCausalLM", hf.GPTJConfig, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)()
    ),
    Case("hf-hubert", _sound("HubertForSequenceClassification", hf.HubertConfig), "layerdrop=0"),
    Case(
        "hf-led",
        _sequences("LEDForConditionalGeneration", hf.LEDConfig, d_model=32, attention_window=4),
        "windows of 4",
    ),
    Case(
        "hf-lfm2",
        language("Lfm2ForCausalLM", hf.Lfm2Config, **LLAMA, layer_types=["conv", "full_attention"])(),
        "a convolution, and attention",
    ),
    Case(
        "hf-longformer",
        language("LongformerForMaskedLM", hf.LongformerConfig, **BERT, attention_window=4)(),
        "windows of 4",
    ),
    Case(
        "hf-m2m-100",
        _sequences(
            "M2M100ForConditionalGeneration",
            hf.M2M100Config,
            d_model=32,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
        ),
        "layerdrop=0",
    ),
    Case(
        "hf-mobilebert",
        language(
            "MobileBertForMaskedLM", hf.MobileBertConfig, **BERT, embedding_size=16, intra_bottleneck_size=16
        )(),
    ),
    Case(
        "hf-mobilenet-v2",
        vision("MobileNetV2ForImageClassification", hf.MobileNetV2Config, depth_multiplier=0.25),
    ),
    Case(
        "hf-mobilevit",
        vision(
            "MobileViTForImageClassification",
            hf.MobileViTConfig,
            image_size=32,
            hidden_sizes=[16, 24, 32],
            neck_hidden_sizes=[8, 8, 8, 12, 16, 24, 32],
        ),
    ),
    Case("hf-modernbert", language("ModernBertForMaskedLM", hf.ModernBertConfig, **BERT, pad_token_id=0)()),
    Case(
        "hf-olmoe",
        language("OlmoeForCausalLM", hf.OlmoeConfig, **LLAMA, **_EXPERTS, num_experts=4)(),
        "experts_implementation='batched_mm'",
    ),
    Case("hf-prophetnet", _prophet, "predicts two words at once"),
    Case(
        "hf-pvt-v2",
        vision(
            "PvtV2ForImageClassification",
            hf.PvtV2Config,
            image_size=32,
            **TWO_BLOCKS,
        ),
    ),
    Case(
        "hf-qwen3-next",
        language("Qwen3NextForCausalLM", hf.Qwen3NextConfig, **LLAMA, **_DELTAS)(),
        "gated delta rule; experts_implementation='batched_mm'",
    ),
    Case(
        "hf-rwkv",
        language(
            "RwkvForCausalLM",
            hf.RwkvConfig,
            hidden_size=32,
            num_hidden_layers=2,
            attention_hidden_size=32,
            intermediate_size=64,
            context_length=64,
        )(),
        "step by step",
    ),
    Case("hf-wavlm", _sound("WavLMForSequenceClassification", hf.WavLMConfig), "layerdrop=0"),
)
