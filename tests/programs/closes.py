"""Run by torchrun: the last rank is done after an evaluation, while the first is busy for SECONDS.

torchrun --nproc-per-node 2 closes.py SECONDS RESULT.txt

RESULT.txt tells, of each wait of the last rank for the other, whether it ended as that one had come. Then
an engine is closed with updates in flight, one while an error is on its way and one otherwise. The first rank
adds what it is warned of.
"""

import json
import sys
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.runtime import shared_calls
from pd2bw_fx.runtime.engine_parts import close_at_exit
from pd2bw_fx.runtime.failure import is_met_by_all


def main() -> None:
    torch.manual_seed(0)
    model = build("mlp")
    pipe = pd2bw_fx.split(model, cluster=2, num_stages=2, costs="analytic", check=False)
    engine = pipe.engine(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), microbatches_per_update=2)
    batch = model.example_inputs(batch_size=4)  # type: ignore[operator]
    engine.step(batch)
    engine.flush()
    engine.eval(batch)
    if engine.rank == 0:
        time.sleep(float(sys.argv[1]))
    waits = list[bool]()

    def patient(what: str, num_ranks: int) -> bool:
        waits.append(is_met_by_all(what, num_ranks, within_s=120.0))  # on a slow machine too
        return waits[-1]

    with mock.patch.object(shared_calls, "is_met_by_all", patient):
        engine.close()
    if engine.rank == 1:
        Path(sys.argv[2]).write_text(json.dumps(waits))
    for fails in (True, False):
        told = warned_of(pipe, batch, fails=fails)
        if engine.rank == 0:
            Path(f"{sys.argv[2]}.{fails}").write_text("\n".join(told))


def warned_of(pipe: pd2bw_fx.Pipeline, batch: Any, *, fails: bool) -> list[str]:
    engine = pipe.engine(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), microbatches_per_update=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            engine.step(batch)
        with suppress(ArithmeticError):
            try:
                if fails:
                    raise ArithmeticError
            finally:
                engine.close()
        close_at_exit(weakref.ref(engine))  # as where the program ends then
    return [str(warning.message) for warning in caught]


if __name__ == "__main__":
    main()
