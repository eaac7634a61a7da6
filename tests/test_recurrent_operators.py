"""Where only sizes are asked for, one step of a recurrent operator tells those of all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree

import pd2bw_fx
from pd2bw_fx.recurrent_operators import ON_SEQUENCES, run_one_step

STEPS = 12
LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(6, 8),
    "LSTM, batch first, both ways": lambda: nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True),
    "LSTM, projected": lambda: nn.LSTM(6, 8, 2, proj_size=3, dropout=0.5),
    "GRU, two layers": lambda: nn.GRU(6, 8, 2, dropout=0.1, batch_first=True),
    "GRU, both ways, no bias": lambda: nn.GRU(6, 8, bias=False, bidirectional=True),
    "RNN": lambda: nn.RNN(6, 8, 3),
    "RNN, relu": lambda: nn.RNN(6, 8, nonlinearity="relu", batch_first=True, dtype=torch.float64),
}


def _described(layer: nn.RNNBase, *, by_one_step: bool, in_bf16: bool) -> list[Any]:
    """What is known of a layer's results on tensors without data."""
    mode, dtype = FakeTensorMode(), layer.weight_hh_l0.dtype
    sizes = (7, STEPS, 6) if layer.batch_first else (STEPS, 7, 6)
    sequence = mode.from_tensor(torch.randn(sizes, dtype=dtype, requires_grad=True))
    weights = {name: mode.from_tensor(weight) for name, weight in layer.named_parameters()}
    with (
        mode,
        enable_python_dispatcher(),
        run_one_step() if by_one_step else nullcontext(),
        torch.autocast("cpu", torch.bfloat16, enabled=in_bf16),
    ):
        results = pytree.tree_leaves(functional_call(layer, weights, (sequence,)))
    return [(t.shape, t.stride(), t.dtype, t.requires_grad, t.untyped_storage().nbytes()) for t in results]


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_one_step_tells_what_all_tell(name: str, in_bf16: bool) -> None:
    layer = LAYERS[name]()

    found = _described(layer, by_one_step=True, in_bf16=in_bf16)

    assert found == _described(layer, by_one_step=False, in_bf16=in_bf16)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(16, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, words: Tensor) -> Tensor:
        read, _ = self.lstm(self.embed(words))
        _, state = self.gru(read)
        return self.head(state[-1])


def test_one_step_is_run_in_a_split_and_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = decompositions._rnn_helper, list[str]()

    def counted(sequence: Tensor, *given: Any) -> Any:
        steps.append(str(sequence.shape[1]))  # batch first
        return run(sequence, *given)

    monkeypatch.setattr(decompositions, "_rnn_helper", counted)
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(Reading(), torch.randint(20, (3, STEPS)), cluster=2, check="full")
    pipe.export_onnx(tmp_path)

    assert set(steps) == {"1"}
    assert pipe.verify().exact


def test_torch_is_left_as_it_was() -> None:
    def kernels() -> list[Any]:
        return [dict(operator.py_kernels) for operator in sorted(ON_SEQUENCES, key=str)]

    before = kernels()
    with pytest.raises(ValueError, match="in between"), run_one_step():
        assert kernels() != before
        raise ValueError("in between")

    assert kernels() == before
