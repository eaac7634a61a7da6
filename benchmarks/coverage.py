"""Which models go through: traced, planned, printed as stages and compared with the model itself, bit by bit.

    python benchmarks/coverage.py                   # everything, printed and written to docs/COVERAGE.md
    python benchmarks/coverage.py gpt2 t5           # some, printed only
    python benchmarks/coverage.py --list
    python benchmarks/coverage.py --keep OUT gpt2   # some; the table once all of them are in OUT

Each model is built from a small configuration with weights drawn at random, in training mode, with dropout as
its configuration has it, in float64, and returns its loss. Exits with 1 where one does not go through.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import pd2bw_fx.models
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import Pd2bwError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.passes.verify import Verification, verify
from pd2bw_fx.plan import Plan
from pd2bw_fx.program import tensors
from pd2bw_fx.stage import StageProgram
from pd2bw_fx.traced import Traced

BATCH, LENGTH, WORDS = 3, 12, 96
TABLE = Path(__file__).parent.parent / "docs" / "COVERAGE.md"

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a model; `reason` says why it did not go through."""

    tracer: str = ""
    operators: int = 0
    lines: int = 0
    seconds: float = 0.0
    verified: str = ""
    reason: str = ""


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


def _images(size: int) -> Tensor:
    return torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0))


def _language(model: str, config: Any, **config_kwargs: Any) -> Callable[..., Build]:
    """A causal or masked language model by its class, for any inputs beside the text."""

    def with_inputs(**extra: Any) -> Build:
        def build() -> tuple[nn.Module, dict[str, Any]]:
            network = getattr(hf, model)(config(vocab_size=WORDS, **config_kwargs))
            return network, {"input_ids": words(), "labels": words(1)} | {k: v() for k, v in extra.items()}

        return build

    return with_inputs


def _vision(model: str, config: Any, size: int = 32, **config_kwargs: Any) -> Build:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        network = getattr(hf, model)(config(num_labels=5, **config_kwargs))
        return network, {"pixel_values": _images(size), "labels": torch.tensor([1, 4, 0])}

    return build


def _own(name: str) -> Build:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        network: Any = pd2bw_fx.models.build(name)
        inputs = network.example_inputs(batch_size=BATCH)
        names = list(network.forward.__code__.co_varnames[1:])
        return network, dict(zip(names, inputs, strict=False))

    return build


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_LLAMA = _SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64}
_BERT = _SMALL | {"max_position_embeddings": 64}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
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
    return _vision("ResNetForImageClassification", hf.ResNetConfig, layer_type="basic", **sizes)


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
        text_config=_SMALL | ends | {"max_position_embeddings": 32},
        vision_config=_SMALL | {"image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    return hf.CLIPModel(config), {"input_ids": words(), "pixel_values": _images(32)}


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
    return hf.DetrForObjectDetection(config), {"pixel_values": _images(64)}


def _segformer() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=4,
    )  # fmt: skip
    classes = torch.randint(0, 4, (BATCH, 32, 32), generator=torch.Generator().manual_seed(1))
    return hf.SegformerForSemanticSegmentation(config), {"pixel_values": _images(32), "labels": classes}


_gpt2 = _language("GPT2LMHeadModel", hf.GPT2Config, **_GPT2)
_bert = _language("BertForMaskedLM", hf.BertConfig, **_BERT)
_roberta = _language("RobertaForMaskedLM", hf.RobertaConfig, **_BERT, pad_token_id=1)
_llama = _language("LlamaForCausalLM", hf.LlamaConfig, **_LLAMA)
_mistral = _language("MistralForCausalLM", hf.MistralConfig, **_LLAMA, sliding_window=4)
_qwen2 = _language("Qwen2ForCausalLM", hf.Qwen2Config, **_LLAMA)
_qwen3 = _language("Qwen3ForCausalLM", hf.Qwen3Config, **_LLAMA, head_dim=8)
_mixtral = _language("MixtralForCausalLM", hf.MixtralConfig, **_LLAMA, **_EXPERTS, output_router_logits=True)
_mamba = _language("MambaForCausalLM", hf.MambaConfig, hidden_size=32, num_hidden_layers=2, state_size=4)
_deberta = _language("DebertaForMaskedLM", hf.DebertaConfig, **_BERT, relative_attention=True)
_deberta_v2 = _language("DebertaV2ForMaskedLM", hf.DebertaV2Config, **_BERT, relative_attention=True)

_BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
_MAMBA2 = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8}
_OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
_XLNET = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
# Beyond the models that this project is made for: whatever else there is works, or says why not.
_OTHERS = (
    Case("hf-albert", _language("AlbertForMaskedLM", hf.AlbertConfig, **_BERT, embedding_size=16)()),
    Case("hf-bart", _bart),
    Case("hf-bloom", _language("BloomForCausalLM", hf.BloomConfig, **_BLOOM)()),
    Case("hf-clip", _clip, "its outputs"),
    Case("hf-detr", _detr, "clamps where a value is not finite", tracer="export-as-example"),
    Case("hf-electra", _language("ElectraForMaskedLM", hf.ElectraConfig, **_BERT, embedding_size=16)()),
    Case("hf-falcon", _language("FalconForCausalLM", hf.FalconConfig, hidden_size=32,
                                num_hidden_layers=2, num_attention_heads=4)()),
    Case("hf-gemma2", _language("Gemma2ForCausalLM", hf.Gemma2Config, **_LLAMA, head_dim=8,
                                sliding_window=4)(), "sliding window"),
    Case("hf-gpt-neox", _language("GPTNeoXForCausalLM", hf.GPTNeoXConfig, **_BERT)()),
    Case("hf-mamba2", _language("Mamba2ForCausalLM", hf.Mamba2Config, **_MAMBA2, expand=2, n_groups=2,
                                chunk_size=4)()),
    Case("hf-opt", _language("OPTForCausalLM", hf.OPTConfig, **_OPT, max_position_embeddings=64,
                             word_embed_proj_dim=32)()),
    Case("hf-phi", _language("PhiForCausalLM", hf.PhiConfig, **_BERT)()),
    Case("hf-segformer", _segformer),
    Case("hf-wav2vec2", _wav2vec2, "layerdrop=0"),
    Case("hf-xlnet", _language("XLNetLMHeadModel", hf.XLNetConfig, **_XLNET)()),
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
        _vision("ViTForImageClassification", hf.ViTConfig, image_size=32, patch_size=8, **_SMALL),
    ),
    Case(
        "hf-swin",
        _vision(
            "SwinForImageClassification", hf.SwinConfig, image_size=32, patch_size=4, embed_dim=16,
            depths=[2, 2], num_heads=[2, 4], window_size=4,
        ),
    ),
    Case(
        "hf-convnext",
        _vision("ConvNextForImageClassification", hf.ConvNextConfig, hidden_sizes=[8, 16], depths=[2, 2],
                num_stages=2),
    ),
    Case("hf-deberta", _deberta()),
    Case("hf-deberta-v2", _deberta_v2()),
    *_OTHERS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Through:
    """A model that has gone the whole way."""

    traced: Traced
    graph: OperatorGraph
    plan: Plan
    programs: tuple[StageProgram, ...]
    verification: Verification


