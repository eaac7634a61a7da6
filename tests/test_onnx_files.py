"""ONNX files of other kinds: old ones, weights inside branches, their notes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import pd2bw_fx
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import ExportError, InfeasibleError, InputError

OLD = """<ir_version: 3, opset_import: ["" : 8]>
old (float[N, 8] x, float[8, 16] w, float[16, 4] v) => (float[N, 4] y) {
    h = MatMul(x, w)
    r = Relu(h)
    y = MatMul(r, v)
}"""


def filled(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """The text as a model, with weights of these shapes."""
    model = parser.parse_model(text)
    draw = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = draw.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_a_file_whose_weights_are_inputs_by_its_version_is_split(tmp_path: Path) -> None:
    path = saved(filled(OLD, w=(8, 16), v=(16, 4)), tmp_path)

    pipe = pd2bw_fx.split(path, cluster=2, num_stages=2)

    assert [entry["name"] for entry in pipe.manifest["inputs"]] == ["x"]
    assert onnx.load(pipe.folder / "stage_0.onnx").ir_version == 4
    onnx.checker.check_model(pipe.merge(), full_check=True)


def test_weights_of_a_branch_need_memory_too(tmp_path: Path) -> None:
    size = 512
    branches = []
    for name in ("one", "other"):
        node = helper.make_node("MatMul", ["h", f"{name}_w"], [f"{name}_y"])
        output = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, ["N", size])
        weight = onnx.numpy_helper.from_array(np.ones((size, size), np.float32), f"{name}_w")
        branches.append(helper.make_graph([node], name, [], [output], [weight]))
    model = filled(
        """<ir_version: 10, opset_import: ["" : 20]>
        branching (float[N, 8] x, bool flag) => (float[N, 4] y) { h = MatMul(x, w)  y = MatMul(c, v) }""",
        w=(8, size),
        v=(size, 4),
    )
    chosen = helper.make_node("If", ["flag"], ["c"], then_branch=branches[0], else_branch=branches[1])
    model.graph.node.insert(1, chosen)
    path = saved(model, tmp_path)

    pipe = pd2bw_fx.split(path, cluster=2)

    assert {"one_w", "other_w"} <= set(pipe.graph.operators["c"].parameters)
    with pytest.raises(InfeasibleError, match="needs 2"):
        pd2bw_fx.split(path, cluster=Cluster.uniform(2, memory_bytes="1 MiB"))


def test_the_merged_model_says_of_itself_what_the_file_said(tmp_path: Path) -> None:
    model = filled(OLD.replace("ir_version: 3", "ir_version: 8"), w=(8, 16), v=(16, 4))
    helper.set_model_props(model, {"names": "{0: 'cat', 1: 'dog'}"})
    model.doc_string, model.model_version, model.domain = "a net", 7, "org.example"

    merged = pd2bw_fx.split(saved(model, tmp_path), cluster=2, num_stages=2).merge()

    assert [(entry.key, entry.value) for entry in merged.metadata_props] == [
        ("names", "{0: 'cat', 1: 'dog'}")
    ]
    assert (merged.doc_string, merged.model_version, merged.domain) == ("a net", 7, "org.example")


LABELS = {"keys_int64s": [0, 1], "values_strings": ["cat", "dog"]}


@pytest.mark.parametrize(
    ("nodes", "output", "error", "said"),
    [
        (
            [("RandomNormalLike", ["h"], ["r"], {"name": "noise"}), ("Add", ["h", "r"], ["y"], {})],
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3]),
            InputError,
            r"'noise' draws random numbers \(RandomNormalLike\)",
        ),
        (
            [
                ("ZipMap", ["h"], ["y"], {"domain": "ai.onnx.ml", "classlabels_int64s": [0, 1, 2]}),
            ],
            helper.make_value_info(
                "y",
                helper.make_sequence_type_proto(
                    helper.make_map_type_proto(
                        TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
                    )
                ),
            ),
            InputError,
            "makes a map .*'zipmap': False",
        ),
        (
            [
                ("ArgMax", ["h"], ["a"], {"axis": 1, "keepdims": 0}),
                ("LabelEncoder", ["a"], ["y"], {"domain": "ai.onnx.ml"} | LABELS),
            ],
            helper.make_tensor_value_info("y", TensorProto.STRING, ["N"]),
            ExportError,
            "'y' leaves a stage and is no tensor of numbers .*text",
        ),
    ],
)
def test_what_is_no_tensor_of_the_same_numbers_each_time_is_refused_by_name(
    nodes: list[tuple[str, list[str], list[str], dict[str, object]]],
    output: onnx.ValueInfoProto,
    error: type[Exception],
    said: str,
    tmp_path: Path,
) -> None:
    model = filled(
        """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 2]>
        odd (float[N, 4] x) => (float[N, 3] y) { h = MatMul(x, w) }""",
        w=(4, 3),
    )
    model.graph.node.extend([helper.make_node(*given, **options) for *given, options in nodes])
    model.graph.output[0].CopyFrom(output)

    with pytest.raises(error, match=said):
        pd2bw_fx.split(saved(model, tmp_path), cluster=2)
