"""The page of a report: its parts, its code, its graph, and how it does in a browser."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import browser
import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.costs import Costs, OperatorCost
from pd2bw_fx.graph import Operator, TensorSpec
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.report.code import code_html
from pd2bw_fx.report.layout import BOX_HEIGHT, BOX_WIDTH, layout
from pd2bw_fx.report.links import code_lines
from pd2bw_fx.report.notebook import pipeline_html
from pd2bw_fx.report.page import page_html
from pd2bw_fx.report.table import module_ranges
from pd2bw_fx.stage import Port, StageProgram
from tests.drawn import SVG, chains, plan_of, two_operators, two_ranks


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

        search_finds_an_operator(page)
        panel_tells_of_the_operator(page)
        page.run("document.getElementById('pd-graph').scrollIntoView()")
        box = page.run("document.getElementById('pd-canvas').getBoundingClientRect().toJSON()")
        middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        click_beside_the_operator_chooses_its_stage(page, middle)
        click_in_the_middle_chooses_the_operator_that_was_found(page, middle)
        page.drag(middle, (middle[0] + 50, middle[1]))
        page.wheel(*middle, -200)
        link_to_the_code_opens_the_operators_line(page)
        button_of_a_stage_chooses_it(page)
        background_is_of_the_colour_scheme(page, dark)
        assert page.problems == []


def panel_text(page: browser.Page) -> str:
    text: str = page.run("document.getElementById('pd-panel').innerText")
    return text


def search_finds_an_operator(page: browser.Page) -> None:
    page.run("document.getElementById('pd-search').focus()")
    page.type("op_2_0")
    page.press("Enter")
    assert page.run("document.getElementById('pd-found').textContent") == "1 found"


def panel_tells_of_the_operator(page: browser.Page) -> None:
    panel = panel_text(page)
    assert panel.startswith("op_2_0")
    for told in ("blocks.2", "net.py:1", "1.00 ms", "2.00 ms", "64 B", "op_1_5", "mask"):
        assert told in panel


def click_beside_the_operator_chooses_its_stage(page: browser.Page, middle: tuple[float, float]) -> None:
    """The operator that was found stands in the middle of the picture, nothing right above it."""
    page.click(middle[0], middle[1] - 17)
    told = panel_text(page)
    assert told.startswith("stage 2 · cuda:2")
    assert "op_1_5, 64 B, 64 B back, stage 1" in told  # what it receives, and from whom
    assert "op_2_5, 64 B, 64 B back, stage 3" in told


def click_in_the_middle_chooses_the_operator_that_was_found(
    page: browser.Page, middle: tuple[float, float]
) -> None:
    page.click(*middle)
    assert panel_text(page).startswith("op_2_0")


def link_to_the_code_opens_the_operators_line(page: browser.Page) -> None:
    page.run("document.getElementById('pd-to-code').click()")
    assert page.run("document.querySelector('.pd-shown').id") == "code-2-3"
    assert page.run("document.getElementById('stage-2').open")


def button_of_a_stage_chooses_it(page: browser.Page) -> None:
    page.run("[...document.querySelectorAll('#pd-panel a')].at(-1).click()")  # all stages
    page.run("document.querySelectorAll('.pd-pick')[3].click()")
    assert panel_text(page).startswith("stage 3 · cuda:3")


def background_is_of_the_colour_scheme(page: browser.Page, dark: bool) -> None:
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) is dark


@needs_browser
def test_in_a_browser_three_thousand_operators_stay_fluid(tmp_path: Path) -> None:
    """A frame draws each operator in view once, however many keys were pressed since the one before."""
    with browser.browser() as page:
        page.open(big_page(tmp_path, num_stages=64, length=47))
        assert page.run("document.querySelectorAll('.pd-pick').length") == 64
        assert page.run("document.documentElement.scrollWidth") <= 1200
        page.run(
            """(() => {
                const pen = CanvasRenderingContext2D.prototype;
                const calls = { clearRect: 0, fill: 0, stroke: 0, fillText: 0, measureText: 0 };
                for (const name in calls) {
                    const draw = pen[name];
                    pen[name] = function (...given) { calls[name] += 1; return draw.apply(this, given); };
                }
                const canvas = document.getElementById("pd-canvas");
                const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
                window.drawn = async () => {
                    for (const name in calls) calls[name] = 0;
                    for (let turn = 0; turn < 20; turn++) press(turn % 2 ? "ArrowLeft" : "ArrowRight");
                    for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
                    return { ...calls };
                };
            })()"""
        )

        far = page.run("drawn()")
        page.run("document.querySelectorAll('.pd-pick')[30].click()")
        page.frames()
        near = page.run("drawn()")

        assert far["clearRect"] == near["clearRect"] == 1
        assert sum(far.values()) <= 64 * 47 + 64 * 8  # each operator, and a few strokes and words for a stage
        assert near["fill"] < far["fill"] / 4
        assert page.problems == []


def test_a_view_that_is_sent_beside_what_it_views_is_told() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x)
            return x + self.linear(x.view(-1, 8)).view(x.shape)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.mean()

    wishes = pd2bw_fx.Constraints(stage_of={"relu_1": 0, "blocks.1.linear": 1})
    pipe = pd2bw_fx.split(
        Net(), torch.randn(2, 3, 8), cluster=2, costs="analytic", constraints=wishes, check=False
    )
    assert "is a view of relu_1, and stage 1 is sent both" in str(pipe)


BLOCK = tuple(f"blocks.0.{name}" for name in ("norm", "q", "k", "v", "out"))
STACK = ("s.0.down", "s.0.of.0", "s.0.of.1", "s.0.of.2", "s.0.of.3", "s.0.norm", "s.0.up")


@pytest.mark.parametrize(
    ("modules", "here", "shown"),
    [
        (("stem", *BLOCK, "head"), (0, 1, 2, 3), "stem, blocks.0.norm, blocks.0.q, blocks.0.k"),
        (("stem", *BLOCK, "head"), (0, 1, 2, 3, 4), "stem, part of blocks.0"),
        (("stem", *BLOCK, "blocks.1"), (4, 5, 6), "blocks.0.v, blocks.0.out, blocks.1"),
        (("stem", *BLOCK, "blocks.1"), (2, 3, 4, 5, 6), "part of blocks.0, blocks.1"),
        # A stack within a stack is named, and so is what is of no stack.
        (STACK, (0, 1, 3, 5), "s.0.down, s.0.of.0, s.0.of.2, s.0.norm"),
        (("a.q", "a.k", "a.v", "a.out", "a.end"), (0, 1, 2, 3), "a.q, a.k, a.v, a.out"),
    ],
)  # fmt: skip
def test_a_stage_names_modules_but_not_every_part_of_a_block(
    modules: tuple[str, ...], here: tuple[int, ...], shown: str
) -> None:
    operators = {
        f"op_{at}": Operator(f"op_{at}", "aten.relu.default", path, "Module", ("x",))
        for at, path in enumerate(modules)
    }
    graph = replace(two_operators(), operators=operators)

    assert module_ranges(graph, [f"op_{at}" for at in here]) == shown
