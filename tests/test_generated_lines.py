"""Statements that are too long for a line are broken as ruff format breaks them."""

from __future__ import annotations

import subprocess
import sys

from pd2bw_fx.passes.codegen.layout import WIDTH, laid_out

_LONG = "model.backbone.model.encoder.stages.0.layers.0.layer.1.convolution.weight"
_TIED = 'self.network["2"].net[0].parametrizations["weight"].original0'
_STATEMENTS = (
    "return vision_outputs, last_hidden_state, text_outputs, image_embeds, text_embeds, per_text, per_image",
    "query_layer = self.query(hidden_states).view(batch * 4, self.size, -1, self.attention_size)"
    ".transpose(1, 2)",
    "query_layer = self.query(hidden_states).view(batch * 4, self.size, -1, self.attention_size, self.width)"
    ".transpose(1, 2).contiguous().softmax(-1)",
    f'self.get_parameter("{_LONG}").requires_grad_(False)',
    f'{_TIED} = self.network["2"].conv1.parametrizations["weight"]["original0"]',
    "tokens_per_expert = tokens_per_expert_sum / ("
    + " + ".join(["torch.sym_float(12 * x.shape[0])"] * 4)
    + ")",
    "x = self.attention(hidden_states, attention_mask, position_embeddings, key_states, states) + residual",
    "x = residual + self.attention(hidden_states, attention_mask, position_embeddings, key_states, states)",
    "x = self.attention(hidden_states, attention_mask, position_embeddings, key_states, values).contiguous()",
    "y = x[:, :, :-self.chomp_size] + x[:, n:, self.chomp_size:] + x[::2, : self.size.item() : 2, [-2]]",
    "self.layer = nn.ModuleList(Layer(all_head_size=16, size=16, attention_head_size=4, size_2=2.0, width=32)"
    " for _ in range(2))",
)


def test_long_statements_are_laid_out_as_ruff_does_it() -> None:
    lines = [
        f"def made_{at}(self):\n    if self:\n" + "\n".join(laid_out(text, 8))
        for at, text in enumerate(_STATEMENTS)
    ]
    source = "\n\n\n".join(lines) + "\n"
    ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(WIDTH), "-"]

    assert subprocess.run(ruff, input=source, capture_output=True, text=True, check=True).stdout == source
