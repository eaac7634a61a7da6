"""How many microbatches a training method keeps in flight."""

from __future__ import annotations

METHODS = ("2bw", "1f1b", "gpipe")


def microbatches_in_flight(method: str, num_stages: int, microbatches_per_update: int) -> tuple[int, ...]:
    """Microbatches whose activations a stage holds at its worst moment, by stage.

    One forward, one backward (2BW among them): stage s of d holds d - s; GPipe holds the whole update's.
    """
    if method == "gpipe":
        return (microbatches_per_update,) * num_stages
    return tuple(num_stages - stage for stage in range(num_stages))
