"""The exponential moving average of a rank's trained weights, as torch.optim.swa_utils keeps a model's.

W_0 = w_1,   W_t+1 = decay * W_t + (1 - decay) * w_t+1      w_t: the weights after update t
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """Averages parameters by name. Before the first update it has what it was made with.

    It is computed by torch's own function on each tensor by itself, so that it has the same bits wherever a
    parameter is held.
    """

    def __init__(self, decay: float, parameters: Mapping[str, Tensor]) -> None:
        self._move = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._has_begun = False
        self._averages = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._averages)

    def follow(self, newest: Mapping[str, Tensor]) -> None:
        """Moves towards the weights after an update."""
        of_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for name, average in self._averages.items():
            averages, weights = of_type.setdefault(average.dtype, ([], []))
            averages.append(average)
            weights.append(newest[name].detach())
        for averages, weights in of_type.values():
            if self._has_begun:
                self._move(averages, weights, None)
            else:
                torch._foreach_copy_(averages, weights)
        self._has_begun = True

    def state(self) -> dict[str, Tensor]:
        """Returns the averages by name; none before the first update."""
        return self.tensors() if self._has_begun else {}

    def load(self, kept: Mapping[str, Tensor], newest: Mapping[str, Tensor]) -> None:
        """Loads what `state` returned. What was not averaged then begins with the newest weights."""
        for name, average in self._averages.items():
            average.copy_(kept.get(name, newest[name].detach()))
        self._has_begun = bool(kept)
