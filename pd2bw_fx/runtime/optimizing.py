"""A rank's optimizer and learning rate scheduler: how they are made, stepped, saved and loaded.

Option groups are those of the whole model, in its order, on every rank: a scheduler with a function for each
group has the same groups everywhere, though some may be empty on a rank. A rank that trains nothing has them
too, for their learning rates.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import ParameterSpec
from pd2bw_fx.runtime.checkpoint import Checkpoint
from pd2bw_fx.runtime.optimizer_checks import (
    made_by,
    require_no_hooks,
    require_optimizer,
    require_options_of,
    require_scheduler,
    telling_of_closures,
    telling_of_draws,
    telling_of_the_last_step,
    warn_of_left_out,
)
from pd2bw_fx.runtime.scheduler_state import as_number, plain_state, state_for_groups
from pd2bw_fx.strides import laid_as

OptimizerFactory = Callable[[Any], Optimizer]  # takes what torch's optimizers take: parameters, or groups
SchedulerFactory = Callable[[Optimizer], LRScheduler]
ParameterOptions = Callable[[str, nn.Parameter], Mapping[str, Any]]
_log = logging.getLogger(__name__)
_KIND = "class"  # the key of a scheduler's class, beside its state
_GO_ON = "go on with the one it was made with, or begin from the weights alone"


class RankOptimizer:
    """Steps `parameters`, given by name.

    If there are none, `optimizer` is None, and the learning rates come from an optimizer that steps nothing:
    it is made from the whole model's parameters, without memory behind them.

    Raises InputError for factories that fail, or whose result is not an optimizer, steps other parameters, or
    needs more than gradients to step, and for a misspelt option of its groups. Warns of parameters that the
    optimizer leaves out, and of options that it does not have.
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
        self._stand_in: Optimizer | None = None
        self._is_first_step = True
        if not parameters:
            self._stand_in = _without_parameters(optimizer, list(everywhere), options)
            if scheduler is not None and self._stand_in is not None:
                self._scheduler = scheduler(self._stand_in)
            return
        groups = grouped(parameters, everywhere, options)
        asked = {} if options is None else dict.fromkeys(key for group in groups for key in group)
        self.optimizer = made_by(optimizer, groups, name="optimizer")
        require_optimizer(self.optimizer, parameters.values())
        require_options_of(self.optimizer, asked)
        require_no_hooks(parameters)
        warn_of_left_out(self.optimizer, parameters)
        if scheduler is not None:
            self._scheduler = made_by(scheduler, self.optimizer, name="lr_scheduler")
            require_scheduler(self._scheduler, self.optimizer)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The rates of the groups in the coming step; an optimizer may find them itself, and have none."""
        known = self.optimizer or self._stand_in
        groups = [] if known is None else known.param_groups
        rates = (group.get("lr") for group in groups)
        return tuple(float(rate) for rate in rates if isinstance(rate, float | numbers.Real | Tensor))

    def step(self, *, held_elsewhere: Collection[str] = ()) -> None:
        """Raises InputError for an optimizer that wants a closure, and for one that draws random numbers in
        its first step where some of its parameters are `held_elsewhere`, by other ranks too."""
        assert self.optimizer is not None
        watched = held_elsewhere if self._is_first_step else ()
        with telling_of_closures(self.optimizer), telling_of_draws(self.optimizer, watched):
            self.optimizer.step()
        self._is_first_step = False

    def step_scheduler(self) -> None:
        """Raises InputError for a scheduler that is at its end."""
        if self._scheduler is not None:
            with telling_of_the_last_step(self._scheduler):
                self._scheduler.step()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns tensors as optimizer/NAME/KEY, and plain state: numbers, options and the scheduler."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {"numbers": {}, "options": {}, "groups": [], "scheduler": None}
        if self.optimizer is None:
            return tensors, plain
        plain["optimizer"] = type(self.optimizer).__name__
        if type(self.optimizer).state_dict is not Optimizer.state_dict:
            raise self._cannot_save("what its own state_dict alone knows")
        for group in self.optimizer.param_groups:
            names = [self._name_of(parameter) for parameter in group["params"]]
            options = {key: as_number(value) for key, value in group.items() if key != "params"}
            plain["options"] |= dict.fromkeys(names, options)
            plain["groups"].append(options)
        for name, key, value in self._kept(self.optimizer):
            if isinstance(value, numbers.Number):  # as a tensor it would be rounded to float32
                plain["numbers"].setdefault(name, {})[key] = value
            elif isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
            elif value is not None:
                raise self._cannot_save(f"for {name} a {type(value).__name__} as {key!r}")
        if self._scheduler is not None:
            plain["scheduler"] = {_KIND: type(self._scheduler).__name__, **plain_state(self._scheduler)}
        return tensors, plain

    def _kept(self, optimizer: Optimizer) -> Iterator[tuple[str, str, Any]]:
        """Yields what the optimizer keeps of each parameter: the parameter's name, a key and a value."""
        for parameter, kept in optimizer.state.items():
            if id(parameter) not in self._names:
                raise self._cannot_save(f"for {str(parameter)[:40]!r}, which is no parameter")
            for key, value in kept.items():
                yield self._name_of(parameter), key, value

    def _cannot_save(self, what: str) -> InputError:
        return InputError(
            f"{type(self.optimizer).__name__} keeps {what}; a checkpoint has tensors and numbers for "
            "each parameter: keep it so, or train without save_checkpoint"
        )

    def load(self, checkpoint: Checkpoint, found: Mapping[str, Tensor]) -> None:
        """Loads what `state` returned, on this rank or on those that held its parameters then.

        Parameters that were not trained then begin with new state. Raises InputError for another optimizer's
        state.
        """
        if self.optimizer is not None:
            self._require_same_kinds(checkpoint, self.optimizer)
            self._load(self.optimizer, checkpoint, found)
        elif self._stand_in is not None:
            self._require_same_kinds(checkpoint, self._stand_in)
            try:
                self._load(self._stand_in, checkpoint, {})
            except InputError:  # no reason to stop: nothing is trained at these rates
                self._stand_in = self._scheduler = None

    def _load(self, optimizer: Optimizer, checkpoint: Checkpoint, found: Mapping[str, Tensor]) -> None:
        state = optimizer.state_dict()
        ordered = [self._name_of(p) for group in optimizer.param_groups for p in group["params"]]
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
                group |= _as_far_along(group, checkpoint.options.values(), checkpoint.path)
                continue
            # It may have more: an optimizer counts its steps in an option that the first of them adds.
            if group.keys() - saved.keys() - {"params", "initial_lr"}:
                raise InputError(
                    f"{checkpoint.path} is of another {type(optimizer).__name__}: its options are "
                    f"{', '.join(saved)}; {_GO_ON}"
                )
            group |= {key: _like(value, group.get(key)) for key, value in saved.items()}
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._lay_out(parameter, kept[self._name_of(parameter)])
        if checkpoint.scheduler is not None:
            self._load_scheduler(optimizer, checkpoint, dict(checkpoint.scheduler))

    def _require_same_kinds(self, checkpoint: Checkpoint, optimizer: Optimizer) -> None:
        """Raises InputError for another class of optimizer or scheduler than the checkpoint's.

        Their options may have the same names, and a new scheduler would begin at its own rate.
        """
        mine, scheduler = type(optimizer).__name__, checkpoint.scheduler or {_KIND: "no lr_scheduler"}
        own = "no lr_scheduler" if self._scheduler is None else type(self._scheduler).__name__
        for found, had in ((mine, checkpoint.optimizer or mine), (own, scheduler[_KIND])):
            if found != had:
                raise InputError(
                    f"{checkpoint.path} is of a run with {had}, and this one has {found}; {_GO_ON}"
                )

    def _lay_out(self, parameter: Tensor, kept: Mapping[str, Any]) -> None:
        """Converts loaded state to the type in which it was saved, and to the parameter's memory order.

        torch rounds what it loads to the parameter's type, such as moments in float64 for a float32
        parameter. Fused kernels assume the parameter's memory order (channels_last, say).
        """
        assert self.optimizer is not None
        state = self.optimizer.state[parameter] if kept else {}
        for key, saved in kept.items():
            found = state.get(key)
            if isinstance(found, Tensor) and isinstance(saved, Tensor):
                exact = found if found.dtype == saved.dtype else saved.to(found.device)
                state[key] = laid_as(exact, parameter) if exact.shape == parameter.shape else exact

    def _load_scheduler(self, optimizer: Optimizer, checkpoint: Checkpoint, saved: dict[str, Any]) -> None:
        assert self._scheduler is not None, "checked by _require_same_kinds"
        del saved[_KIND]
        own, groups = self._scheduler.state_dict(), optimizer.param_groups
        state = state_for_groups(saved, own, groups, num_saved=len(checkpoint.groups))
        self._scheduler.load_state_dict(state)

    def _name_of(self, parameter: Tensor) -> str:
        return self._names[id(parameter)]


