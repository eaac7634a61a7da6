"""Models to try things on: a Config and `from_config` each, no download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from .bert import Bert, BertConfig
from .encdec import EncDec, EncDecConfig
from .gpt import GPT, GPTConfig
from .mlp import MLP, MLPConfig
from .moe import MoE, MoEConfig
from .resnet import ResNet, ResNetConfig
from .vgg import VGG, VGGConfig

Size = Literal["small", "paper"]
Model = Bert | EncDec | GPT | MLP | MoE | ResNet | VGG

MODELS: Mapping[str, Mapping[Size, Callable[[], Model]]] = {
    "mlp": {"small": lambda: MLP(MLPConfig.small()), "paper": lambda: MLP(MLPConfig.paper())},
    "gpt": {"small": lambda: GPT(GPTConfig.small()), "paper": lambda: GPT(GPTConfig.paper())},
    "bert": {"small": lambda: Bert(BertConfig.small()), "paper": lambda: Bert(BertConfig.paper())},
    "resnet": {"small": lambda: ResNet(ResNetConfig.small()), "paper": lambda: ResNet(ResNetConfig.paper())},
    "vgg": {"small": lambda: VGG(VGGConfig.small()), "paper": lambda: VGG(VGGConfig.paper())},
    "encdec": {"small": lambda: EncDec(EncDecConfig.small()), "paper": lambda: EncDec(EncDecConfig.paper())},
    "moe": {"small": lambda: MoE(MoEConfig.small()), "paper": lambda: MoE(MoEConfig.paper())},
}


def build(name: str, size: Size = "small") -> Model:
    """A model by name with fresh weights: small (milliseconds a step on a CPU), or as in its paper."""
    return MODELS[name][size]()
