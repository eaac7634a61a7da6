"""Optimizers for gradients that are one update late, as those of 2BW are.

`docs/PERFORMANCE.md` says what each of them gains and loses; none is a default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, NAdam, Optimizer

from pd2bw_fx.graph import OperatorGraph


def nadamw(
    parameters: Any,
    lr: float = 1e-3,
    *,
    betas: tuple[float, float] = (0.99, 0.999),
    weight_decay: float = 0.01,
    **options: Any,
) -> NAdam:
    """Returns torch's NAdam with decoupled decay and a long first moment: asynchronous Nesterov, ICML
    2025.
    """
    return NAdam(
        parameters, lr=lr, betas=betas, weight_decay=weight_decay, decoupled_weight_decay=True, **options
    )


class MuonWithAdamW(Optimizer):
    """torch's Muon for matrices and AdamW for everything else, as one optimizer.

    Muon's step is given AdamW's size (`adjust_lr_fn="match_rms_adamw"`), so that one learning rate serves
    both. A group with `"kind": "adamw"` leaves its matrices to AdamW, as is usual for embeddings and heads.
    """

    def __init__(
        self, parameters: Iterable[Any], lr: float = 1e-3, *, weight_decay: float = 0.01, **adamw: Any
    ) -> None:
        self._chosen = {"lr": lr, "weight_decay": weight_decay}
        self._adamw = adamw
        self._inner: dict[str, Optimizer] = {}
        given = list(parameters)
        groups: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
        super().__init__([part for group in groups for part in self._parts(group)], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Makes one group of the matrices and one of the other parameters."""
        for part in self._parts(param_group):
            super().add_param_group(part)
            self._take(part)

    def _parts(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        own = self._chosen | group
        given = own.pop("params")
        held = [given] if isinstance(given, Tensor) else list(given)
        kind = own.pop("kind", "muon")
        matrices = [p for p in held if p.ndim == 2 and kind == "muon"]
        others = [p for p in held if not (p.ndim == 2 and kind == "muon")]
        split = (("muon", matrices), ("adamw", others))
        return [own | {"params": parameters, "kind": name} for name, parameters in split if parameters]

    def _take(self, group: dict[str, Any]) -> None:
        """Shares the inner optimizers' groups and state."""
        kind = group["kind"]
        if kind in self._inner:
            self._inner[kind].add_param_group(group)
            return
        lr = self._chosen["lr"]
        self._inner[kind] = (
            Muon([group], lr=lr, adjust_lr_fn="match_rms_adamw")
            if kind == "muon"
            else AdamW([group], lr=lr, **self._adamw)
        )
        self._inner[kind].state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        """Steps both optimizers. Raises ValueError for a closure, which would be evaluated twice."""
        if closure is not None:
            raise ValueError("MuonWithAdamW takes no closure; compute the gradients before the step")
        for inner in self._inner.values():
            inner.step()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_chosen": self._chosen, "_adamw": self._adamw}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Gives the inner optimizers the new groups and state; load_state_dict calls this too."""
        super().__setstate__(state)
        self._inner = {}
        for group in self.param_groups:
            self._take(group)


def heads_to_adamw(graph: OperatorGraph) -> Callable[[str, nn.Parameter], dict[str, Any]]:
    """Returns `parameter_options` for MuonWithAdamW that leave embeddings and the head to AdamW.

    The head is the last matrix that the model multiplies with. All other matrices are left to Muon.
    """
    embeddings = {
        name for op in graph.operators.values() if "embedding" in op.target for name in op.parameters
    }
    multiplied = [
        name
        for operator in graph.operators.values()
        for name in operator.parameters
        if len(graph.parameters[name].spec.shape or ()) == 2
    ]
    others = embeddings | set(multiplied[-1:])

    def kind(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"kind": "adamw" if name in others else "muon"}

    return kind
