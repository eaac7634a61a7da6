"""Every command that a document shows is run: as it stands, or with smaller figures (SMALLER).

Those of benchmarks take four minutes by themselves, even so, and are run by `make test-slow`, as are those
that stand for two machines.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import pd2bw_fx
from pd2bw_fx.cli import main
from pd2bw_fx.models.gpt import GPT, GPTConfig
from tests.torchrun import TIMEOUT_S, at_once, free_port, start_command

ROOT = Path(__file__).parents[1]
PROGRAMS = ("pd2bw-fx", "python", "torchrun", "srun", "make", "pip", "export [A-Z_]+=.*")

# What is run in place of what a document shows; a command that is not here runs as it stands.
SMALLER = {
    "compare gpt --cluster 2 --updates 60 --rounds 5": "compare mlp --cluster 2 --updates 2 "
    "--methods 2bw ddp",
    "compare gpt --cluster 2 --updates 20 --rounds 3": "compare mlp --cluster 2 --updates 2 --rounds 2 "
    "--methods gpipe",
    "compare gpt --cluster 4 --rounds 5": "compare mlp --cluster 4 --updates 1 --methods 2bw",
    "compare gpt --cluster cluster.toml --simulate": "compare mlp --cluster cluster.toml --simulate",
    "plan gpt --cluster cluster.toml": "plan mlp --cluster cluster.toml",
    "simulate gpt": "simulate mlp",
    "split gpt --cluster 2": "split mlp --cluster 2",
    "train gpt --cluster 2 --updates 40 --trace": "train gpt_2 --updates 8 --trace",
    "--updates 300 --lr": "--updates 2 --lr",
    "--updates 40": "--updates 8",
    "--updates 1000": "--updates 2",
    "runtime.py --rounds 4 --updates 8 --plot": "runtime.py --rounds 1 --microbatches 2 --only DDP --plot",
    "runtime.py --rounds 3 --updates 8": "runtime.py --rounds 1 --updates 2 --microbatches 2",
    "runtime.py --processes 4 --microbatches 4 8 --rounds 3 --updates 12": "runtime.py --processes 4 "
    "--microbatches 4 --rounds 1 --updates 2 --only bound",
    "--methods 2bw,1f1b --losses": "--methods 2bw,1f1b --updates 2 --rounds 1 --losses",
    "slack.py": "slack.py --rounds 1 --microbatches 4",
    "memory.py": "memory.py --methods pipedream",
    "overhead.py": "overhead.py --updates 4",
    "transport.py": "transport.py --rounds 2",
    "simulated.py --rounds 4": "simulated.py --rounds 1 --updates 1 --models encdec --methods gpipe "
    "--microbatches 4",
    "delay.py": "delay.py --updates 2 --seeds 1",
    "planner.py": "planner.py operators_bert_l-3_inference",
    "planner_graphs.py gpt24 gpt96 2bw branchy": "planner_graphs.py 2bw",
    "planner_models.py": "planner_models.py regnet --devices 4",
    "planner_others.py": "planner_others.py layers_bert24_inference",
    "predictions.py": "predictions.py mlp",
    "benchmarks/coverage.py": "benchmarks/coverage.py mlp",
    "onnx_coverage.py": "onnx_coverage.py mlp",
    "python stage_1.py": "python gpt_2/stage_1.py",
    # One process a machine, and both machines here.
    "--nproc-per-node 4": "--nproc-per-node 1",
    "--rdzv-id run1 ": "",
    "HOST": "localhost",
    "/shared/run": "run",
    "docs/": "",
}
# Benchmarks, and what stands for two machines: test_docs.py and test_checkpoint.py train on two as well.
SLOW = re.compile(r"benchmarks/|srun |--rdzv-backend|--nnodes 2")
# A program's own, or a rank's; what torchrun logs of its agents' exit barrier has the log's prefix.
TRACEBACK = re.compile(r"(?m)^(\[rank\d+\]: ?)?Traceback")
ELSEWHERE = {
    "make demo": "tests/test_cli.py goes the demo's way",
    "make test": "it runs this test",
    "examples/train_gpt.py": "tests/test_engine.py trains it for longer",
    "make install": "a fresh clone's first make does",
    "pip install": "a fresh clone's first make does",
    "export": "an interface of that name may not be here",
    "gpt2_far": "tests/test_docs.py goes through the tutorial",
    "generated_code.py": "tests/test_hugging_face.py compares the page",
}


def commands_of(document: str) -> list[str]:
    """Returns the commands in a document's blocks and indented lines, and of benchmarks in sentences."""
    text = (ROOT / document).read_text().replace("\\\n", " ")
    sentences, blocks = text.split("```")[::2], text.split("```")[1::2]
    bodies = [block.partition("\n")[2] for block in blocks]  # without the language's name
    line = rf"((?:{'|'.join(PROGRAMS)})(?: .*|$))"
    lines = re.findall(rf"(?m)^ *{line}", "\n".join(bodies))
    lines += re.findall(rf"(?m)^ {{4,}}{line}", "\n".join(sentences))
    shown = re.findall(r"`((?:python|pd2bw-fx) (?:benchmarks/)?\w+\.py[^`]*)`", text)
    return [shlex.join(words) for line in (*lines, *shown) if (words := shlex.split(line, comments=True))]


def is_run_here(command: str) -> bool:
    return not any(part in command for part in ELSEWHERE)


def smaller(command: str) -> str:
    for shown, run in SMALLER.items():
        command = command.replace(shown, run)
    return command


