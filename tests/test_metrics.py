"""What a run measured: kept in a file, and shown beside what was predicted."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from pd2bw_fx.actions import Action, Kind
from pd2bw_fx.costs import Costs
from pd2bw_fx.errors import InputError
from pd2bw_fx.metrics import Metrics, Record, timeline_of
from pd2bw_fx.report.measured import comparison, measured_html
from pd2bw_fx.timeline import SENDS, Timeline
from tests.stages import split_of_our_own

METRICS = Metrics("2bw", 4, (3.0, math.nan, 2.0), (9.0, 0.5, 0.4))

# rank 0   F0 SF0 ....... RB0 B0 U        a send goes on beside the next action
# rank 1        RF0 F0 B0 SB0 U
RECORDS = (
    Record(0, "F0(stage 0, W0)", 100.0, 101.0),
    Record(0, "SF0(stage 0, W0)", 101.0, 101.5),
    Record(1, "RF0(stage 1, W0)", 100.0, 101.5),
    Record(1, "F0(stage 1, W0)", 101.5, 102.5),
    Record(1, "B0(stage 1, W0)", 102.5, 104.5),
    Record(1, "SB0(stage 1, W0)", 104.5, 105.5),
    Record(1, "U(stage 1 -> W1)", 104.5, 105.0),
    Record(0, "RB0(stage 0, W0)", 101.0, 105.5),
    Record(0, "B0(stage 0, W0)", 105.5, 107.5),
    Record(0, "U(stage 0 -> W1)", 107.5, 108.0),
)


def test_metrics_come_back_from_their_file_and_a_loss_that_is_no_number_too(tmp_path: Path) -> None:
    metrics = replace(METRICS, records=RECORDS)

    metrics.save(tmp_path)

    found = Metrics.load(tmp_path / "metrics.json")
    assert found.losses[::2] == (3.0, 2.0)
    assert math.isnan(found.losses[1])
    assert found.records == RECORDS
    assert found.throughput == 4 / 0.5  # by the median update
    assert replace(metrics, update_s=(9.0, 0.5)).throughput == 4 / 0.5  # the first of two has the start in it
    json.loads((tmp_path / "metrics.json").read_text(), parse_constant=pytest.fail)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no/metrics\.json cannot be written: No such file .* name a file"):
        Metrics("2bw", 1, (1.0,), (1.0,)).save(tmp_path / "no" / "metrics.json")


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 7}', '{"schema": 1, "method": "2bw"}'])
def test_what_is_no_metrics_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.json").write_text(text)

    with pytest.raises(InputError, match=r"metrics\.json does not hold"):
        Metrics.load(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        Metrics.load(tmp_path / "nothing")


def test_a_run_that_went_on_replaces_the_updates_after_its_checkpoint() -> None:
    later = Metrics("2bw", 4, (1.5, 1.0), (0.7, 0.6), first_update=1)

    whole = later.after(METRICS)

    assert (whole.losses, whole.update_s) == ((3.0, 1.5, 1.0), (9.0, 0.7, 0.6))
    assert whole.first_update == 0
    assert replace(later, first_update=5).after(METRICS).first_update == 5  # a gap: nothing to join


def test_every_kind_of_action_is_read_from_its_text() -> None:
    of_no_microbatch = (Kind.UPDATE, Kind.ALL_REDUCE)
    actions = [Action(kind, 1, -1 if kind in of_no_microbatch else 7, 2) for kind in Kind]
    records = [(0, str(action), at, at + 1.0) for at, action in enumerate(actions)]

    events = timeline_of(records, method="2bw", microbatches_per_update=4).events

    found = [Action(event.kind, event.stage, event.microbatch, event.version) for event in events]
    assert found == actions


def test_records_become_a_timeline_of_one_clock() -> None:
    timeline = replace(METRICS, records=RECORDS).timeline

    assert timeline is not None
    assert (timeline.start_s, timeline.end_s, timeline.num_ranks) == (0.0, 8.0, 2)
    assert timeline.busy_s == (3.5, 3.5)
    assert timeline.origin == "measured"
    assert METRICS.timeline is None
    with pytest.raises(InputError, match="'jump' is no action"):
        timeline_of([(0, "jump", 0.0, 1.0)], method="2bw", microbatches_per_update=1)
    with pytest.raises(InputError, match="ends before it begins"):
        timeline_of([(0, "F0(stage 0, W0)", 1.0, 0.0)], method="2bw", microbatches_per_update=1)


def test_a_chrome_trace_is_well_formed_simulated_and_measured(tmp_path: Path) -> None:
    """Slices of a thread nest and every asynchronous begin has its end, as Perfetto's importer requires."""
    pipe = split_of_our_own("mlp", cluster=3)
    metrics = replace(METRICS, records=RECORDS)
    shown = pipe.draw("timeline", tmp_path / "simulated.json")
    assert shown._repr_html_().startswith("<svg")
    assert list(tmp_path.iterdir()) == [tmp_path / "simulated.json"]
    assert pipe.draw("memory")._repr_html_() == pipe.draw("memory").svg
    assert list(tmp_path.iterdir()) == [tmp_path / "simulated.json"]
    pipe.draw("measured", tmp_path / "measured.json", metrics=metrics)

    for name, timeline in (("simulated", pipe.simulate()), ("measured", metrics.timeline)):
        assert isinstance(timeline, Timeline)
        trace = json.loads((tmp_path / f"{name}.json").read_text())
        assert trace["displayTimeUnit"] in ("ms", "ns")
        events = trace["traceEvents"]
        assert {event["ph"] for event in events} == {"M", "X", "b", "e"}
        threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        assert threads == {rank: f"rank {rank}" for rank in range(timeline.num_ranks)}
        for rank in threads:
            slices = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
            ends = -1.0
            for event in sorted(slices, key=lambda event: (event["ts"], event["ts"] + event["dur"])):
                assert event["ts"] >= ends - 1e-6, "two slices of a thread overlap"
                assert event["dur"] >= 0
                ends = event["ts"] + event["dur"]
        begins = {(e["id"], e["cat"], e["name"], e["pid"]): e["ts"] for e in events if e["ph"] == "b"}
        for end in (event for event in events if event["ph"] == "e"):
            assert begins.pop((end["id"], end["cat"], end["name"], end["pid"])) <= end["ts"]
        assert not begins
        assert sum(1 for event in timeline.events if event.kind in SENDS) > 0


