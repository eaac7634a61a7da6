"""Folders are whole or not there."""

import ast
import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from pd2bw_fx.errors import InputError, PlanMismatchError
from pd2bw_fx.files import read_manifest, whole_folder, write_manifest, writing
from pd2bw_fx.tensor_files import read_tensors, save_tensors


def saved(folder: Path) -> Path:
    with whole_folder(folder) as fresh:
        (fresh / "stage_0.py").write_text("pass\n")
        write_manifest(fresh, {"kind": "test"})
    return folder


def test_a_folder_appears_only_when_everything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="halfway"), whole_folder(tmp_path / "out") as fresh:
        (fresh / "stage_0.py").write_text("pass\n")
        raise RuntimeError("halfway")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_killed_process_has_left_is_removed_a_day_later(tmp_path: Path, *, is_there: bool) -> None:
    folder = saved(tmp_path / "out") if is_there else tmp_path / "out"
    left, fresh = ((folder if is_there else tmp_path) / f".pd2bw_fx-{name}" for name in ("left", "fresh"))
    for each in (left, fresh):
        each.mkdir()
        (each / "stage_0.py").write_text("pass\n")
    os.utime(left, (0, 0))

    saved(folder)

    assert (left.exists(), fresh.exists()) == (False, True)


def test_a_folder_of_ours_is_replaced_whole(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")

    with whole_folder(folder) as fresh:
        (fresh / "other.py").write_text("pass\n")
        write_manifest(fresh, {"kind": "test"})

    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "other.py"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_else_is_in_a_folder_stays_when_it_is_replaced(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    (folder / "run").mkdir()
    (folder / "run" / "checkpoint").write_text("hours of training")
    (folder / "__pycache__").mkdir()

    saved(folder)

    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "run", "stage_0.py"]
    assert (folder / "run" / "checkpoint").read_text() == "hours of training"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("stage_0.py", "edited = True\n", r"stage_0\.py was edited since it was written"),
        ("stage_1.py", "mine = True\n", r"stage_1\.py is not ours"),
        ("manifest.json", '{"kind": "else", "files": {}}', "holds 'else', which 'test' would replace"),
        ("manifest.json", '{"name": "a page of the web"}', "was not written by pd2bw_fx"),
    ],
)
def test_a_folder_is_not_replaced_where_work_would_be_lost(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    folder = saved(tmp_path / "out")
    (folder / name).write_text(text)

    with pytest.raises(InputError, match=said), whole_folder(folder) as fresh:
        for stage in range(2):
            (fresh / f"stage_{stage}.py").write_text("pass\n")
        write_manifest(fresh, {"kind": "test"})

    assert (folder / name).read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_behind_a_link_is_filled_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "notes").symlink_to("elsewhere")
    saved(tmp_path / "disk" / "out")
    (tmp_path / "disk" / "out" / "notes.txt").write_text("mine")
    (tmp_path / "run").symlink_to(Path("disk") / "out")
    (tmp_path / "new").symlink_to(Path("disk") / "made")

    for link in ("run", "new"):
        saved(tmp_path / link)
        assert (tmp_path / link).is_symlink()
        assert read_manifest(tmp_path / link, kind="test")["kind"] == "test"

    assert (tmp_path / "disk" / "out" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "new", "run"]
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["made", "notes", "out"]


def test_the_folder_that_one_stands_in_stays_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = tmp_path.stat().st_ino  # a mount point cannot be another one either

    for _ in range(2):
        saved(Path("."))

    assert tmp_path.stat().st_ino == before
    assert sorted(path.name for path in Path(".").iterdir()) == ["manifest.json", "stage_0.py"]


def test_a_folder_that_is_half_written_says_so_and_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "out")
    moved = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if path.name == "stage_1.py":
            raise KeyboardInterrupt
        return moved(path, target)

    def write(*names: str) -> None:
        with whole_folder(folder) as fresh:
            for name in names:
                (fresh / name).write_text(f"of = {names}\n")
            write_manifest(fresh, {"kind": "test"})

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", killed)
        write("stage_0.py", "stage_1.py")
    with pytest.raises(PlanMismatchError, match=r"is half written: .* save it again"):
        read_manifest(folder, kind="test", check=False)

    write("stage_0.py")
    assert read_manifest(folder, kind="test")["files"].keys() == {"stage_0.py"}
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "stage_0.py"]


