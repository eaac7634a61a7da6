"""Stage 1 of 2 of SwinForImageClassification, for cpu:1.

Takes
    outputs: float32 (batch, 64, 16), from stage 0, its gradient goes back
    labels: int64 (batch), an input of the model
Gives
    logits: float32 (batch, 5), the logits of the model
    loss: float32 (), the loss of the model
Holds 30,365 parameters (119 KiB).
Predicted for a microbatch: 769 us forward, 904 us backward; memory 1.05 MiB of 11.8 GiB.
Cut here
    before it outputs crosses, 24 KiB, gradient included
    its load is 1.89 ms, 212 us of it on its links: the bottleneck
    no other 2 stages that fit have a lower one
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GELUActivation(nn.Module):
    """swin.encoder.layers.0.blocks.1.mlp.activation_fn to swin.encoder.layers.1.blocks.1.mlp.activation_fn (3
    of them), from activations.py.
    """

    def forward(self, input_: Tensor) -> Tensor:
        return F.gelu(input_)  # activations.py:89


class SwinMLP(nn.Module):
    """swin.encoder.layers.0.blocks.1.mlp to swin.encoder.layers.1.blocks.1.mlp (3 of them), from
    modeling_swin.py.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.activation_fn = GELUActivation()
        self.fc1 = nn.Linear(in_features, out_features)
        self.fc2 = nn.Linear(out_features, in_features)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.fc1(hidden_states)  # modeling_swin.py:479 (batch, ?, out_features)
        hidden_states = self.activation_fn(hidden_states)  # modeling_swin.py:480
        hidden_states = self.fc2(hidden_states)  # modeling_swin.py:481 (batch, ?, in_features)
        return hidden_states


class SwinLayerPart(nn.Module):
    """This stage's part of swin.encoder.layers.0.blocks.1, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.layernorm_after = nn.LayerNorm(16)
        self.mlp = SwinMLP(16, 64)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        layernorm_after = self.layernorm_after(hidden_states)  # modeling_swin.py:570
        mlp = self.mlp(layernorm_after)  # modeling_swin.py:571
        hidden_states = self.dropout(mlp) + hidden_states  # modeling_swin.py:572
        return hidden_states


class SwinPatchMerging(nn.Module):
    """swin.encoder.layers.0.downsample, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = nn.Linear(64, 32, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, input_feature: Tensor) -> Tensor:
        input_feature = input_feature.view(input_feature.shape[0], 8, 8, 16)
        part = input_feature[:, ::2][:, :, ::2]  # modeling_swin.py:319 (batch, 4, 4, 16)
        part_2 = input_feature[:, 1::2][:, :, ::2]  # modeling_swin.py:319 (batch, 4, 4, 16)
        part_3 = input_feature[:, ::2][:, :, 1::2]  # modeling_swin.py:319 (batch, 4, 4, 16)
        part_4 = input_feature[:, 1::2][:, :, 1::2]  # modeling_swin.py:319 (batch, 4, 4, 16)
        input_feature = torch.cat([part, part_2, part_3, part_4], dim=-1)
        input_feature = input_feature.view(input_feature.shape[0], -1, 64)
        input_feature = self.norm(input_feature)  # modeling_swin.py:323
        input_feature = self.reduction(input_feature)  # modeling_swin.py:324 (batch, 16, 32)
        return input_feature


class SwinStagePart(nn.Module):
    """This stage's part of swin.encoder.layers.0, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": SwinLayerPart()})
        self.downsample = SwinPatchMerging()

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.downsample(self.blocks["1"](hidden_states))
        return hidden_states


class SwinRelativePositionBias(nn.Module):
    """swin.encoder.layers.1.blocks.0.attention.relative_position_bias to
    swin.encoder.layers.1.blocks.1.attention.relative_position_bias (2 of them), from modeling_swin.py.
    """

    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.empty(49, 4))
        self.register_buffer("relative_position_index", torch.empty(256, dtype=torch.int64))

    def forward(self) -> Tensor:
        relative_position_bias = self.relative_position_bias_table[self.relative_position_index]
        relative_position_bias = relative_position_bias.view(16, 16, -1)  # modeling_swin.py:369 (16, 16, 4)
        return relative_position_bias.permute(2, 0, 1).contiguous().unsqueeze(0)


class SwinAttention(nn.Module):
    """swin.encoder.layers.1.blocks.0.attention to swin.encoder.layers.1.blocks.1.attention (2 of them), from
    modeling_swin.py.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 32)
        self.k_proj = nn.Linear(32, 32)
        self.v_proj = nn.Linear(32, 32)
        self.o_proj = nn.Linear(32, 32)
        self.relative_position_bias = SwinRelativePositionBias()

    def forward(self, hidden_states: Tensor) -> Tensor:
        viewed = self.q_proj(hidden_states).view(hidden_states.shape[0], 16, -1, 8)
        query_states = viewed.transpose(1, 2)  # modeling_swin.py:428 (batch, 4, 16, 8)
        viewed = self.k_proj(hidden_states).view(hidden_states.shape[0], 16, -1, 8)
        key_states = viewed.transpose(1, 2)  # modeling_swin.py:429 (batch, 4, 16, 8)
        viewed = self.v_proj(hidden_states).view(hidden_states.shape[0], 16, -1, 8)
        value_states = viewed.transpose(1, 2)  # modeling_swin.py:430 (batch, 4, 16, 8)
        relative_position_bias = self.relative_position_bias()  # modeling_swin.py:433 (1, 4, 16, 16)
        attended = F.scaled_dot_product_attention(  # modeling_swin.py:454
            query_states, key_states, value_states, attn_mask=relative_position_bias, scale=0.3535533905932738
        )
        attn_output = attended.transpose(1, 2).contiguous().reshape(attended.shape[0], 16, -1)
        attn_output = self.o_proj(attn_output)  # modeling_swin.py:466
        return attn_output