def test_predicted_stands_beside_measured() -> None:
    measured = replace(METRICS, records=RECORDS)
    predicted = measured.timeline
    assert predicted is not None

    rows = {name: rest for name, *rest in comparison(predicted, measured)}

    assert rows["microbatches/s"] == ["0.125", "8", "64.00"]
    assert rows["work of rank 1 on a microbatch"] == ["3.5 s", "3.5 s", "1.00"]
    estimated = Costs({}, "cpu", 2, "analytic")
    assert "3 updates measured" in measured_html(predicted, METRICS, estimated)
    assert "predicted from estimates" in measured_html(predicted, METRICS, estimated)
    assert "estimates" not in measured_html(predicted, METRICS, replace(estimated, origin="measured"))


def test_idle_time_is_compared_between_updates_without_filling_and_draining() -> None:
    # rank 0   F F U B B . U       from 3, when both have updated, to 6, when the first has made its last:
    # rank 1   . . U B . B B U     rank 0 is idle for 1 of 3, rank 1 for 1 of 3
    updates = [(0, 1, 2.0, 3.0), (0, 2, 6.0, 7.0), (1, 1, 2.0, 3.0), (1, 2, 7.0, 8.0)]
    records = [Record(r, f"U(stage {r} -> W{v})", start_s, end_s) for r, v, start_s, end_s in updates]
    busy = [(0, 0.0, 2.0), (0, 3.0, 5.0), (1, 3.0, 4.0), (1, 5.0, 7.0)]
    records += [Record(r, f"B{n}(stage {r}, W0)", a, b) for n, (r, a, b) in enumerate(busy)]
    measured = replace(METRICS, records=tuple(records))
    predicted = measured.timeline
    assert predicted is not None

    rows = {name: rest for name, *rest in comparison(predicted, measured)}

    assert rows["idle share between updates"] == ["25.0%", "25.0%", "1.00"]


def test_a_report_without_a_run_says_what_is_missing(tmp_path: Path) -> None:
    pipe = split_of_our_own("mlp", cluster=2)

    with pytest.raises(InputError, match="no training run has told"):
        pipe.draw("measured", tmp_path / "measured.svg", metrics=METRICS)
    with pytest.raises(InputError, match="no training run to show"):
        pipe.draw("loss", tmp_path / "loss.svg")