def built(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """The model in training mode and in float64, with its inputs, the same every time."""
    torch.manual_seed(0)
    model, inputs = case.build()
    double = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model.double().train(), double


def put_through(
    model: nn.Module, inputs: dict[str, Any] | tuple[Any, ...], num_stages: int = 2, tracer: str = "auto"
) -> Through:
    """All passes up to the comparison of the stages with the model; raises what the first to fail raises."""
    cluster = Cluster.uniform(num_stages)
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    traced = trace(model, args, kwargs, tracer=tracer)
    graph = normalise(traced)
    costs = profile(graph, traced.examples, device=cluster.devices[0], method="analytic")
    plan = partition(coarsen(graph, costs, cluster), cluster, num_stages=num_stages)
    programs = generate(graph, plan)
    assert traced.call is not None
    verification = verify(
        graph, plan, programs, tensors(graph), traced.examples, model=model, forward=traced.call
    )
    return Through(traced, graph, plan, programs, verification)


def outcome(case: Case) -> Outcome:
    """What becomes of one model, its error with it if there is one."""
    started = time.perf_counter()
    model, inputs = built(case)
    try:
        through = put_through(model, inputs, tracer=case.tracer)
    except Pd2bwError as error:
        return Outcome(seconds=time.perf_counter() - started, reason=" ".join(str(error).split()))
    found = through.verification
    return Outcome(
        tracer=through.traced.report.tracer,
        operators=len(through.graph.operators),
        lines=sum(program.source.count("\n") for program in through.programs),
        seconds=time.perf_counter() - started,
        verified="bit for bit" if found.exact else f"{found.worst.relative:.0e}",
    )


def _table(results: Sequence[tuple[Case, Outcome]]) -> list[str]:
    rows = [
        "| model | traced by | operators | lines of 2 stages | seconds | compared with the model | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, found in results:
        remarks = "; ".join(text for text in (case.note, found.reason.replace("|", "/")) if text)
        cells = (
            case.name, found.tracer or "-", found.operators or "-", found.lines or "-",
            f"{found.seconds:.1f}", found.verified or "no", remarks,
        )  # fmt: skip
        rows.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return rows


_PREFACE = """# Models that go through

Made by `python benchmarks/coverage.py` with torch {torch} and transformers {transformers}, on a CPU.

Every model is built from a small configuration, is in training mode with its labels and its own dropout, and
is traced with the batch size left open, planned for two devices, printed as two stages, and compared with the
live model in float64: the outputs, every gradient and every buffer. "Bit for bit" means no difference at all;
a number is the largest difference relative to the tensor's largest entry. Seconds are by the clock, for
all of it together, on two cores that had other work.

Models of the Llama family without an attention mask differ in the last bit: while they are traced they give
their attention a causal mask, and otherwise take the kernel that needs none.

BLOOM's activation is an autograd function of its own, which its stages have as a class. DETR's encoder asks
in Python whether a tensor is finite: `tracer="export-as-example"` takes the way of the example, and the
stages assert that it is theirs.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Which models go through, and how.")
    parser.add_argument("names", nargs="*", help="some models; all of them if none is named")
    parser.add_argument("--list", action="store_true", help="print the names of the models")
    parser.add_argument("--keep", type=Path, help="a JSON file that outcomes are added to, part by part")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - {case.name for case in CASES})
    if unknown:
        parser.error(f"no model is called {unknown[0]!r}; --list prints the names")
    if arguments.list:
        print("\n".join(case.name for case in CASES))
        return 0
    kept = _kept(arguments.keep)
    for case in CASES:
        if arguments.names and case.name not in arguments.names:
            continue
        found = kept[case.name] = outcome(case)
        said = f"verified {found.verified}" if found.verified else found.reason
        print(
            f"{case.name:18} {found.tracer:8} {found.operators:4} operators {found.seconds:6.1f} s  {said}",
            flush=True,
        )
        if arguments.keep is not None:
            arguments.keep.write_text(
                json.dumps({name: asdict(other) for name, other in kept.items()}, indent=1)
            )
    results = [(case, kept[case.name]) for case in CASES if case.name in kept]
    if len(results) == len(CASES):
        versions = _PREFACE.format(torch=torch.__version__.partition("+")[0], transformers=hf.__version__)
        TABLE.write_text(versions + "\n".join(_table(results)) + "\n")
    failed = [case.name for case, found in results if not found.verified]
    if failed:
        print(f"do not go through: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _kept(file: Path | None) -> dict[str, Outcome]:
    """By model, what earlier parts of this run came to."""
    if file is None or not file.exists():
        return {}
    outcomes: Mapping[str, dict[str, Any]] = json.loads(file.read_text())
    return {name: Outcome(**fields) for name, fields in outcomes.items()}


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    sys.exit(main())
