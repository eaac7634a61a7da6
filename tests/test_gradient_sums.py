"""Gradients that several ranks add up: in few calls, and while the last backward still runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from pd2bw_fx.runtime.gradient_sums import TiedParameter, in_buckets
from tests.torchrun import torchrun_of_forks

MEBI = 2**20


def test_replicas_send_one_bucket_from_within_the_last_backward(tmp_path: Path) -> None:
    ran = torchrun_of_forks(4, "overlaps.py", tmp_path / "sent.json")

    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads((tmp_path / "sent.json").read_text())
    calls = [call for sent in told["sent"].values() for call in sent]
    # The first update asks which parameters are used at all, and sends when it knows its own.
    assert [size for _, size in calls] == [10, *[told["parameters"]] * 4]
    assert [action.partition("(")[0] for action, _ in calls] == ["U", "U", "B6", "B10", "B14"]


def test_buckets_follow_the_backward_and_keep_groups_and_types_apart() -> None:
    one, other = (cast(dist.ProcessGroup, object()) for _ in range(2))
    like: dict[str, Any] = {
        "first": torch.empty(20 * MEBI, dtype=torch.uint8),
        "shared": torch.empty(8),
        "half": torch.empty(8, dtype=torch.half),
        "middle": torch.empty(20 * MEBI, dtype=torch.uint8),
        "last": torch.empty(20 * MEBI, dtype=torch.uint8),
    }
    ties = [TiedParameter(name, other if name == "shared" else one) for name in like]

    buckets = in_buckets(ties, like)

    assert buckets[0].names == ("last", "middle")  # full
    assert {(b.group is one, b.names) for b in buckets[1:]} == {
        (True, ("half",)),
        (False, ("shared",)),
        (True, ("first",)),
    }
