"""A model in stages, with its weights: what `split` found, and what the stages compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pd2bw_fx.actions import Schedule
from pd2bw_fx.arguments import require_kind, with_known_options
from pd2bw_fx.batch import BatchLayout
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Costs
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.plan import Plan
from pd2bw_fx.stage import Stage, StageProgram, build_module, run_in_turn
from pd2bw_fx.state import accepted, as_state_dict, is_extra_state, made_up, require_values, state_of
from pd2bw_fx.strides import laid_as
from pd2bw_fx.traced import TraceReport

if TYPE_CHECKING:
    from pd2bw_fx.passes.verify import Forward


class SplitModel:
    """The results of `split`, and the weights, which alone ever change."""

    def __init__(
        self,
        *,
        graph: OperatorGraph,
        costs: Costs,
        cluster: Cluster,
        plan: Plan,
        schedule: Schedule,
        programs: Sequence[StageProgram],
        tensors: Mapping[str, Tensor],
        batch_layout: BatchLayout | None,
        example: Mapping[str, Tensor] | None = None,
        trace_report: TraceReport | None = None,
        reference: Forward | None = None,
        planning_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.graph = graph
        self.costs = costs
        self.cluster = cluster
        self.plan = plan
        self.schedule = schedule
        self.programs = tuple(programs)
        self.batch_layout = batch_layout
        self.example = None if example is None else dict(example)
        self.trace_report = trace_report
        self.reference = reference
        self.planning_options = dict(planning_options or {})
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._stages: tuple[Stage, ...] = ()
        self._state_of_stages: tuple[tuple[int, ...], ...] = ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Each stage's program, and a module with copies of the pipeline's weights.

        Modules are built when they are first asked for, and again when the weights have changed.
        """
        state = tuple(map(state_of, self._tensors.values()))
        if not self._stages or state != self._state_of_stages:
            self._stages, self._state_of_stages = tuple(self._built()), state
        return self._stages

    def _built(self) -> Iterator[Stage]:
        for program in self.programs:
            yield Stage(program, build_module(program, self._tensors))

    @with_known_options
    def run(self, batch: Any) -> dict[str, Tensor]:
        """Runs the stages one after another in this process; returns the model's outputs by name.

        `batch` is a whole batch, in the form that `Engine.step` takes. Gradients flow back through every
        `stages[i].module`. These modules have copies of the weights: their running statistics change from run
        to run, while those of the pipeline, which are saved and exported, stay as they were. Raises
        InputError for a batch that the model was not traced for.
        """
        if self.batch_layout is None:
            raise InputError("to run the stages on a batch, split the model with example_args")
        require_values(self.graph, self._tensors)
        (inputs,) = self.batch_layout.cut(self.batch_layout.flatten(batch), 1)
        outputs = run_in_turn(self.stages, inputs, self.graph)
        return {output.name: outputs[output.name] for output in self.graph.outputs}

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns every parameter, buffer and constant, once each, by its name in the graph."""
        return self._tensors

    @with_known_options
    def state_dict(self) -> dict[str, Tensor]:
        """Returns all stages' weights with the keys, shapes and ties of the original model's state_dict.

        What a module's `get_extra_state` gives is not among them: it is no tensor and stays with the model.
        """
        return as_state_dict((*self.graph.parameters.values(), *self.graph.buffers.values()), self._tensors)

    @with_known_options
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces weights, all or some of them, given by name in the graph or by any tied name.

        Each tensor is converted to the type, the device and the memory order (channels_last, say) of the one
        that it replaces. Entries that a module's `get_extra_state` made (`.._extra_state` in a state_dict)
        are left out. The pipeline keeps copies, so that what was given may change afterwards. The exception
        is a pipeline that was split on the meta device and has no values yet: it keeps the given tensors.
        Once all of its tensors have values, it is like a pipeline that was loaded from a folder: its example
        inputs are made up, and `verify` needs the model.

        Raises InputError for a name that the model does not have, another shape, and unlike values under the
        names of one tied parameter; nothing is replaced then.
        """
        require_kind("tensors", tensors, Mapping, "a dict of tensors by name (a state_dict)")
        tensors = {name: given for name, given in tensors.items() if not is_extra_state(name)}
        for name, tensor in tensors.items():
            require_kind(f"tensors[{name!r}]", tensor, Tensor, "a tensor")
        is_empty = any(tensor.is_meta for tensor in self._tensors.values())
        self._take({name: t.detach() if is_empty else t.detach().clone() for name, t in tensors.items()})

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces weights by tensors that nobody else will change."""
        were_empty = any(tensor.is_meta for tensor in self._tensors.values())
        own = self._tensors
        given = accepted(self.graph, tensors)
        placed = {n: t if own[n].is_meta else laid_as(t.to(own[n].device), own[n]) for n, t in given.items()}
        self._tensors = {**own, **placed}
        if were_empty and not any(tensor.is_meta for tensor in self._tensors.values()):
            self.reference = None  # runs the empty model
            self.example = None if self.example is None else made_up(self.example, beside=self._tensors)
