"""ONNX files split into ONNX stages: what comes out is what onnxruntime says of the whole file."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import pd2bw_fx
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.errors import ExportError, InputError
from pd2bw_fx.onnx_pipeline import OnnxPipeline
from pd2bw_fx.passes.export_onnx import merge_onnx
from pd2bw_fx.passes.onnx_in import read_onnx
from pd2bw_fx.passes.split_onnx import split_onnx
from tests.onnx_texts import BRANCHES, CHAIN, HEADER, draw, written

# Sending costs next to nothing, so that small graphs are cut evenly.
FAST = {"bytes_per_s": 1e12, "latency_s": 1e-9, "memory_bytes": "1 GiB"}


def whole(path: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def assert_same(pipe: OnnxPipeline, path: Path, inputs: dict[str, np.ndarray]) -> None:
    expected, found = whole(path, inputs), pipe.run(inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return written(CHAIN, tmp_path / "chain.onnx")


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_stages_give_what_the_whole_file_gives_at_sizes_not_seen_before(
    chain: Path, tmp_path: Path, num_stages: int
) -> None:
    pipe = split_onnx(chain, tmp_path / "out", cluster=Cluster.uniform(num_stages, **FAST))

    assert len(pipe.manifest["stages"]) == num_stages
    assert pipe.manifest["batch_sizes_checked"] == [2, 3]
    for size in (1, 7):
        assert_same(pipe, chain, {"x": draw(size, 4)})
    onnx.checker.check_model(pipe.merge(), full_check=True)


def test_an_initialiser_that_two_stages_read_is_in_both_and_once_in_the_merged_model(
    chain: Path, tmp_path: Path
) -> None:
    pipe = split_onnx(chain, tmp_path / "out", cluster=Cluster.uniform(2, **FAST))

    first, second = pipe.manifest["stages"]
    assert first["parameters"] == ["w"]
    assert second["parameters"] == ["v", "w"]
    assert [stage.memory.weight_bytes for stage in pipe.plan.stages] == [64, 128]
    assert sorted(t.name for t in merge_onnx(tmp_path / "out").graph.initializer) == ["v", "w"]


def test_of_a_node_with_several_outputs_only_those_that_are_read_are_sent(chain: Path) -> None:
    model = read_onnx(chain)

    assert model.graph.operators["left"].target == "operator.getitem"
    assert model.graph.operators["left"].outputs[0].shape == ("batch", 2)
    assert model.graph.operators["joined"].reads == ("right", "left")


def test_control_flow_receives_what_its_branches_read_of_the_graph_around(tmp_path: Path) -> None:
    path = written(BRANCHES, tmp_path / "branches.onnx")
    examples = [{"x": draw(size, 4), "flag": np.array(size == 2), "times": np.array(3)} for size in (2, 3)]

    pipe = split_onnx(path, tmp_path / "out", examples=examples, cluster=Cluster.uniform(4, **FAST))

    operators = pipe.graph.operators
    assert set(operators["chosen"].reads) == {"flag", "a", "b"}
    assert set(operators["chosen"].parameters) == {"v", "w"}
    assert set(operators["y"].reads) == {"times", "d", "b"}
    assert any(entry["source"] is not None for stage in pipe.manifest["stages"] for entry in stage["inputs"])
    for flag in (True, False):
        for times in (0, 4):
            assert_same(pipe, path, {"x": draw(5, 4), "flag": np.array(flag), "times": np.array(times)})
    merged = pipe.merge(tmp_path / "merged.onnx")
    onnx.checker.check_model(merged, full_check=True)
    inputs = {"x": draw(5, 4), "flag": np.array(True), "times": np.array(2)}
    np.testing.assert_allclose(
        whole(tmp_path / "merged.onnx", inputs)["y"], whole(path, inputs)["y"], rtol=1e-5
    )


def test_weights_in_a_file_of_their_own_reach_their_stages(tmp_path: Path) -> None:
    path = written(CHAIN, tmp_path / "chain.onnx", external=True)
    assert (tmp_path / "chain.weights").stat().st_size == 128

    pipe = split_onnx(path, tmp_path / "out", cluster=Cluster.uniform(3, **FAST))

    expected = whole(path, {"x": draw(3, 4)})
    (tmp_path / "chain.weights").unlink()  # the stages do not need it any more
    np.testing.assert_allclose(pipe.run({"x": draw(3, 4)})["y"], expected["y"], rtol=1e-5)


def test_what_reads_inputs_and_sizes_alone_is_made_where_it_is_read(tmp_path: Path) -> None:
    text = (
        HEADER
        + """masked (float[batch, 4] x, int64[batch, 4] mask) => (float[batch, 4] y)
    <float[4, 4] w, float[4, 4] v> {
        m = Cast<to = 1>(mask)
        a = MatMul(x, w)
        b = Mul(a, m)
        c = MatMul(b, v)
        y = Mul(c, m)
    }"""
    )
    path = written(text, tmp_path / "masked.onnx")

    pipe = split_onnx(path, tmp_path / "out", cluster=Cluster.uniform(2, **FAST))

    assert pipe.graph.operators["m"].is_replicable
    assert "m" not in pipe.plan.stage_of
    sources = [[entry["source"] for entry in stage["inputs"]] for stage in pipe.manifest["stages"]]
    assert sources[1].count(0) == 1
    assert_same(pipe, path, {"x": draw(3, 4), "mask": np.eye(3, 4, dtype=np.int64)})


def test_a_value_that_the_model_returns_and_a_later_stage_reads_goes_both_ways(tmp_path: Path) -> None:
    text = CHAIN.replace("(float[batch, 4] y, float[batch, 2] z)", "(float[batch, 4] b, float[batch, 4] y)")
    path = written(text.replace("z = Neg(left)", ""), tmp_path / "both.onnx")

    pipe = split_onnx(path, tmp_path / "out", cluster=Cluster.uniform(4, **FAST))

    leaving = [
        port for stage in pipe.manifest["stages"] for port in stage["outputs"] if port["tensor"] == "b"
    ]
    assert [bool(port["targets"]) for port in leaving] == [True]
    assert_same(pipe, path, {"x": draw(3, 4)})
    merged = pipe.merge(tmp_path / "merged.onnx")
    assert {output.name for output in merged.graph.output} == {"b", "y"}


def test_sequences_never_cross_a_cut(tmp_path: Path) -> None:
    text = (
        HEADER
        + """sequence (float[2, 4] x) => (float[2, 4] y)
    <float[4, 4] w> {
        a = MatMul(x, w)
        b = MatMul(a, w)
        pair = SequenceConstruct(a, b)
        joined = ConcatFromSequence<axis = 0, new_axis = 1>(pair)
        c = ReduceSum<keepdims = 0>(joined, axes)
        y = MatMul(c, w)
    }""".replace("<float[4, 4] w>", "<float[4, 4] w, int64[1] axes = {0}>")
    )
    path = written(text, tmp_path / "sequence.onnx")

    pipe = split_onnx(path, tmp_path / "out", cluster=Cluster.uniform(4, **FAST))

    assert pipe.plan.stage_of["pair"] == pipe.plan.stage_of["joined"]
    assert_same(pipe, path, {"x": draw(2, 4)})


def test_a_file_of_one_size_is_split_at_that_size(tmp_path: Path) -> None:
    path = written(CHAIN.replace("batch", "5"), tmp_path / "fixed.onnx")

    pipe = split_onnx(path, tmp_path / "out", cluster=Cluster.uniform(2, **FAST))

    assert pipe.manifest["batch_sizes_checked"] == [5]
    assert pipe.manifest["inputs"][0]["shape"] == [5, 4]
    assert_same(pipe, path, {"x": draw(5, 4)})


def test_what_cannot_be_split_is_an_error_that_says_why_and_leaves_nothing(
    chain: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    (tmp_path / "empty.onnx").write_bytes(b"")
    narrow = written(
        CHAIN.replace("a = MatMul(x, w)", "g = Add(x, v)\n    a = MatMul(g, w)"), tmp_path / "n.onnx"
    )
    lost = tmp_path / "lost.onnx"
    onnx.save(parser.parse_model(CHAIN), lost)  # without its weights
    out = tmp_path / "out"

    with pytest.raises(InputError, match="a MatMul reads 'w', which is no input, no initialiser"):
        split_onnx(lost, out, cluster=2)
    with pytest.raises(InputError, match="is no file"):
        split_onnx(tmp_path / "missing.onnx", out, cluster=2)
    with pytest.raises(InputError, match="is no valid ONNX model"):
        split_onnx(tmp_path / "text.onnx", out, cluster=2)
    with pytest.raises(InputError, match="it holds no graph with outputs"):
        split_onnx(tmp_path / "empty.onnx", out, cluster=2)
    with pytest.raises(InputError, match="input 'tokens' is no input of the model; it takes x"):
        split_onnx(chain, out, cluster=2, examples=[{"x": draw(2, 4), "tokens": draw(2, 4)}])
    with pytest.raises(ExportError, match=r"fails in onnxruntime on inputs x \(2, 4\).*pass examples"):
        split_onnx(narrow, out, cluster=2)  # takes a batch of 4 only, and does not say so
    with pytest.raises(InputError, match="at most num_stages="):
        split_onnx(chain, out, cluster=16)

    assert not out.exists()


@pytest.mark.parametrize(
    ("location", "size", "message"),
    [
        ("chain.weights", 100, r"at \d+ to \d+, and that file has 100 bytes; it is cut short"),
        ("chain.weights", None, "and there is no such file"),
        ("../chain.weights", 4096, "outside of its folder"),
    ],
)
def test_weights_that_are_cut_short_gone_or_elsewhere_are_refused(
    tmp_path: Path, location: str, size: int | None, message: str
) -> None:
    path = tmp_path / "model" / "chain.onnx"
    path.parent.mkdir()
    written(CHAIN, path, external=True)
    (path.parent / "chain.weights").unlink()
    if size is not None:
        (path.parent / location).write_bytes(bytes(size))
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    path.write_bytes(model.SerializeToString())

    with pytest.raises(InputError, match=message):
        split_onnx(path, tmp_path / "out", cluster=2)

    assert not (tmp_path / "out").exists()


def test_everything_else_works_without_onnx_and_what_needs_it_says_what_to_install(tmp_path: Path) -> None:
    program = """
