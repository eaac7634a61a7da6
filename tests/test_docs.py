"""The Python that the documents show is run, and the tutorial from end to end."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

import pd2bw_fx
from pd2bw_fx import cli
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.models import build, gpt
from pd2bw_fx.pipeline import Pipeline
from tests.torchrun import all_succeed, free_port, start_command, torchrun_of_forks

ROOT = Path(__file__).parents[1]


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`build("gpt")` has two layers, which are traced and trained in half the time of four."""
    small = gpt.GPTConfig(num_layers=2)
    monkeypatch.setattr(gpt.GPTConfig, "small", classmethod(lambda _: small))


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


@pytest.mark.usefixtures("methods_kept", "two_layers")
def test_the_how_to_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(blocks("docs/HOWTO.md", "toml")[0])
    names: dict[str, object] = {}

    for block in blocks("docs/HOWTO.md", "python"):
        if not block.startswith("# file: "):  # those are run by the commands (test_doc_commands.py)
            exec(compile(block, "HOWTO.md", "exec"), names)

    assert (tmp_path / "gpt_2" / "stage_1.py").exists()
    metrics = Metrics.load(tmp_path / "gpt_2")
    assert len(metrics.losses) == len(metrics.update_s) == 4
    assert metrics.throughput > 0
    assert "Predicted and measured" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("two_layers")
def test_the_planner_is_called_as_its_page_says() -> None:
    names: dict[str, object] = {}

    exec(compile(blocks("docs/PLANNER.md", "python")[0], "PLANNER.md", "exec"), names)

    assert isinstance(names["plan"], pd2bw_fx.Plan)
    assert names["edited"] == names["plan"]


@pytest.mark.usefixtures("two_layers")
def test_the_first_pipeline_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = blocks("README.md", "python")[0].replace("num_batches=100", "num_batches=2")
    lines = lines.replace("sequence_length=64", "sequence_length=64, num_layers=2", 1)
    names: dict[str, object] = {}

    exec(compile(lines, "README.md", "exec"), names)

    pipe = names["pipe"]
    assert isinstance(pipe, Pipeline)
    assert pipe.state_dict().keys() == build("gpt").state_dict().keys()
    assert (tmp_path / "gpt_onnx" / "stage_1.onnx").exists()


def test_the_readme_shows_a_stage_as_it_is_printed() -> None:
    between_blocks = pd2bw_fx.Constraints(stage_of={"blocks.1": 0, "blocks.2": 1}, whole=("blocks.*",))
    model = gpt.GPT.from_config(gpt.GPTConfig(sequence_length=64))

    pipe = pd2bw_fx.split(
        model, model.example_inputs(), cluster=2, costs="analytic", constraints=between_blocks, check=False
    )

    assert blocks("README.md", "python")[1] in pipe.stages[1].source


def test_the_script_of_the_readme_trains_under_torchrun(tmp_path: Path) -> None:
    head, script = (blocks("README.md", "python")[number] for number in (0, 2))
    until_split = head[: head.index("pipe =")].replace(
        "sequence_length=64", "sequence_length=8, num_layers=2"
    )
    (tmp_path / "cluster.toml").write_text(pd2bw_fx.Cluster.uniform(2, memory_bytes="1 GiB").to_toml())
    (tmp_path / "script.py").write_text(
        f"{until_split}example_args = model.example_inputs()\n"
        "batches = text.byte_batches(batch_size=16, sequence_length=8, seed=0, num_batches=2)\n"
        f"{script}engine.close()\nprint('loss', float(loss))\n"
    )

    trained = torchrun_of_forks(2, tmp_path / "script.py", folder=tmp_path)

    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("loss") == 2


def test_the_reference_has_every_public_name_with_its_docstring() -> None:
    page: str = runpy.run_path(str(ROOT / "docs" / "reference.py"))["reference"]()

    for name in pd2bw_fx.__all__:
        assert f"\n## {name}\n" in page
        assert (getattr(pd2bw_fx, name).__doc__ or "?").splitlines()[0] in page
    assert "model: nn.Module,\n" in page
    assert "\n### TrainResult\n" in page
    assert "\n### Engine.flush\n" in page  # which EngineParts has
    assert "    threads_per_worker: int | None = None,\n" in page


def commands(text: str) -> list[list[str]]:
    """The words of each command in a block, lines that end with a backslash joined."""
    joined = text.replace("\\\n", " ").splitlines()
    return [words for line in joined if (words := shlex.split(line, comments=True))]


def test_the_tutorial_goes_from_a_hugging_face_model_to_two_machines_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    text = (ROOT / "docs/TUTORIAL.md").read_text()

    for language, block in re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL):
        for shown, smaller in (
            ("count=20", "count=4"),
            ("--updates 20", "--updates 4"),
            ("n_layer=4", "n_layer=2"),
        ):
            block = block.replace(shown, smaller)
        file = re.match(r"# file: (\S+)\n", block)
        if file is not None:
            (tmp_path / file[1]).write_text(block)
        elif language == "python":
            exec(compile(block, "TUTORIAL.md", "exec"), names)
        elif "torchrun" in block:
            run_at_once(commands(block), tmp_path)
        else:
            for words in commands(block):
                assert cli.main(words[1:]) == 0

    assert "Predicted and measured" in (tmp_path / "report.html").read_text()
    assert "Predicted and measured" in (tmp_path / "far.html").read_text()


def run_at_once(lines: list[list[str]], folder: Path) -> None:
    """Each machine of the page is a torchrun here, with a rank that is forked."""
    port = str(free_port())
    machines = []
    for number, words in enumerate(lines):
        words = [{"HOST": "localhost", "29500": port}.get(word, word) for word in words]
        machines.append(start_command(words, folder, GLOO_SOCKET_IFNAME="lo", SLURM_NODEID=str(number)))
    all_succeed(machines)
