"""Stage 0 of 2 of SwinForImageClassification, for cpu:0.

Takes
    pixel_values: float32 (batch, 3, 32, 32), an input of the model
Gives
    outputs: float32 (batch, 64, 16), to stage 1
Holds 5,412 parameters (21.1 KiB).
Predicted for a microbatch: 671 us forward, 841 us backward; memory 962 KiB of 11.8 GiB.
Cut here
    behind it outputs crosses, 24 KiB, gradient included
    its load is 1.72 ms, 212 us of it on its links; the bottleneck is stage 1 with 1.89 ms
    no other 2 stages that fit have a lower one
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def make_attn_mask(device: torch.device) -> Tensor:
    positions = torch.arange(8, device=device)  # modeling_swin.py:551 (8)
    positions_2 = torch.arange(8, device=device)  # modeling_swin.py:551 (8)
    total = (positions >= 4).to(torch.int64) + (positions >= 6).to(torch.int64)  # modeling_swin.py:551
    total_2 = (positions_2 >= 4).to(torch.int64) + (positions_2 >= 6).to(torch.int64)  # modeling_swin.py:551
    total = total.unsqueeze(0)  # modeling_swin.py:551 (1, 8)
    total_2 = total_2.unsqueeze(0)  # modeling_swin.py:551 (1, 8)
    total = total.unsqueeze(2).unsqueeze(3) * 3 + total_2.unsqueeze(1).unsqueeze(3)
    copied = total.to(torch.float32).view(1, 2, 4, 2, 4, 1).transpose(2, 3).contiguous()
    viewed = copied.view(-1, 4, 4, 1).view(-1, 16)  # modeling_swin.py:551 (4, 16)
    difference = viewed.unsqueeze(1) - viewed.unsqueeze(2)  # modeling_swin.py:551 (4, 16, 16)
    masked = difference.masked_fill(difference != 0, -100.0)  # modeling_swin.py:551
    attn_mask = masked.masked_fill(difference == 0, 0.0)  # modeling_swin.py:551
    return attn_mask


class SwinPatchEmbeddings(nn.Module):
    """swin.embeddings.patch_embeddings, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 16, 4, 4)

    def forward(self, pixel_values: Tensor) -> Tensor:
        embeddings = self.projection(pixel_values)  # modeling_swin.py:281 (batch, 16, 8, 8)
        embeddings = embeddings.flatten(2).transpose(1, 2)  # modeling_swin.py:284 (batch, 64, 16)
        return embeddings


class SwinEmbeddings(nn.Module):
    """swin.embeddings, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embeddings = SwinPatchEmbeddings()
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.0)

    def forward(self, pixel_values: Tensor) -> Tensor:
        embeddings = self.norm(self.patch_embeddings(pixel_values))  # modeling_swin.py:227 (batch, 64, 16)
        embeddings = self.dropout(embeddings)  # modeling_swin.py:242
        return embeddings


class SwinRelativePositionBias(nn.Module):
    """swin.encoder.layers.0.blocks.0.attention.relative_position_bias to
    swin.encoder.layers.0.blocks.1.attention.relative_position_bias (2 of them), from modeling_swin.py.
    """

    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.empty(49, 2))
        self.register_buffer("relative_position_index", torch.empty(256, dtype=torch.int64))

    def forward(self) -> Tensor:
        relative_position_bias = self.relative_position_bias_table[self.relative_position_index]
        relative_position_bias = relative_position_bias.view(16, 16, -1)  # modeling_swin.py:369 (16, 16, 2)
        return relative_position_bias.permute(2, 0, 1).contiguous().unsqueeze(0)


class SwinAttention(nn.Module):
    """swin.encoder.layers.0.blocks.0.attention, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)
        self.k_proj = nn.Linear(16, 16)
        self.v_proj = nn.Linear(16, 16)
        self.o_proj = nn.Linear(16, 16)
        self.relative_position_bias = SwinRelativePositionBias()

    def forward(self, hidden_states: Tensor, batch: int) -> Tensor:
        query_states = self.q_proj(hidden_states).view(4 * batch, 16, -1, 8).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(4 * batch, 16, -1, 8).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(4 * batch, 16, -1, 8).transpose(1, 2)
        relative_position_bias = self.relative_position_bias()  # modeling_swin.py:433 (1, 2, 16, 16)
        attended = F.scaled_dot_product_attention(  # modeling_swin.py:454
            query_states, key_states, value_states, attn_mask=relative_position_bias, scale=0.3535533905932738
        )
        attn_output = attended.transpose(1, 2).contiguous().reshape(4 * batch, 16, -1)
        attn_output = self.o_proj(attn_output)  # modeling_swin.py:466
        return attn_output


