"""Bars, curves and graphs: what is drawn, and where; the same as PNG."""

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import image

from pd2bw_fx.errors import InputError
from pd2bw_fx.report import svg
from pd2bw_fx.report.curves import loss_curves
from pd2bw_fx.report.graph_svg import graph_svg
from pd2bw_fx.report.loads import loads_svg
from pd2bw_fx.report.losses import losses_svg
from pd2bw_fx.report.memory import memory_svg
from pd2bw_fx.report.picture import Picture, write_picture
from pd2bw_fx.report.timeline import timeline_svg
from tests.drawn import SVG, boxes, chains, plan_of, texts, two_ranks


def test_memory_bars_have_their_parts_in_proportion_to_the_bytes() -> None:
    parts = boxes(memory_svg(plan_of(limit_bytes=1200)), r"pd-m\d")

    widths = [float(part.get("width", "nan")) for part in parts]
    per_byte = widths[0] / 400
    assert widths == pytest.approx(
        [n * per_byte for n in (400, 100, 200, 250, 50, 200, 50, 100, 100, 50, 20)], abs=0.02
    )
    # Each part begins where the one before it ends.
    first = parts[:5]
    ends = [float(p.get("x", "nan")) + float(p.get("width", "nan")) for p in first]
    assert [float(p.get("x", "nan")) for p in first[1:]] == pytest.approx(ends[:-1], abs=0.02)


def test_the_limit_stands_at_its_bytes_and_a_stage_over_it_is_marked() -> None:
    picture = memory_svg(plan_of(limit_bytes=800))

    bar = boxes(picture, r"pd-m0")[0]
    line = boxes(picture, r"pd-alarm")[0]
    left, per_byte = float(bar.get("x", "nan")), float(bar.get("width", "nan")) / 400
    middle = float(line.get("x", "nan")) + float(line.get("width", "nan")) / 2
    assert middle == pytest.approx(left + 800 * per_byte, abs=0.05)
    marked = [
        e.text for e in ElementTree.fromstring(picture).iter(f"{SVG}text") if e.get("class") == "pd-alarm"
    ]
    assert marked == ["0.977 KiB of 800 B, 125%"]


def test_a_limit_far_beyond_the_bars_is_told_in_words() -> None:
    picture = memory_svg(plan_of(limit_bytes=2**34))

    assert boxes(picture, r"pd-alarm") == []
    assert any("of 16 GiB" in text for text in texts(picture))


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 7.3), (12.5, 13.1), (0, 0.004), (3, 41000)])
def test_ticks_are_a_few_round_numbers_inside_the_range(start: float, end: float) -> None:
    found = svg.ticks(start, end, 10)

    assert 3 <= len(found) <= 11
    assert all(start - 1e-9 <= tick <= end * (1 + 1e-9) for tick in found)
    step = found[1] - found[0]
    assert f"{step:e}"[0] in "125"


def test_bars_of_time_are_in_proportion_and_the_slowest_stage_is_named() -> None:
    _, plan = chains(3, 2)
    slow = replace(plan.stages[1], forward_s=0.004, recompute=True)
    plan = replace(plan, stages=(plan.stages[0], slow, plan.stages[2]))

    picture = loads_svg(plan)

    widths = {
        (box.find(f"{SVG}title").text or "").split(":")[0]: float(box.get("width", "0"))  # type: ignore[union-attr]
        for box in boxes(picture, "pd-l[0-4]")
    }
    assert widths["stage 0, backward"] == pytest.approx(2 * widths["stage 0, forward"], rel=1e-2)
    assert widths["stage 1, forward again"] == pytest.approx(4 * widths["stage 0, forward"], rel=1e-2)
    assert "stage 0, forward again" not in widths
    assert any(text.startswith("slowest: stage 1 on cuda:1, 10 ms") for text in texts(picture))


def test_a_loss_that_is_no_number_is_a_gap_in_the_curve() -> None:
    picture = losses_svg({"a<b": [3.0, 2.5, math.nan, 2.0, 1.0], "other": [3.0]})

    paths = [path.get("d", "") for path in ElementTree.fromstring(picture).iter(f"{SVG}path")]
    assert [path.count("M") for path in paths] == [2, 1]
    assert {"1", "2", "3", "a<b"} <= set(texts(picture))
    with pytest.raises(InputError, match="no loss to draw"):
        losses_svg({"a": [math.nan]})


def test_the_graph_as_a_picture_has_a_box_for_each_operator_and_red_edges_for_the_cuts() -> None:
    graph, plan = chains(3, 5)

    picture = graph_svg(graph, plan)

    assert len(boxes(picture, r"pd-s\d|pd-rule")) == 15 + 2  # and the input, and the mask
    paths = {p.get("stroke"): p.get("d", "") for p in ElementTree.fromstring(picture).iter(f"{SVG}path")}
    assert paths[svg.ALARM[0]].count("M") == len(plan.transfers)


def test_every_picture_is_drawn_as_png_of_the_same_shape(tmp_path: Path) -> None:
    graph, plan = chains(2, 3)
    pictures = {
        "graph": graph_svg(graph, plan),
        "time": loads_svg(plan),
        "memory": memory_svg(plan),
        "loss": losses_svg({"$2BW$": [3.0, math.nan, 2.0, 1.0]}),
        "timeline": timeline_svg(two_ranks()),
    }
    for name, picture in pictures.items():
        write_picture(picture, tmp_path / f"{name}.png", scale=1.0)

        root = ElementTree.fromstring(picture)
        pixels = image.imread(tmp_path / f"{name}.png")
        assert pixels.shape[:2] == (int(float(root.attrib["height"])), int(float(root.attrib["width"])))
        assert len({tuple(p) for p in pixels[::3, ::3].reshape(-1, 4)}) > 5  # it is not blank
    with pytest.raises(InputError, match=r"ends with '\.gif'"):
        write_picture(pictures["graph"], tmp_path / "graph.gif")
    with pytest.raises(InputError, match=r"graph\.png cannot be written: No such file"):
        write_picture(pictures["graph"], tmp_path / "nowhere" / "graph.png")
    with pytest.raises(InputError, match=r"ends with \.svg, \.png or \.json"):
        Picture(pictures["timeline"], two_ranks()).save(tmp_path / "timeline.gif")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_loss_curves_are_written_in_the_paths_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"loss{suffix}"

    loss_curves({"2BW": [3.0 / (u + 1) for u in range(100)], "plain": [2.0, 1.0]}, path)

    start = path.read_bytes()[:8]
    assert start == b"\x89PNG\r\n\x1a\n" if suffix == ".png" else start.startswith(b"<?xml")


def test_loss_curves_refuse_other_formats_and_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"loss\.bmp ends with '\.bmp'"):
        loss_curves({"2BW": [1.0]}, tmp_path / "loss.bmp")
    with pytest.raises(InputError, match="no loss to draw"):
        loss_curves({"2BW": []}, tmp_path / "loss.png")

    assert list(tmp_path.iterdir()) == []
