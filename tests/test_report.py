"""Pictures: what is drawn, where, in which colour."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import browser
import pytest
import torch
from matplotlib import image

from pd2bw_fx.actions import Kind
from pd2bw_fx.costs import Costs, OperatorCost, StageMemory
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import ModelOutput, Operator, OperatorGraph, ParameterSpec, TensorSpec
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.plan import Plan, StagePlan, Transfer
from pd2bw_fx.report import svg
from pd2bw_fx.report.code import code_html
from pd2bw_fx.report.curves import loss_curves
from pd2bw_fx.report.graph_svg import graph_svg
from pd2bw_fx.report.layout import BOX_HEIGHT, BOX_WIDTH, layout
from pd2bw_fx.report.links import code_lines
from pd2bw_fx.report.loads import loads_svg
from pd2bw_fx.report.losses import losses_svg
from pd2bw_fx.report.memory import memory_svg
from pd2bw_fx.report.notebook import pipeline_html
from pd2bw_fx.report.page import page_html
from pd2bw_fx.report.picture import write_picture
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
    assert any(re.search(r"of 150\d s shown", text) for text in texts(picture))


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

    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    body = outside[outside.index("<main>") : outside.index("</body>")].replace("<br>", "<br/>")
    tree = ElementTree.fromstring(body)
    links = {link.get("href", "")[1:] for link in tree.iter("a")}
    assert links == {"plan", "graph", "time", "memory", "code"}
    assert links <= {part.get("id") for part in tree.iter()}
    ports = ["".join(item.itertext()) for item in tree.iter("li")]
    assert ports == [
        "x float32 (batch, 8), input of the model",
        "h float32 (batch, 8), to stage 1",
        "h float32 (batch, 8), from stage 0",
        "y float32 (batch, 8), the model's loss",
    ]
    assert [part.get("id") for part in tree.iter("details")] == ["stage-0", "stage-1"]
    # Its own two scripts (data, and what draws them), an empty icon, and nothing else is asked for.
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/json" id="pd-data">',
        "<script>",
    ]
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*|url\(|@import|fetch\(|https?://(?!www.w3.org)", page) == [
        'href="data:,'
    ]


def chains(num_stages: int, length: int) -> tuple[OperatorGraph, Plan]:
    """Each stage a chain of so many operators; every third also reads the mask, which each stage makes."""
    spec = TensorSpec(("batch", 8), torch.float32, True, (2, 8))
    operators = {
        "mask": Operator("mask", "aten.gt.Scalar", "", "Net", ("x",), outputs=(spec,), is_replicable=True)
    }
    last, stages, transfers = "x", [], []
    for stage in range(num_stages):
        names = []
        for number in range(length):
            name = f"op_{stage}_{number}"
            reads = (last, "mask") if number % 3 == 0 else (last,)
            operators[name] = Operator(
                name, "aten.linear.default", f"blocks.{stage}", "Block", reads,
                outputs=(spec,), source_line=f"net.py:{number + 1}",
            )  # fmt: skip
            names.append(name)
            last = name
        memory = StageMemory(1000, 100, 200, 300, 10, 20)
        stages.append(
            StagePlan(
                stage, stage, f"cuda:{stage}", tuple(names), (), 0.001, 0.002, 0.0, 0.0, memory, 2000, 1
            )
        )
        if stage < num_stages - 1:
            transfers.append(Transfer(last, stage, stage + 1, 64, 64, 0.001))
    graph = OperatorGraph(operators, {"x": spec}, {}, {}, (ModelOutput("loss", last),), "loss", "Net")
    plan = Plan(tuple(stages), tuple(transfers), 0.003, 0.003, "2bw", 4, "highs", 0.1, graph.fingerprint())
    return graph, plan


@pytest.mark.parametrize(("num_stages", "length"), [(1, 1), (3, 7), (4, 300), (64, 20)])
def test_boxes_do_not_overlap_stand_in_their_stage_and_below_what_they_read(
    num_stages: int, length: int
) -> None:
    graph, plan = chains(num_stages, length)

    made = layout(graph, plan)

    assert made.places.keys() == {*graph.inputs, *graph.operators}
    taken = sorted(made.places.values())
    for (ax, ay), (bx, by) in itertools.pairwise(taken):
        assert abs(bx - ax) >= BOX_WIDTH or abs(by - ay) >= BOX_HEIGHT
    stage_of = plan.stage_of
    regions = {region.stage: region for region in made.regions}
    for name, (x, y) in made.places.items():
        region = regions[stage_of.get(name, -1)]
        assert region.x < x < x + BOX_WIDTH < region.x + region.width
        assert region.y < y < y + BOX_HEIGHT < region.y + region.height
    for name, operator in graph.operators.items():
        for read in operator.reads:
            if stage_of.get(read, -1) == stage_of.get(name, -1):
                (ax, ay), (bx, by) = made.places[read], made.places[name]
                assert by > ay or bx > ax + BOX_WIDTH  # below, or in a later column
    if num_stages * length > 100:
        assert 0.5 < made.width / made.height / 1.7 < 2


def test_an_operator_is_linked_to_the_line_that_names_its_own_line_in_its_modules_class() -> None:
    graph, plan = chains(2, 3)
    source = '''import torch


class First(Module):
    """blocks.0, from net.py."""

    def forward(self, x):
        y = x + 1  # net.py:1
        return y + 2  # net.py:3


class Stage0(Module):
    def forward(self, x):
        return x  # net.py:1
'''
    programs = [StageProgram(0, "Stage0", source, (), (), (), (), {})]

    lines = code_lines(graph, plan, programs)

    assert lines["op_0_0"] == (0, 8)
    assert lines["op_0_1"] == (0, 4)  # no line names it: where its class begins
    assert lines["op_0_2"] == (0, 9)
    assert "op_1_0" not in lines


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


def big_page(tmp_path: Path, *, num_stages: int, length: int) -> Path:
    graph, plan = chains(num_stages, length)
    cost = OperatorCost(1e-3, 2e-3, 64, 64)
    costs = Costs(dict.fromkeys(graph.operators, cost), "cpu", 2, "measured")
    source = "class Stage{}(Module):\n    def forward(self, x):\n        return x + 1  # net.py:1\n"
    programs = [
        StageProgram(stage, f"Stage{stage}", source.format(stage), (), (), (), (), {})
        for stage in range(num_stages)
    ]
    path = tmp_path / "report.html"
    metrics = Metrics("2bw", 1, (3.0, 2.0, 1.5), (4.0, 3.0, 3.0))
    path.write_text(page_html(graph, costs, plan, programs, two_ranks(), metrics=metrics))
    return path


needs_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="there is no Chromium on this machine")


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser_an_operator_is_found_chosen_and_followed_to_its_code(
    tmp_path: Path, dark: bool
) -> None:
    with browser.browser() as page:
        page.open(big_page(tmp_path, num_stages=4, length=6), dark=dark)
        page.run("document.getElementById('pd-search').focus()")
        page.type("op_2_0")
        page.press("Enter")

        assert page.run("document.getElementById('pd-found').textContent") == "1 found"
        panel = page.run("document.getElementById('pd-panel').innerText")
        assert panel.startswith("op_2_0")
        for told in ("blocks.2", "net.py:1", "1.00 ms", "2.00 ms", "64 B", "op_1_5", "mask"):
            assert told in panel
        # The one that was found stands in the middle of the picture, nothing right above it.
        page.run("document.getElementById('pd-graph').scrollIntoView()")
        box = page.run("document.getElementById('pd-canvas').getBoundingClientRect().toJSON()")
        middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.click(middle[0], middle[1] - 17)
        told = page.run("document.getElementById('pd-panel').innerText")
        assert told.startswith("stage 2 · cuda:2")
        assert "op_1_5, 64 B, 64 B back, stage 1" in told  # what it receives, and from whom
        assert "op_2_5, 64 B, 64 B back, stage 3" in told
        page.click(*middle)
        assert page.run("document.getElementById('pd-panel').innerText").startswith("op_2_0")
        page.drag(middle, (middle[0] + 50, middle[1]))
        page.wheel(*middle, -200)
        page.run("document.getElementById('pd-to-code').click()")
        assert page.run("document.querySelector('.pd-shown').id") == "code-2-3"
        assert page.run("document.getElementById('stage-2').open")
        page.run("[...document.querySelectorAll('#pd-panel a')].at(-1).click()")  # all stages
        page.run("document.querySelectorAll('.pd-pick')[3].click()")
        assert page.run("document.getElementById('pd-panel').innerText").startswith("stage 3 · cuda:3")
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) is dark
        assert page.problems == []


@needs_browser
def test_in_a_browser_three_thousand_operators_stay_fluid(tmp_path: Path) -> None:
    with browser.browser() as page:
        page.open(big_page(tmp_path, num_stages=64, length=47))

        worst_ms = page.run(
            """(async () => {
                const canvas = document.getElementById("pd-canvas"), spent = [];
                const frame = () => new Promise((done) => requestAnimationFrame(done));
                for (let turn = 0; turn < 21; turn++) {
                    const key = turn % 2 ? "ArrowLeft" : "ArrowRight";
                    canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
                    const before = performance.now();
                    await frame(); await frame();
                    spent.push(performance.now() - before);
                }
                return spent.sort((a, b) => a - b)[10];
            })()"""
        )

        assert page.run("document.querySelectorAll('.pd-pick').length") == 64
        assert page.run("document.documentElement.scrollWidth") <= 1200
        assert worst_ms < 100  # two frames, without a graphics card: 33 where nothing else runs
        assert page.problems == []


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