class SwinDropPath(nn.Module):
    """swin.encoder.layers.1.blocks.0.drop_path to swin.encoder.layers.1.blocks.1.drop_path (2 of them), from
    modeling_swin.py.
    """

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, hidden_states: Tensor) -> Tensor:
        random_tensor = torch.rand(  # modeling_swin.py:58 (batch, 1, 1)
            (hidden_states.shape[0], 1, 1), dtype=torch.float32, device=hidden_states.device
        )
        random_tensor = (random_tensor + self.size).floor()  # modeling_swin.py:59
        return hidden_states / self.size * random_tensor  # modeling_swin.py:60


class SwinLayer(nn.Module):
    """swin.encoder.layers.1.blocks.0, swin.encoder.layers.1.blocks.1, from modeling_swin.py."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.attention = SwinAttention()
        self.layernorm_before = nn.LayerNorm(32)
        self.layernorm_after = nn.LayerNorm(32)
        self.mlp = SwinMLP(32, 128)
        self.dropout = nn.Dropout(0.0)
        self.drop_path = SwinDropPath(size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        layernorm_before = self.layernorm_before(hidden_states)  # modeling_swin.py:542
        viewed = layernorm_before.view(hidden_states.shape[0], 4, 4, 32)
        viewed = F.pad(viewed, (0, 0, 0, 0, 0, 0)).view(hidden_states.shape[0], 1, 4, 1, 4, 32)
        hidden_states_windows = viewed.transpose(2, 3).view(-1, 4, 4, 32)
        hidden_states_windows = hidden_states_windows.view(-1, 16, 32)  # modeling_swin.py:550 (batch, 16, 32)
        attention_output = self.dropout(self.attention(hidden_states_windows))  # modeling_swin.py:556
        attention_windows = attention_output.view(-1, 4, 4, 32)  # modeling_swin.py:558 (batch, 4, 4, 32)
        viewed = attention_windows.view(-1, 1, 1, 4, 4, 32).transpose(2, 3).view(-1, 4, 4, 32)
        attention_windows = viewed.view(hidden_states.shape[0], 16, 32)
        hidden_states = hidden_states + self.drop_path(attention_windows)  # modeling_swin.py:567
        layernorm_after = self.layernorm_after(hidden_states)  # modeling_swin.py:570
        mlp = self.mlp(layernorm_after)  # modeling_swin.py:571
        hidden_states = self.dropout(mlp) + hidden_states  # modeling_swin.py:572
        return hidden_states


class SwinStage(nn.Module):
    """swin.encoder.layers.1, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SwinLayer(0.9333333333333333), SwinLayer(0.9)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](hidden_states))  # modeling_swin.py:694


class SwinEncoderPart(nn.Module):
    """This stage's part of swin.encoder, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SwinStagePart(), SwinStage()])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](hidden_states))  # modeling_swin.py:806 (batch, 16, 32)


class SwinModelPart(nn.Module):
    """This stage's part of swin, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = SwinEncoderPart()
        self.layernorm = nn.LayerNorm(32)
        self.pooler = nn.AdaptiveAvgPool1d(1)

    def forward(self, encoder_outputs: Tensor) -> Tensor:
        encoder_outputs = self.encoder(encoder_outputs)  # modeling_swin.py:868 (batch, 16, 32)
        sequence_output = self.layernorm(encoder_outputs)  # modeling_swin.py:876
        pooled_output = self.pooler(sequence_output.transpose(1, 2))  # modeling_swin.py:880 (batch, 32, 1)
        pooled_output = pooled_output.flatten(1)  # modeling_swin.py:881 (batch, 32)
        return pooled_output


class SwinForImageClassificationStage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.swin = SwinModelPart()
        self.classifier = nn.Linear(32, 5)

    def forward(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.swin(outputs)  # modeling_swin.py:1029 (batch, 32)
        logits = self.classifier(outputs)  # modeling_swin.py:1037 (batch, 5)
        loss = F.cross_entropy(logits, labels)  # modeling_swin.py:1041
        return logits, loss


def main() -> None:
    """Forward and backward once, on random inputs and weights."""
    stage = SwinForImageClassificationStage1()
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.02)
    for buffer in stage.buffers():
        buffer.zero_()
    outputs = torch.randn((3, 64, 16), requires_grad=True)
    labels = torch.ones((3,), dtype=torch.int64)
    returned = stage(outputs, labels)
    results = returned if isinstance(returned, tuple) else (returned,)
    for result in results:
        if result.requires_grad:
            result.sum().backward(retain_graph=True)
    for result in results:
        print(tuple(result.shape), result.dtype)


if __name__ == "__main__":
    main()
