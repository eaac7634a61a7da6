"""zb-auto: the best zero-bubble schedule for given times and memory (arXiv 2401.10241, section 4).

Its lists are those that `zb_search.py` finds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from pd2bw_fx.actions import Kind, Shape
from pd2bw_fx.errors import InputError

from .flushed import Turns
from .method import Method, StageMethod
from .times import Times
from .zero_bubble import ZeroBubble1

_KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class ZeroBubbleAuto(StageMethod):
    """Runs the lists of `shape.orders`, which `prepared` finds; every rank must be given the same."""

    name = "zb-auto"
    plans_replicas = False

    def prepared(self, shape: Shape) -> Shape:
        if shape.orders is not None:
            return shape
        return self.prepared_for(shape, Times.equal(shape.num_stages))

    def prepared_for(self, shape: Shape, times: Times) -> Shape:
        super().check(shape)  # a count of microbatches that it refuses has no orders
        from .zb_search import find_orders  # with an integer program's solver, which no other method needs

        turns = shape.microbatches_per_update // shape.replicas_of(0)  # of one replica
        return replace(shape, orders=find_orders(turns, times).orders)

    @property
    def planned_as(self) -> Method:
        return ZeroBubble1()

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape.orders is None:
            raise InputError(
                "zb-auto runs lists that were searched for; complete the shape with "
                "METHODS['zb-auto'].prepared(shape)"
            )
        if len(shape.orders) != shape.num_stages:
            raise InputError(
                f"found orders of {len(shape.orders)} stages; expected {shape.num_stages}: search again"
            )
        for stage, order in enumerate(shape.orders):
            m = self.turns_per_update(shape, stage)
            if sorted(_read(order)) != sorted((kind, k) for kind in _KINDS for k in range(m)):
                raise InputError(
                    f"the order of stage {stage} has not each of F, I and W once for {m} microbatches: "
                    f"{order[:60]}; search again for this number"
                )

    def turns(self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int) -> Turns:
        assert shape.orders is not None
        m = self.turns_per_update(shape, stage)
        for update in updates:
            for kind, turn in _read(shape.orders[stage]):
                yield kind, update * m + turn
            yield Kind.UPDATE, update


@lru_cache(maxsize=4096)
def _read(order: str) -> tuple[tuple[Kind, int], ...]:
    try:
        return tuple((Kind(word[0]), int(word[1:])) for word in order.split())
    except ValueError:
        raise InputError(f"an order is written like 'F0 F1 I0 W0'; found {order[:60]!r}") from None
