"""A rank's optimizer and learning rate scheduler: how they are made, stepped, saved and gone on with.

Option groups are those of the whole model, in its order, on every rank: a scheduler with a function for each
group has the same groups everywhere, be some of them empty here.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import ParameterSpec
from pd2bw_fx.runtime.checkpoint import Checkpoint

OptimizerFactory = Callable[[Any], Optimizer]  # takes what torch's optimizers take: parameters, or groups
SchedulerFactory = Callable[[Optimizer], LRScheduler]
ParameterOptions = Callable[[str, nn.Parameter], Mapping[str, Any]]
_KIND = "class"  # of a scheduler, beside its state
EXPECTED_OPTIMIZER = (
    "a function was expected that makes a torch optimizer of the parameters it is given: "
    "lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
)


class RankOptimizer:
    """Steps `parameters`, by name. Where there are none, `optimizer` is None: torch refuses empty lists.

    Raises InputError for what the factories give that is no optimizer, steps other parameters, or wants more
    than gradients to step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        everywhere: Iterable[ParameterSpec],
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        options: ParameterOptions | None = None,
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._scheduler: LRScheduler | None = None
        self.optimizer: Optimizer | None = None
        if not parameters:
            return
        self.optimizer = optimizer(grouped(parameters, everywhere, options))
        _require_optimizer(self.optimizer, parameters.values())
        if scheduler is not None:
            self._scheduler = scheduler(self.optimizer)
            _require_scheduler(self._scheduler)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Of its groups, in the coming step."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return tuple(float(group["lr"]) for group in groups)

    def step_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.step()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors, as optimizer/NAME/KEY, and what is plain: numbers by parameter, options, scheduler."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {"numbers": {}, "options": {}, "groups": [], "scheduler": None}
        if self.optimizer is None:
            return tensors, plain
        for group in self.optimizer.param_groups:
            names = [self._name_of(parameter) for parameter in group["params"]]
            options = {key: value for key, value in group.items() if key != "params"}
            plain["options"] |= dict.fromkeys(names, options)
            plain["groups"].append(options)
        for parameter, kept in self.optimizer.state.items():
            name = self._name_of(parameter)
            for key, value in kept.items():
                if isinstance(value, numbers.Number):  # as a tensor it would be rounded to float32
                    plain["numbers"].setdefault(name, {})[key] = value
                elif value is not None:
                    tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        if self._scheduler is not None:
            plain["scheduler"] = {_KIND: type(self._scheduler).__name__, **_plain_state(self._scheduler)}
        return tensors, plain

    def load(self, checkpoint: Checkpoint, found: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave, of this rank or of those that held its parameters then.

        Parameters that were not trained then begin anew. Raises InputError for another optimizer's state.
        """
        if self.optimizer is None:
            return
        state = self.optimizer.state_dict()
        ordered = [self._name_of(p) for group in self.optimizer.param_groups for p in group["params"]]
        kept: dict[str, dict[str, Any]] = {name: dict(checkpoint.numbers.get(name, {})) for name in ordered}
        for key, tensor in found.items():
            kind, _, name = key.rpartition("/")[0].partition("/")
            if kind == "optimizer" and name in kept:
                kept[name][key.rpartition("/")[2]] = tensor
        state["state"] = {index: kept[name] for index, name in enumerate(ordered) if kept[name]}
        are_alike = len(checkpoint.groups) == len(state["param_groups"])
        for number, group in enumerate(state["param_groups"]):
            known = (checkpoint.options.get(ordered[index]) for index in group["params"])
            saved = next((options for options in known if options is not None), None)
            if not group["params"] and are_alike:
                saved = checkpoint.groups[number]
            if saved is None:
                continue
            if saved.keys() - {"initial_lr"} != group.keys() - {"params", "initial_lr"}:
                raise InputError(
                    f"{checkpoint.path} is of another optimizer than {type(self.optimizer).__name__}: its "
                    f"options are {', '.join(saved)}; go on with the one it was made with, or begin from the "
                    "weights alone"
                )
            group |= saved
        self.optimizer.load_state_dict(state)
        if checkpoint.scheduler is not None:
            self._load_scheduler(checkpoint.path, dict(checkpoint.scheduler))

    def _load_scheduler(self, path: Path, saved: dict[str, Any]) -> None:
        kind, own = saved.pop(_KIND), type(self._scheduler).__name__
        if self._scheduler is None or kind != own:
            found = "no lr_scheduler" if self._scheduler is None else own
            raise InputError(
                f"{path} is of a run with {kind}, and this one has {found}; go on with the one it was made "
                "with, or begin from the weights alone"
            )
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        self._scheduler.load_state_dict(_for_groups(saved, self._scheduler.state_dict(), groups))

    def _name_of(self, parameter: Tensor) -> str:
        return self._names[id(parameter)]


def grouped(
    parameters: Mapping[str, nn.Parameter],
    everywhere: Iterable[ParameterSpec],
    options: ParameterOptions | None,
) -> list[Any]:
    """What an optimizer is made from: the parameters, or one group for each distinct set of options.

    `options` is asked of all parameters of the model; those of other ranks have no memory behind them.
    """
    if options is None:
        return list(parameters.values())
    groups: list[dict[str, Any]] = []
    for spec in everywhere:
        own = parameters.get(spec.name)
        asked = _elsewhere(spec) if own is None else own
        given = options(spec.name, asked)
        if not isinstance(given, Mapping) or "params" in given:
            raise InputError(
                f"parameter_options gave {given!r} for {spec.name}; options of the optimizer by name were "
                'expected, as {"weight_decay": 0.0}, or {} for its defaults'
            )
        chosen = dict(given)
        group = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == chosen), None)
        if group is None:
            groups.append(group := {"params": [], **chosen})
        if own is not None:
            group["params"].append(own)
    return groups


def _elsewhere(spec: ParameterSpec) -> nn.Parameter:
    assert spec.spec.example_shape is not None
    return nn.Parameter(torch.empty(spec.spec.example_shape, dtype=spec.spec.dtype, device="meta"))


def _require_optimizer(made: Any, parameters: Iterable[nn.Parameter]) -> None:
    if not isinstance(made, Optimizer):
        raise InputError(f"optimizer gave a {type(made).__name__}; {EXPECTED_OPTIMIZER}")
    own = {id(parameter) for parameter in parameters}
    if any(id(p) not in own for group in made.param_groups for p in group["params"]):
        raise InputError(
            "optimizer steps parameters that it was not given, such as those of the model itself; "
            + EXPECTED_OPTIMIZER
        )
    if isinstance(made, torch.optim.SparseAdam):
        raise InputError(
            "SparseAdam takes sparse gradients, and those of microbatches are added up in dense ones; use an "
            "optimizer that takes those, such as AdamW"
        )
    takes = list(inspect.signature(type(made).step).parameters.values())[1:]
    if any(taken.default is taken.empty and taken.kind is taken.POSITIONAL_OR_KEYWORD for taken in takes):
        raise InputError(
            f"{type(made).__name__} computes the loss several times in one step, which a pipeline's update "
            "cannot do; use an optimizer that steps by gradients alone, such as AdamW"
        )


def _require_scheduler(made: Any) -> None:
    if not hasattr(made, "step"):
        raise InputError(
            f"lr_scheduler gave a {type(made).__name__}; a function was expected that makes a "
            "scheduler of the optimizer it is given: lambda optimizer: CosineAnnealingLR(optimizer, 1000)"
        )
    if isinstance(made, ReduceLROnPlateau):
        raise InputError(
            "ReduceLROnPlateau wants a metric at every step, which a pipeline's update does not have; "
            "use a scheduler that steps by itself, such as CosineAnnealingLR"
        )


def _plain_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Its state without the functions in it, which the next run brings itself."""
    plain = (int, float, str, bool, list, tuple, dict, type(None))
    return {k: v for k, v in scheduler.state_dict().items() if isinstance(v, plain) and k != "lr_lambdas"}


def _for_groups(
    saved: Mapping[str, Any], own: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A scheduler's saved state for an optimizer with these groups, whose options have been loaded.

    Another number of ranks may have another number of groups, where the optimizer's factory made them of the
    parameters that it was given. Raises InputError for a list whose part of each group cannot be told.
    """
    state = dict(saved)
    if "lr_lambdas" in own:
        state["lr_lambdas"] = [None] * len(groups)  # the functions stay its own
    for key, option in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if key in state and all(option in group for group in groups):
            state[key] = [group[option] for group in groups]
    for key, before in state.items():
        now = own.get(key)
        if not isinstance(before, list) or not isinstance(now, list) or not before:
            continue
        if isinstance(before[0], dict):  # of schedulers one after another
            state[key] = [_for_groups(*pair, groups) for pair in zip(before, now, strict=False)]
            continue
        if len(before) == len(now):
            continue
        if any(value != before[0] for value in before):
            raise InputError(
                f"the checkpoint's scheduler has {len(before)} values of {key!r} where this run's has "
                f"{len(now)}: its option groups differ from rank to rank; go on with as many ranks as then, "
                "or make the groups by parameter_options"
            )
        state[key] = before[:1] * len(now)
    return state
