"""What a caller gives up is freed: nothing that is imported or remembered on the way keeps a model."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pd2bw_fx
from pd2bw_fx.models import build
from tests.torchrun import environment


def kept() -> list[str]:
    """Returns what is still in memory after a model and its pipeline have been dropped."""
    model = build("mlp")
    pipe = pd2bw_fx.split(model, cluster=2, costs="analytic")
    watched = {"model": weakref.ref(model), "pipeline": weakref.ref(pipe)}
    watched |= {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    del model, pipe
    gc.collect()
    return [name for name, still in watched.items() if still() is not None]


def main() -> None:
    """The first call in a process imports what there is to import, with the caller's frame above it."""
    watched = first_call()
    gc.collect()
    sys.stdout.write("kept" if watched() is not None else "freed")


def first_call() -> weakref.ref[object]:
    model = build("mlp")
    pd2bw_fx.split(model, cluster=2, costs="analytic")
    return weakref.ref(model)


def test_a_model_and_its_pipeline_are_freed() -> None:
    assert not kept()
    assert not kept()


def test_the_first_split_of_a_process_keeps_no_frame_of_its_caller() -> None:
    program = "from tests.test_freed import main; main()"
    ran = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)

    assert (ran.stdout, ran.stderr) == ("freed", "")
