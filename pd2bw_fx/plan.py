"""The plan: which operators run where, what crosses, and how well it is known to be the best."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, Self

from pd2bw_fx.arguments import require_kind
from pd2bw_fx.costs import Kept, MemoryModel, StageMemory
from pd2bw_fx.errors import InputError, PlanMismatchError
from pd2bw_fx.problem import ParameterSize
from pd2bw_fx.schema import check_against, schema_of
from pd2bw_fx.units import counted, format_bytes, format_seconds

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a search: its incumbent, and the lower bound that is proven for all other plans."""

    incumbent_s: float
    bound_s: float
    elapsed_s: float

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.bound_s / self.incumbent_s) if self.incumbent_s > 0 else 0.0

    def __str__(self) -> str:
        found, bound = format_seconds(self.incumbent_s), format_seconds(self.bound_s)
        return f"{self.elapsed_s:.1f} s: bottleneck {found}, bound {bound}, gap {self.gap:.2%}"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: its device (by index in the cluster and by name), its operators in program order.

    Times are seconds for one microbatch; `send_s` and `receive_s` are what its links add to that time.
    A stage with `replicas` has copies on as many devices from `device` on, which take microbatches in turn;
    the all-reduce of their gradients costs `gradient_sum_s` a microbatch. Memory is that of each copy.
    """

    stage: int
    device: int
    device_name: str
    operators: tuple[str, ...]
    parameters: tuple[str, ...]
    forward_s: float
    backward_s: float
    send_s: float
    receive_s: float
    memory: StageMemory
    memory_limit_bytes: int
    microbatches_in_flight: int
    recompute: bool = False
    weight_versions: int = 2
    gradients_wait: bool = False
    updates_each: bool = False
    correction_copies: int = 0
    flushes: bool = False
    replicas: int = 1
    gradient_sum_s: float = 0.0

    @property
    def kept(self) -> Kept:
        return Kept(
            self.weight_versions,
            self.microbatches_in_flight,
            self.gradients_wait,
            self.updates_each,
            self.correction_copies,
            self.flushes,
        )

    @property
    def bytes_per_microbatch(self) -> float:
        """Bytes that a microbatch in flight holds: its messages, and its activations unless recomputed."""
        saved = 0 if self.recompute else self.memory.activation_bytes
        return (self.memory.transfer_bytes + saved) / max(1, self.microbatches_in_flight)

    @property
    def load_s(self) -> float:
        """Seconds that this stage needs for one microbatch; the largest load is the bottleneck.

        For a stage with replicas it is the time of one copy per microbatch of the whole pipeline.
        """
        recomputed_s = self.forward_s if self.recompute else 0.0
        one_s = self.forward_s + recomputed_s + self.backward_s + self.send_s + self.receive_s
        return one_s / self.replicas + self.gradient_sum_s

    @property
    def place(self) -> str:
        """The stage's device or devices, in words."""
        return self.device_name if self.replicas == 1 else f"{self.replicas} from {self.device_name} on"