def together(commands: Sequence[str]) -> list[tuple[str, ...]]:
    """The commands in their order; together, those that a document shows for each of two machines."""
    steps: list[tuple[str, ...]] = []
    waiting: tuple[str, ...] = ()
    for command in commands:
        if "--node-rank 0" in command:
            waiting = (command,)
            continue
        is_for_both = ("--nnodes 2" in command and not waiting) or command.startswith("srun")
        steps.append((command, command) if is_for_both else (*waiting, command))
        waiting = ()
    return steps


def told() -> list[tuple[str, list[tuple[str, ...]], list[tuple[str, ...]]]]:
    """Each document, its slow steps and the others; each step once."""
    found: list[tuple[str, list[tuple[str, ...]], list[tuple[str, ...]]]] = []
    seen = set[tuple[str, ...]]()
    for document in ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]:
        commands = dict.fromkeys(smaller(c) for c in commands_of(document) if is_run_here(c))
        new = [step for step in together(list(commands)) if step not in seen]
        slow = [step for step in new if SLOW.search(step[-1])]
        found.append((document, slow, [step for step in new if step not in slow]))
        seen |= set(new)
    return found


@pytest.mark.timeout(900)  # the how-to's commands took 235 s on two cores at a load of 12
@pytest.mark.usefixtures("ranks_are_forks")
@pytest.mark.parametrize("document", [document for document, _, rest in told() if rest])
def test_the_commands_of_a_document_run(
    document: str, gpt_in_two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, gpt_in_two, with_onnx=document == "docs/ONNX.md")
    for step in next(rest for name, _, rest in told() if name == document):
        if step[0].startswith("pd2bw-fx"):
            assert main(shlex.split(step[0])[1:]) == 0, step
            continue
        if step[0].startswith("torchrun"):
            code, said = run_of_forks(step[0], tmp_path)
            assert code == 0, f"{step}\n{said}"
            continue
        for code, said in run(step, tmp_path):
            assert code == 0, f"{step}\n{said}"


@pytest.mark.slow
@pytest.mark.parametrize("step", [step for _, slow, _ in told() for step in slow], ids=lambda step: step[-1])
def test_a_slow_command_of_a_document_runs(step: tuple[str, ...], gpt_in_two: Path, tmp_path: Path) -> None:
    if "--device cuda" in step[0] and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    is_benchmark = "benchmarks/" in step[0]
    if not is_benchmark:
        prepare(tmp_path, gpt_in_two, with_onnx=False)
    for code, said in run(step, tmp_path):
        # 1 says that this machine is slower than the benchmark's limits, which no test may depend on.
        assert code == 0 or (is_benchmark and code == 1), f"{step}\n{said}"
        assert said.strip() or not is_benchmark, f"{step} printed nothing"


@pytest.fixture(scope="module")
def gpt_in_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "gpt_2"
    model = GPT.from_config(GPTConfig(num_layers=2, width=32))
    pd2bw_fx.split(model, cluster=2, costs="analytic", check=False).save(folder)
    return folder


def prepare(folder: Path, gpt_in_two: Path, *, with_onnx: bool) -> None:
    """Writes the folders, files and script that a document's earlier steps have made."""
    for name in ("gpt_2", "gpt_8"):
        shutil.copytree(gpt_in_two, folder / name)
    for name in ("two.toml", "cluster.toml"):
        (folder / name).write_text(pd2bw_fx.Cluster.uniform(2, memory_bytes="1 GiB").to_toml())
    how_to = (ROOT / "docs" / "HOWTO.md").read_text()
    for text, name in re.findall(r"```(?:toml|python)\n(# file: (\S+)\n.*?)```", how_to, flags=re.DOTALL):
        (folder / name).write_text(text)
    script = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[2]
    (folder / "train.py").write_text(
        "import torch, pd2bw_fx\nfrom pd2bw_fx.models import build, text\n"
        "model = build('gpt')\nexample_args = model.example_inputs()\n"
        "length = example_args[0].shape[1]\n"
        "batches = text.byte_batches(batch_size=16, sequence_length=length, seed=0, num_batches=2)\n"
        f"{script.replace('cluster.toml', 'two.toml')}engine.close()\n"
    )
    if with_onnx:
        pipe = pd2bw_fx.load(gpt_in_two)
        pipe.export_onnx(folder / "gpt_onnx")
        pd2bw_fx.merge_onnx(folder / "gpt_onnx", folder / "gpt.onnx")
        assert pipe.example is not None
        np.savez(folder / "x.npz", **{name: value.numpy() for name, value in pipe.example.items()})


def run_of_forks(command: str, folder: Path) -> tuple[int, str]:
    """Runs torchrun with ranks that are forked: exit code and output."""
    words = shlex.split(command.replace("29500", str(free_port())))
    ended = start_command(words, folder).ended(TIMEOUT_S)
    said = ended.stdout + ended.stderr
    assert TRACEBACK.search(said) is None, f"{command}\n{said}"
    return ended.returncode, said


def run(commands: Sequence[str], folder: Path) -> list[tuple[int, str]]:
    """At once, each on a machine of its own, as far as a process is one: exit code and output of each."""
    port = str(free_port())
    lines = []
    for command in commands:
        words = shlex.split(command.replace("29500", port))
        if words[0] == "srun":
            words = words[words.index("bash") :]
        lines.append(program(words))
    installed = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = []
    for process in at_once(lines, folder, PATH=installed):
        assert TRACEBACK.search(process.stdout) is None, f"{process.args}\n{process.stdout}"
        ended.append((process.returncode, process.stdout))
    return ended


def program(words: list[str]) -> list[str]:
    """Returns the command as run by this interpreter, whatever is installed on the path."""
    if words[0] == "python":
        file = ROOT / words[1] if words[1].startswith("benchmarks/") else words[1]
        return [sys.executable, str(file), *words[2:]]
    if words[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    return words
