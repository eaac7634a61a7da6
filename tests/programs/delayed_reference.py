"""Asynchronous methods in one process, from their rules alone: which weights a stage's forward and backward
of microbatch k see. With m microbatches an update, stage s of d, w = d - 1 - s:

    pipedream      forward and backward on W(max(0, (k - w) // m))
    vertical sync  the same with w = d - 1 at every stage
    pb, pipemare   forward on W(max(0, (k - w) // m)), backward on W(k // m)

The weights are written into the model between forward and backward. (Through `.data`, which autograd does not
see: what was saved for the backward then has the new values, and that is the rule.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pd2bw_fx.runtime.corrections import Correction, PipeMare, SpikeCompensation, WeightPrediction

Weights = dict[str, Tensor]


@dataclass
class DelayedReference:
    """Trains `model` itself. `replicas[s]` ranks share the microbatches of stage s in turn."""

    model: nn.Module
    stage_of: Mapping[str, int]  # by parameter
    method: str
    m: int
    optimizer: Callable[[Any], torch.optim.Optimizer]
    replicas: Sequence[int]
    corrections: Sequence[Correction] = ()
    max_gradient_norm: float = float("inf")
    losses: list[float] = field(default_factory=list)

    def train(self, batches: Sequence[tuple[Tensor, ...]]) -> Weights:
        self.parameters = dict(self.model.named_parameters())
        optimizers = {
            stage: self.optimizer([p for name, p in self.parameters.items() if self.stage_of[name] == stage])
            for stage in sorted(set(self.stage_of.values()))
        }
        rates = {stage: made.param_groups[0]["lr"] for stage, made in optimizers.items()}
        history = [self.copied()]
        self.velocities: list[Weights] = [{name: torch.zeros_like(w) for name, w in history[0].items()}]
        change = {name: torch.zeros_like(w) for name, w in history[0].items()}
        past = [change]
        for update, batch in enumerate(batches):
            self.model.zero_grad()
            total = 0.0
            for number, piece in enumerate(zip(*(tensor.chunk(self.m) for tensor in batch), strict=True)):
                k = update * self.m + number
                synchronous = update < self.synchronous_updates
                self.show({n: self.forward_weights(n, k, history, synchronous) for n in self.parameters})
                loss = self.model(*piece) / self.m
                if self.method in ("pb", "pipemare"):
                    self.show(
                        {n: self.backward_weights(n, k, history, past, synchronous) for n in self.parameters}
                    )
                loss.backward()
                total += loss.item()
            self.show(history[-1])
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_gradient_norm)
            gradients = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
            for stage, made in optimizers.items():
                made.param_groups[0]["lr"] = rates[stage] * self.rate_factor(stage, update)
                made.step()
            self.velocities.append(
                {
                    name: made.state[p].get("momentum_buffer", torch.zeros_like(p)).clone()
                    for name, p in self.parameters.items()
                    for made in [optimizers[self.stage_of[name]]]
                }
            )
            self.compensate(history[-1], gradients, optimizers)
            history.append(self.copied())
            past.append({name: self.running_change(name, past[-1], history) for name in self.parameters})
            self.losses.append(total)
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def copied(self) -> Weights:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def show(self, weights: Weights) -> None:
        for name, parameter in self.parameters.items():
            parameter.data.copy_(weights[name])

    @property
    def synchronous_updates(self) -> int:
        return max((c.synchronous_updates for c in self.corrections if isinstance(c, PipeMare)), default=0)

    def warm_up(self, stage: int) -> int:
        return (sum(self.replicas) - 1 - sum(self.replicas[:stage])) // self.replicas[stage]

    def version(self, stage: int, k: int) -> int:
        """That a forward sees."""
        count = self.replicas[stage]
        newest = (k // count - self.warm_up(stage)) // (self.m // count)
        return max(self.synchronous_updates, newest)

    def forward_weights(self, name: str, k: int, history: list[Weights], synchronous: bool) -> Tensor:
        stage = self.stage_of[name]
        if synchronous:
            return history[-1][name]
        if self.method == "vertical":
            version = min(self.version(s, k) for s in range(len(self.replicas)))
        else:
            version = self.version(stage, k)
        weights, delay = history[version][name], self.warm_up(stage)
        for correction in self.corrections:
            if isinstance(correction, WeightPrediction) and correction.form == "weights":
                return weights + delay * (weights - history[max(version - 1, 0)][name])
            if isinstance(correction, WeightPrediction):
                lr = self.optimizer([torch.zeros(1)]).param_groups[0]["lr"]
                return weights - lr * delay * self.velocities[version][name]
        return weights

    def backward_weights(
        self, name: str, k: int, history: list[Weights], past: list[Weights], synchronous: bool
    ) -> Tensor:
        delay, weights = self.warm_up(self.stage_of[name]), history[-1][name]
        pipemare = next((c for c in self.corrections if isinstance(c, PipeMare)), None)
        if pipemare is None or pipemare.decay is None or delay == 0 or synchronous:
            return weights
        return weights - delay * past[-1][name]

    def running_change(self, name: str, before: Weights, history: list[Weights]) -> Tensor:
        delay = self.warm_up(self.stage_of[name])
        pipemare = next((c for c in self.corrections if isinstance(c, PipeMare)), None)
        share = 0.0
        if pipemare is not None and pipemare.decay is not None and delay:
            share = pipemare.decay ** (1 / delay)
        return share * before[name] + (1 - share) * (history[-1][name] - history[-2][name])

    def rate_factor(self, stage: int, update: int) -> float:
        pipemare = next((c for c in self.corrections if isinstance(c, PipeMare)), None)
        begun = update - self.synchronous_updates
        if pipemare is None or not pipemare.rescale_updates or begun < 0:
            return 1.0
        delay = max(1, self.warm_up(stage))
        return float(1 / delay ** (1 - min(begun / pipemare.rescale_updates, 1)))

    def compensate(self, before: Weights, gradients: Weights, optimizers: Mapping[int, Any]) -> None:
        """w - lr (a v + b g) in place of what SGD made of the weights."""
        if not any(isinstance(c, SpikeCompensation) for c in self.corrections):
            return
        for name, gradient in gradients.items():
            stage = self.stage_of[name]
            group = optimizers[stage].param_groups[0]
            m, delay = group["momentum"], self.warm_up(stage)
            a, b = m**delay, (1 - m**delay) / (1 - m)
            velocity = self.velocities[-1][name]
            self.parameters[name].data.copy_(before[name] - group["lr"] * (a * velocity + b * gradient))