def test_a_folder_can_be_copied_onto_itself(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")

    with whole_folder(folder) as fresh:
        shutil.copytree(folder, fresh, dirs_exist_ok=True)

    assert read_manifest(folder, kind="test")["files"].keys() == {"stage_0.py"}
    told = r"holds 'test'; .* 'pd2bw_fx onnx' was expected; pipe\.export_onnx .* writes one"
    with pytest.raises(PlanMismatchError, match=told):
        read_manifest(folder, kind="pd2bw_fx onnx")
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "stage_0.py"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 2, dtype=torch.complex128),
        torch.randn(3, 2, dtype=torch.complex128).t(),
        torch.randn((), dtype=torch.complex128),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex128).conj(),
        torch.randn(3, dtype=torch.complex128).conj().imag,
    ],
)
def test_complex_tensors_are_read_as_they_were(tmp_path: Path, tensor: torch.Tensor) -> None:
    save_tensors({"it": tensor, "other": torch.ones(2)}, tmp_path / "file")

    found = read_tensors(tmp_path / "file")

    assert torch.equal(found["it"], tensor)
    assert found["it"].dtype is tensor.dtype
    assert found["it"].stride() == tensor.stride() or tensor.dtype is torch.float64
    assert torch.equal(found["other"], torch.ones(2))


def test_an_edited_file_that_is_written_as_it_is_may_be_replaced(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    (folder / "stage_0.py").write_text("edited = True\n")

    with whole_folder(folder) as fresh:
        (fresh / "stage_0.py").write_text("edited = True\n")
        write_manifest(fresh, {"kind": "test"})

    assert read_manifest(folder, kind="test")["kind"] == "test"


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(InputError, match="was not written by pd2bw_fx"), whole_folder(tmp_path):
        pass

    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(InputError, match=r"file/out cannot be written: .*; give another folder"):
        saved(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "make room, or"), (errno.EACCES, "in a folder")]
)
def test_what_to_do_is_told_of_a_file_that_cannot_be_written(number: int, advice: str) -> None:
    with pytest.raises(InputError, match=rf"page\.html cannot be written: .* {advice}"), writing("page.html"):
        raise OSError(number, os.strerror(number))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    (folder / "stage_0.py").unlink()

    with pytest.raises(PlanMismatchError, match=r"stage_0\.py is missing"):
        read_manifest(folder, kind="test")


def test_an_altered_file_is_named_and_accepted_on_request(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    (folder / "stage_0.py").write_text("import os\n")

    with pytest.raises(PlanMismatchError, match=r"stage_0\.py is not the file that was saved"):
        read_manifest(folder, kind="test")

    assert read_manifest(folder, kind="test", check=False)["kind"] == "test"


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "no valid JSON"), ("[]", "holds 'list'"), ('{"kind": "else", "files": {}}', "holds 'else'")],
)
def test_a_folder_of_another_kind_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "manifest.json").write_text(text)

    with pytest.raises(PlanMismatchError, match=said):
        read_manifest(tmp_path, kind="test")


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanMismatchError, match="has no manifest"):
        read_manifest(tmp_path, kind="test")


@pytest.mark.parametrize(
    "path", [p for top in ("pd2bw_fx", "passes", "models") for p in Path(top).rglob("*.py")]
)
def test_every_text_file_is_utf_8_whatever_the_locale(path: Path) -> None:
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        modes = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        opens_text = name in ("open", "fdopen") and ast.unparse(call.func) != "os.open"
        if name in ("read_text", "write_text") or (opens_text and not any("b" in mode for mode in modes)):
            assert "encoding" in {keyword.arg for keyword in call.keywords}, ast.unparse(call)