class GELUActivation(nn.Module):
    """swin.encoder.layers.0.blocks.0.mlp.activation_fn, from activations.py."""

    def forward(self, input_: Tensor) -> Tensor:
        return F.gelu(input_)  # activations.py:89


class SwinMLP(nn.Module):
    """swin.encoder.layers.0.blocks.0.mlp, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.activation_fn = GELUActivation()
        self.fc1 = nn.Linear(16, 64)
        self.fc2 = nn.Linear(64, 16)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.fc1(hidden_states)  # modeling_swin.py:479 (batch, 64, 64)
        hidden_states = self.activation_fn(hidden_states)  # modeling_swin.py:480
        hidden_states = self.fc2(hidden_states)  # modeling_swin.py:481 (batch, 64, 16)
        return hidden_states


class SwinLayer(nn.Module):
    """swin.encoder.layers.0.blocks.0, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SwinAttention()
        self.layernorm_before = nn.LayerNorm(16)
        self.layernorm_after = nn.LayerNorm(16)
        self.mlp = SwinMLP()
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        layernorm_before = self.layernorm_before(hidden_states)  # modeling_swin.py:542
        viewed = layernorm_before.view(hidden_states.shape[0], 8, 8, 16)
        viewed = F.pad(viewed, (0, 0, 0, 0, 0, 0)).view(hidden_states.shape[0], 2, 4, 2, 4, 16)
        hidden_states_windows = viewed.transpose(2, 3).contiguous().view(-1, 4, 4, 16)
        hidden_states_windows = hidden_states_windows.view(-1, 16, 16)
        attention_output = self.dropout(self.attention(hidden_states_windows, hidden_states.shape[0]))
        attention_windows = attention_output.view(-1, 4, 4, 16)  # modeling_swin.py:558 (4*batch, 4, 4, 16)
        copied = attention_windows.view(-1, 2, 2, 4, 4, 16).transpose(2, 3).contiguous()
        attention_windows = copied.view(-1, 8, 8, 16).view(hidden_states.shape[0], 64, 16)
        hidden_states = hidden_states + attention_windows  # modeling_swin.py:567
        layernorm_after = self.layernorm_after(hidden_states)  # modeling_swin.py:570
        mlp = self.mlp(layernorm_after)  # modeling_swin.py:571
        hidden_states = self.dropout(mlp) + hidden_states  # modeling_swin.py:572
        return hidden_states


class SwinAttention2(nn.Module):
    """swin.encoder.layers.0.blocks.1.attention, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)
        self.k_proj = nn.Linear(16, 16)
        self.v_proj = nn.Linear(16, 16)
        self.o_proj = nn.Linear(16, 16)
        self.relative_position_bias = SwinRelativePositionBias()

    def forward(self, hidden_states_windows: Tensor, attn_mask: Tensor, batch: int) -> Tensor:
        viewed = self.q_proj(hidden_states_windows).view(4 * batch, 16, -1, 8)
        query_states = viewed.transpose(1, 2)  # modeling_swin.py:428 (4*batch, 2, 16, 8)
        key_states = self.k_proj(hidden_states_windows).view(4 * batch, 16, -1, 8).transpose(1, 2)
        viewed = self.v_proj(hidden_states_windows).view(4 * batch, 16, -1, 8)
        value_states = viewed.transpose(1, 2)  # modeling_swin.py:430 (4*batch, 2, 16, 8)
        relative_position_bias = self.relative_position_bias()  # modeling_swin.py:433 (1, 2, 16, 16)
        expanded = attn_mask.unsqueeze(1).unsqueeze(0).expand(batch, -1, -1, -1, -1)
        viewed = expanded.reshape(-1, 1, 16, 16)  # modeling_swin.py:444 (4*batch, 1, 16, 16)
        combined_mask = relative_position_bias + viewed  # modeling_swin.py:446 (4*batch, 2, 16, 16)
        attended = F.scaled_dot_product_attention(  # modeling_swin.py:454
            query_states, key_states, value_states, attn_mask=combined_mask, scale=0.3535533905932738
        )
        attn_output = attended.transpose(1, 2).contiguous().reshape(4 * batch, 16, -1)
        attn_output = self.o_proj(attn_output)  # modeling_swin.py:466
        return attn_output


class SwinDropPath(nn.Module):
    """swin.encoder.layers.0.blocks.1.drop_path, from modeling_swin.py."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        random_tensor = torch.rand(  # modeling_swin.py:58 (batch, 1, 1)
            (hidden_states.shape[0], 1, 1), dtype=torch.float32, device=hidden_states.device
        )
        random_tensor = (random_tensor + 0.9666666666666667).floor()  # modeling_swin.py:59
        return hidden_states / 0.9666666666666667 * random_tensor  # modeling_swin.py:60