def _as_far_along(
    group: Mapping[str, Any], trained: Iterable[Mapping[str, Any]], path: Path
) -> dict[str, Any]:
    """Returns options for a group of which nothing was trained when the checkpoint was written.

    They are as far along the schedule as those of the groups that were (`trained`). Without a scheduler they
    are the group's own. Raises InputError where the learning rates of trained groups are not equally far
    along.
    """
    known = [options for options in trained if options.get("initial_lr")]
    if "initial_lr" not in group or not known:
        return {}
    own = as_number(group["initial_lr"])
    alike = [options for options in known if options["initial_lr"] == own] or known
    shares = [options["lr"] / options["initial_lr"] for options in alike]
    if any(not math.isclose(share, shares[0], rel_tol=1e-9, abs_tol=1e-12) for share in shares):
        raise InputError(
            f"{path} has learning rates that are {min(shares):.3g} to {max(shares):.3g} of their first ones, "
            f"so that none can be told for a group in which nothing was trained then; begin from the weights "
            "alone, with a scheduler that is as far as that run was"
        )
    rate = alike[0]["lr"] if alike[0]["initial_lr"] == own else own * shares[0]
    found = {"lr": _like(rate, group["lr"])}
    if "max_momentum" in group:  # OneCycleLR and CyclicLR cycle the momentum too
        found |= {
            key: alike[0][key] for key in ("betas", "momentum") if key in alike[0].keys() & group.keys()
        }
    return found