INFERENCE = "inference"  # in place of a method's name: of an ONNX file's plan, which has no updates


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value sent from one stage to a later one.

    `source` made the value, or has received it and hands it on, where that is cheaper for the links. The
    gradient comes back over the same links. `seconds` is latency + bytes / bandwidth, with the gradient's
    where one flows back.
    """

    value: str
    source: int
    target: int
    bytes: int
    gradient_bytes: int
    seconds: float


def update_s(num_microbatches: int, bottleneck_s: float, stages_s: float, *, drains: bool) -> float:
    """Returns the seconds of an update of m microbatches with a bottleneck of b seconds.

    m b, or s + (m - 1) b where the pipeline drains after each update: the first microbatch goes through all
    stages alone, which takes s, and each of the others is done a bottleneck b after the one before it.
    """
    if not drains:
        return num_microbatches * bottleneck_s
    return stages_s + (num_microbatches - 1) * bottleneck_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in pipeline order, and a proof: no plan is faster than `bound_s`.

    gap = 1 - bound_s / bottleneck_s. The bound holds for all assignments, with the routes that this plan
    gives to values. It is 0 where nothing is proven, as where devices have several stages; the bottleneck is
    then the sum of a device's stages. `bound_for` is a hash of all that the bound was proven for: costs,
    cluster, memory and constraints. `bound_of_any`: it holds for plans of every number of stages, among which
    this one was chosen. `fingerprint` is the operator graph's; a plan is refused for any other graph.
    """

    stages: tuple[StagePlan, ...]
    transfers: tuple[Transfer, ...]
    bottleneck_s: float
    bound_s: float
    method: str
    microbatches_per_update: int
    solver: str
    planning_s: float
    fingerprint: str
    costs_origin: str = "measured"
    bound_for: str = ""
    bound_of_any: bool = False

    @property
    def gap(self) -> float:
        """The largest share by which the optimum may be below the bottleneck; 0 is proven optimal."""
        if self.bottleneck_s <= 0:
            return 0.0
        return max(0.0, 1.0 - self.bound_s / self.bottleneck_s)

    @property
    def purpose(self) -> str:
        """What the stages are for: "method 2bw, 4 microbatches an update", or "for inference"."""
        if self.method == INFERENCE:
            return "for inference"
        return f"method {self.method}, {counted(self.microbatches_per_update, 'microbatch')} an update"

    @property
    def proof(self) -> str:
        """How near to the optimum the plan is proven to be, in words."""
        if self.bound_s <= 0 or not self.stages:
            return "how far it is from the optimum is not proven"
        near = "proven optimal" if self.gap <= 1e-9 else f"within {self.gap:.2%} of the optimum (proven)"
        count = "any number of stages" if self.bound_of_any else counted(self.num_stages, "stage")
        return f"{near}: no plan of {count} is faster than {format_seconds(self.bound_s)}"

    def explain(self, **_: Any) -> NoReturn:
        """Raises InputError: a plan has neither the graph nor the costs; `Pipeline.explain` explains it."""
        raise InputError(
            "a plan by itself has neither the graph nor the costs that explain it; call explain() on its "
            "pipeline: pipe.explain(), not pipe.plan.explain()"
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """Returns a line for each stage; `Pipeline` prints what is in them, and `dumps` has everything."""
        lines = [
            f"{counted(self.num_stages, 'stage')}, {self.purpose}: "
            f"{format_seconds(self.bottleneck_s)} a microbatch, {self.proof}"
        ]
        for stage in self.stages:
            again = ", computed again in the backward" if stage.recompute else ""
            lines.append(
                f"  stage {stage.stage} on {stage.place}: {counted(len(stage.operators), 'operator')}, "
                f"{format_seconds(stage.load_s)}, {format_bytes(stage.memory.total_bytes)}{again}"
            )
        return "\n".join(lines)

    @property
    def slowest_place(self) -> str:
        """The stage or device that is the bottleneck, in words."""
        slowest = max(self.stages, key=lambda stage: stage.load_s)
        if math.isclose(self.bottleneck_s, slowest.load_s, rel_tol=1e-9):  # added up in another order
            return f"stage {slowest.stage} on {slowest.place}"
        return "the slowest device, with all stages on it"

    @property
    def num_stages(self) -> int:
        """Of all devices together; some methods have several on one."""
        return len(self.stages)

    @property
    def replicas(self) -> tuple[int, ...] | None:
        """Copies of each stage; None where all have one."""
        counts = tuple(stage.replicas for stage in self.stages)
        return counts if any(count > 1 for count in counts) else None

    @property
    def drains(self) -> bool:
        """Whether its method has no microbatch in flight between two updates."""
        return all(stage.flushes for stage in self.stages)

    @property
    def update_s(self) -> float:
        """Seconds of an update, from the stages' times alone; `simulate` knows which rank waits for which.

        A transfer counts once in the time of the first microbatch through all stages, although it keeps both
        of its stages busy. Where devices have several stages, that time is shared among them: while the first
        microbatch goes on to its next stage, other microbatches use the device. If there are too few
        microbatches to keep the devices busy, each goes through all stages, and is done one slowest stage
        after the one before it; the larger of the two times counts. For data parallelism, whose one stage is
        on every device, it is the time that one device would take alone.
        """
        through_s = sum(stage.load_s - stage.receive_s / stage.replicas for stage in self.stages)
        each = self.num_stages / max(1, len({stage.device for stage in self.stages}))
        stages_s = self.bottleneck_s + max(0.0, through_s - self.bottleneck_s) / each
        found_s = update_s(self.microbatches_per_update, self.bottleneck_s, stages_s, drains=self.drains)
        if each == 1 or not self.drains:
            return found_s
        slowest_s = max(stage.load_s for stage in self.stages)
        return max(found_s, update_s(self.microbatches_per_update, slowest_s, through_s, drains=True))

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each operator, by its name in the graph."""
        return {name: stage.stage for stage in self.stages for name in stage.operators}

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold, as `json_schema` describes it."""
        return {"schema": SCHEMA} | asdict(self) | {"gap": self.gap}

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Returns the JSON schema (draft 2020-12) of what `to_json` writes and `from_json` reads."""
        schema = schema_of(cls)
        told = {"gap": {"type": "number"}}  # written for readers, and computed when it is read
        schema["properties"] = {"schema": {"const": SCHEMA, "type": "integer"}} | schema["properties"] | told
        schema["required"] = ["schema", *schema["required"]]
        return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises PlanMismatchError naming the first entry that is missing or wrong."""
        if not isinstance(data, dict):
            raise PlanMismatchError(
                f"the plan is a {type(data).__name__}; the object of Plan.to_json was expected"
            )
        if data.get("schema") != SCHEMA:
            found = data.get("schema", "none")
            raise PlanMismatchError(f"the plan has schema {found}, this version reads {SCHEMA}; plan again")
        check_against(cls.json_schema(), data, "plan")
        fields = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
        del fields["stages"], fields["transfers"]
        stages = tuple(_stage_from_json(entry) for entry in data["stages"])
        transfers = tuple(Transfer(**entry) for entry in data["transfers"])
        if not 0 <= fields["bound_s"] <= fields["bottleneck_s"]:
            raise PlanMismatchError(
                f"plan.bound_s is {fields['bound_s']}; 0 (nothing is proven) to bottleneck_s was expected"
            )
        return cls(stages=stages, transfers=transfers, **fields)

    def dumps(self) -> str:
        """The plan as JSON text, which may be edited and read with `loads`."""
        return json.dumps(self.to_json(), indent=1)

    @classmethod
    def loads(cls, text: str) -> Self:
        """Reads what `dumps` wrote, edited by hand perhaps. Raises PlanMismatchError for anything else."""
        require_kind("text", text, (str, bytes), "the JSON that Plan.dumps() gives")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanMismatchError(f"the plan is no valid JSON: {error}") from None
        return cls.from_json(data)


def as_one_stage(plan: Plan, sizes: Mapping[str, ParameterSize], memory_model: MemoryModel) -> Plan:
    """Joins the plan's stages to one, on the first one's device: what data parallelism runs on every rank.

    Its memory is the sum over the stages, with the activations of one microbatch and one version of the
    weights; weights that stages share count once. `sizes` are the problem's.
    """
    stages = plan.stages
    held = [max(1, stage.microbatches_in_flight) for stage in stages]
    parameters = tuple(dict.fromkeys(name for stage in stages for name in stage.parameters))
    trainable = sum(sizes[name].trainable_bytes for name in parameters)
    frozen = sum(sizes[name].frozen_bytes for name in parameters)
    memory = StageMemory(
        weight_bytes=trainable + frozen,
        gradient_bytes=memory_model.gradient_copies * trainable,
        optimizer_bytes=memory_model.optimizer_copies * trainable,
        activation_bytes=sum(
            stage.memory.activation_bytes // (1 if stage.recompute else count)
            for stage, count in zip(stages, held, strict=True)
        ),
        transfer_bytes=0,
        workspace_bytes=max(stage.memory.workspace_bytes for stage in stages),
    )
    again_s = sum(stage.forward_s for stage in stages if stage.recompute)
    together = replace(
        stages[0],
        operators=tuple(name for stage in stages for name in stage.operators),
        parameters=parameters,
        forward_s=sum(stage.forward_s for stage in stages),
        backward_s=sum(stage.backward_s for stage in stages) + again_s,
        send_s=0.0,
        receive_s=0.0,
        memory=memory,
        microbatches_in_flight=1,
        recompute=False,
        weight_versions=1,
        gradients_wait=False,
        updates_each=False,
        correction_copies=0,
        flushes=True,
        replicas=1,
        gradient_sum_s=0.0,
    )
    return replace(plan, stages=(together,), transfers=(), bottleneck_s=together.load_s, bound_s=0.0)


def _stage_from_json(data: Mapping[str, Any]) -> StagePlan:
    fields = dict(data)
    fields["operators"] = tuple(fields["operators"])
    fields["parameters"] = tuple(fields["parameters"])
    fields["memory"] = StageMemory(**fields["memory"])
    return StagePlan(**fields)