class SwinLayerPart(nn.Module):
    """This stage's part of swin.encoder.layers.0.blocks.1, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SwinAttention2()
        self.layernorm_before = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.0)
        self.drop_path = SwinDropPath()

    def forward(self, hidden_states: Tensor) -> Tensor:
        layernorm_before = self.layernorm_before(hidden_states)  # modeling_swin.py:542
        viewed = layernorm_before.view(hidden_states.shape[0], 8, 8, 16)
        roll = F.pad(viewed, (0, 0, 0, 0, 0, 0)).roll((-2, -2), (1, 2))  # modeling_swin.py:549
        copied = roll.view(hidden_states.shape[0], 2, 4, 2, 4, 16).transpose(2, 3).contiguous()
        hidden_states_windows = copied.view(-1, 4, 4, 16)  # modeling_swin.py:549 (4*batch, 4, 4, 16)
        hidden_states_windows = hidden_states_windows.view(-1, 16, 16)
        attn_mask = make_attn_mask(hidden_states.device)  # modeling_swin.py:551 (4, 16, 16)
        attn_output = self.attention(hidden_states_windows, attn_mask, hidden_states.shape[0])
        attention_output = self.dropout(attn_output)  # modeling_swin.py:556
        attention_windows = attention_output.view(-1, 4, 4, 16)  # modeling_swin.py:558 (4*batch, 4, 4, 16)
        copied = attention_windows.view(-1, 2, 2, 4, 4, 16).transpose(2, 3).contiguous()
        attention_windows = copied.view(-1, 8, 8, 16).roll((2, 2), (1, 2))
        attention_windows = attention_windows.view(hidden_states.shape[0], 64, 16)
        hidden_states = hidden_states + self.drop_path(attention_windows)  # modeling_swin.py:567
        return hidden_states


class SwinStagePart(nn.Module):
    """This stage's part of swin.encoder.layers.0, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SwinLayer(), SwinLayerPart()])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](hidden_states))  # modeling_swin.py:694


class SwinEncoderPart(nn.Module):
    """This stage's part of swin.encoder, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SwinStagePart()])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.layers[0](hidden_states)  # modeling_swin.py:806


class SwinModelPart(nn.Module):
    """This stage's part of swin, from modeling_swin.py."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = SwinEmbeddings()
        self.encoder = SwinEncoderPart()

    def forward(self, pixel_values: Tensor) -> Tensor:
        encoder_outputs = self.encoder(self.embeddings(pixel_values))  # modeling_swin.py:868 (batch, 64, 16)
        return encoder_outputs


class SwinForImageClassificationStage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.swin = SwinModelPart()

    def forward(self, pixel_values: Tensor) -> Tensor:
        outputs = self.swin(pixel_values)  # modeling_swin.py:1029 (batch, 64, 16)
        return outputs


def main() -> None:
    """Forward and backward once, on random inputs and weights."""
    stage = SwinForImageClassificationStage0()
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.02)
    for buffer in stage.buffers():
        buffer.zero_()
    pixel_values = torch.randn((3, 3, 32, 32))
    returned = stage(pixel_values)
    results = returned if isinstance(returned, tuple) else (returned,)
    for result in results:
        if result.requires_grad:
            result.sum().backward(retain_graph=True)
    for result in results:
        print(tuple(result.shape), result.dtype)


if __name__ == "__main__":
    main()