def _like(saved: Any, own: Any) -> Any:
    return torch.full_like(own, saved) if isinstance(own, Tensor) else saved


def grouped(
    parameters: Mapping[str, nn.Parameter],
    everywhere: Iterable[ParameterSpec],
    options: ParameterOptions | None,
) -> list[Any]:
    """Returns what an optimizer is made from: the parameters, or one group for each distinct set of options.

    `options` is called for all parameters of the model; those of other ranks have no memory behind them.
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


def _without_parameters(
    factory: OptimizerFactory, everywhere: Sequence[ParameterSpec], options: ParameterOptions | None
) -> Optimizer | None:
    """Returns an optimizer of the whole model's option groups, for a rank that has none of their parameters.

    None where the factory cannot do without values.
    """
    if not everywhere:
        return None
    try:
        made = factory(grouped({spec.name: _elsewhere(spec) for spec in everywhere}, everywhere, options))
        made.state.clear()
        for group in made.param_groups:
            group["params"] = []
    except Exception:  # the ranks that have them tell what is wrong, if anything is
        _log.info("this rank trains nothing, and has no learning rates to tell", exc_info=True)
        return None
    # A scheduler warns where the optimizer has not stepped, and a hook of the user's may want gradients.
    made._opt_called = True  # type: ignore[attr-defined]
    return made


def _elsewhere(spec: ParameterSpec) -> nn.Parameter:
    assert spec.spec.example_shape is not None
    return nn.Parameter(torch.empty(spec.spec.example_shape, dtype=spec.spec.dtype, device="meta"))
