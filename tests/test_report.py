"""Pictures: what is drawn, where, in which colour."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from pd2bw_fx.actions import Kind
from pd2bw_fx.costs import Costs, StageMemory
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import ModelOutput, Operator, OperatorGraph, ParameterSpec, TensorSpec
from pd2bw_fx.plan import Plan, StagePlan, Transfer
from pd2bw_fx.report import svg
from pd2bw_fx.report.code import code_html
from pd2bw_fx.report.curves import loss_curves
from pd2bw_fx.report.memory import memory_svg
from pd2bw_fx.report.notebook import pipeline_html
from pd2bw_fx.report.page import page_html
from pd2bw_fx.report.timeline import timeline_svg
from pd2bw_fx.stage import Port, StageProgram
from pd2bw_fx.timeline import Event, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def two_ranks(num_microbatches: int = 4, *, method: str = "2bw") -> Timeline:
    """Both ranks: F (1 s) and B (2 s) in turn, one update of no length for each, versions 0, 0, 1, 2, ..."""
    events = []
    for rank in range(2):
        now = float(rank)
        for k in range(num_microbatches):
            version = max(k - 1, 0)
            events.append(Event(rank, Kind.FORWARD, rank, k, version, now, now + 1))
            events.append(Event(rank, Kind.BACKWARD, rank, k, version, now + 1, now + 3))
            events.append(Event(rank, Kind.UPDATE, rank, -1, k + 1, now + 3, now + 3))
            now += 3
    return Timeline(method, 2, 1, tuple(events))


def boxes(picture: str, pattern: str) -> list[ElementTree.Element]:
    """The rectangles with a tooltip (so none of the legend) whose class is like this."""
    found = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return [
        r for r in found if r.find(f"{SVG}title") is not None and re.fullmatch(pattern, r.get("class", ""))
    ]


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_a_timeline_has_a_box_for_each_forward_backward_and_update() -> None:
    picture = timeline_svg(two_ranks())

    assert len(boxes(picture, r"pd-f\d")) == 8
    assert len(boxes(picture, r"pd-b\d")) == 8
    assert len(boxes(picture, r"pd-update")) == 8
    assert "rank 0" in texts(picture)
    assert "rank 1" in texts(picture)


def test_boxes_stand_and_stretch_in_proportion_to_time() -> None:
    timeline = two_ranks()

    forwards = boxes(timeline_svg(timeline), r"pd-f\d")
    backwards = boxes(timeline_svg(timeline), r"pd-b\d")

    starts = [float(box.get("x", "nan")) for box in forwards]
    expected = [event.start_s for event in timeline.events if event.kind is Kind.FORWARD]
    pixels_per_s = (starts[3] - starts[0]) / (expected[3] - expected[0])
    assert starts == pytest.approx([starts[0] + (s - expected[0]) * pixels_per_s for s in expected], abs=0.02)
    # Between neighbours 0.8 pixels are left bare.
    assert [float(b.get("width", "nan")) for b in backwards] == pytest.approx(
        [2 * pixels_per_s - 0.8] * 8, abs=0.02
    )
    assert [float(b.get("width", "nan")) for b in forwards] == pytest.approx(
        [pixels_per_s - 0.8] * 8, abs=0.02
    )


def test_ranks_are_rows_that_do_not_touch() -> None:
    rows = sorted({(float(b.get("y", "nan")), float(b.get("height", "nan")))
                   for b in boxes(timeline_svg(two_ranks()), r"pd-[fb]\d")})  # fmt: skip

    (first_top, first_height), (second_top, _) = rows
    assert first_top + first_height < second_top


def test_microbatches_on_the_same_weights_have_the_same_colour_and_the_next_version_another() -> None:
    colours = [box.get("class") for box in boxes(timeline_svg(two_ranks()), r"pd-b\d")][:4]

    assert colours == ["pd-b0", "pd-b0", "pd-b1", "pd-b2"]
    for index in range(3):
        assert f".pd-b{index}{{fill:{svg.HUES[index]}}}" in timeline_svg(two_ranks())


def test_the_colours_follow_the_readers_scheme_and_text_is_readable_in_both() -> None:
    picture = timeline_svg(two_ranks())
    light, dark = picture.split("@media (prefers-color-scheme:dark)")

    def contrast(a: str, b: str) -> float:
        lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    def luminance(colour: str) -> float:
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [s / 12.92 if s <= 0.03928 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for rules in (light, dark):
        fills = dict(re.findall(r"\.pd-(\w+)\{fill:(#\w{6})\}", rules))
        assert contrast(fills["ink"], fills["surface"]) > 7
        assert contrast(fills["muted"], fills["surface"]) > 4.5
        for name in ("f0", "b0", "f3", "b3", "f4", "b4"):
            assert contrast(fills[f"{name}t"], fills[name]) > 4, name


def test_a_long_timeline_shows_its_beginning_and_says_so() -> None:
    picture = timeline_svg(two_ranks(500))

    assert 130 < len(boxes(picture, r"pd-[fb]\d")) < 160
    assert any("s of 25 min" in text or re.search(r"of 1\.5e\+03 s shown", text) for text in texts(picture))


def test_a_window_shows_only_what_touches_it() -> None:
    picture = timeline_svg(two_ranks(), start_s=3.0, end_s=6.0)

    shown = [box.find(f"{SVG}title") for box in boxes(picture, r"pd-[fb]\d")]
    told = [title.text for title in shown if title is not None and title.text is not None]
    assert len(told) == 5
    assert all("microbatch 1" in text or "rank 1" in text for text in told)


def test_names_with_markup_are_escaped() -> None:
    picture = timeline_svg(two_ranks(method='<b>&"2bw"'))

    assert '<b>&"2bw" on 2 ranks, simulated' in texts(picture)


def test_an_empty_timeline_is_still_a_picture() -> None:
    assert boxes(timeline_svg(Timeline("2bw", 2, 1, ())), r"pd-[fb]\d") == []


def plan_of(*, limit_bytes: int) -> Plan:
    memories = [StageMemory(400, 100, 200, 250, 50, 0), StageMemory(200, 50, 100, 100, 50, 20)]
    stages = tuple(
        StagePlan(s, s, f"cpu:{s}", (f"op{s}",), (f"w{s}",), 1e-3, 2e-3, 0, 0, memory, limit_bytes, 2 - s)
        for s, memory in enumerate(memories)
    )
    transfers = (Transfer("op0", 0, 1, 4096, 4096, 1e-4),)
    return Plan(stages, transfers, 3.1e-3, 3.1e-3, "2bw", 4, "highs", 0.1, "f")


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
    assert marked == ["1000 B of 800 B, 125%"]


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


def two_operators() -> OperatorGraph:
    spec = TensorSpec(("batch", 8), torch.float32, True, (2, 8))
    operators = {
        "op0": Operator("op0", "aten.linear.default", "first", "Linear", ("x",), ("w0",), outputs=(spec,)),
        "op1": Operator("op1", "aten.linear.default", "second", "Linear", ("op0",), ("w1",), outputs=(spec,)),
    }
    weights = {name: ParameterSpec(name, spec) for name in ("w0", "w1")}
    return OperatorGraph(operators, {"x": spec}, weights, {}, (ModelOutput("loss", "op1"),), "loss", "A<B>")


def test_a_notebook_gets_table_timeline_and_memory_without_scripts_or_links() -> None:
    costs = Costs({}, "cpu", 2, "measured")

    page = pipeline_html(two_operators(), costs, plan_of(limit_bytes=1200), two_ranks())

    tree = ElementTree.fromstring(page.replace("<br>", "<br/>"))
    assert [cell.text for cell in tree.iter("th")][:3] == ["stage", "device", "operators"]
    assert "first (1)" in [cell.text for cell in tree.iter("td")]
    assert len(list(tree.iter(f"{SVG}svg"))) == 2
    assert "A&lt;B&gt;" in page
    assert "<script" not in page
    assert re.findall(r"(?:src|href|url)\W", page) == []


SOURCE = '''"""One & two,
over lines."""

class Stage0(Module):
    def forward(self, x):  # (batch, 8)
        return x * 2.5 < 'a'
'''


@pytest.mark.parametrize("source", [SOURCE, "def broken(:\n    'never closed\n", ""])
def test_code_is_shown_line_by_line_as_it_is(source: str) -> None:
    tree = ElementTree.fromstring(code_html(source))

    shown = "".join(tree.itertext()).split("\n") if source else []
    assert [line[6:] for line in shown] == source.splitlines()
    assert [line[:6] for line in shown] == [f"{n:>4}  " for n in range(1, len(shown) + 1)]


def test_code_is_coloured_by_what_its_words_are() -> None:
    tree = ElementTree.fromstring(code_html(SOURCE))

    def of(name: str) -> list[str | None]:
        return [span.text for span in tree.iter("span") if span.get("class") == f"pd-{name}"]

    assert of("keyword") == ["class", "def", "return"]
    assert of("name") == ["Stage0", "forward"]
    assert of("string") == ['"""One & two,', 'over lines."""', "'a'"]
    assert of("comment") == ["# (batch, 8)"]
    assert of("number") == ["2.5"]


def test_the_page_has_every_stage_with_its_ports_and_needs_nothing_from_elsewhere() -> None:
    spec = TensorSpec(("batch", 8), torch.float32, True, (2, 8))
    middle, end = Port("op0", "h", spec, targets=(1,)), Port("op1", "y", spec, model_output="loss")
    received = Port("op0", "h", spec, source=0)
    programs = (
        StageProgram(0, "Stage0", SOURCE, (Port("x", "x", spec),), (middle,), (), (), {}),
        StageProgram(1, "Stage1", "pass\n", (received,), (end,), (), (), {}),
    )
    costs = Costs({}, "cpu", 2, "measured")

    page = page_html(two_operators(), costs, plan_of(limit_bytes=1200), programs, two_ranks())

    body = page[page.index("<main>") : page.index("</body>")].replace("<br>", "<br/>").replace(" open>", ">")
    tree = ElementTree.fromstring(body)
    ports = ["".join(item.itertext()) for item in tree.iter("li")]
    assert ports == [
        "x float32 (batch, 8), input of the model",
        "h float32 (batch, 8), to stage 1",
        "h float32 (batch, 8), from stage 0",
        "y float32 (batch, 8), the model's loss",
    ]
    assert [part.get("id") for part in tree.iter("details")] == ["stage-0", "stage-1"]
    assert re.findall(r"<script|(?:src|href|url)\W|@import", page) == []


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