import sys
for name in ("onnx", "onnx_ir", "onnxruntime", "onnxscript"):
    sys.modules[name] = None  # as if it were not installed
import pd2bw_fx
from pd2bw_fx.passes.export_onnx import merge_onnx
from pd2bw_fx.passes.split_onnx import split_onnx
for call in (lambda: split_onnx("model.onnx", "parts", cluster=2), lambda: merge_onnx("parts")):
    try:
        call()
    except pd2bw_fx.ExportError as error:
        print(error)
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == 'onnx is not installed; in a clone of pd2bw_fx try: pip install ".[onnx]"\n' * 2


def test_the_how_to_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "ONNX.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}

    for block in blocks:
        exec(compile(block, "ONNX.md", "exec"), names)

    assert len(blocks) == 5
    assert {path.name for path in (tmp_path / "gpt_onnx").iterdir()} == {
        "manifest.json", "model.onnx", "stage_0.onnx", "stage_1.onnx",
    }  # fmt: skip
    outputs = names["outputs"]
    assert isinstance(outputs, dict)
    assert outputs.keys() == {"loss"}


def test_split_itself_takes_an_onnx_file_and_save_keeps_its_stages(chain: Path, tmp_path: Path) -> None:
    pipe = pd2bw_fx.split(str(chain), cluster=Cluster.uniform(3, **FAST), constraints=Constraints(whole=()))

    pipe.save(tmp_path / "kept")

    assert_same(replace(pipe, folder=tmp_path / "kept"), chain, {"x": draw(5, 4)})
    assert "2 stages" not in str(pipe)
    assert "a = MatMul (x, w)" in pipe.text(0)
    assert "0." not in pipe.text(0)  # no numbers
    assert "next best cut" in str(pipe.explain())
    temporary = pipe.folder
    del pipe
    assert not temporary.exists()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("chain.onnx", (1,)), {}, "example_args are for a module"),
        (
            ("chain.onnx",),
            {"loss_fn": print},
            "loss_fn says nothing about an ONNX file.*what does: folder",
        ),
        (("chain.pt",), {}, "an nn.Module or a file that ends with .onnx was expected$"),
        (("chain.pt2",), {}, r"; torch.export.load\(path\) gives the program"),
        ((".",), {}, r"; pd2bw_fx.load\(path\) gives a saved pipeline"),
        (("nowhere.onnx",), {"cluster": 2}, "no file"),
    ],
)
def test_what_says_nothing_about_an_onnx_file_is_refused(
    arguments: tuple[object, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        pd2bw_fx.split(*arguments, **options)
