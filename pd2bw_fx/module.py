"""Builds a module from a stage's source and its weights."""

from __future__ import annotations

import builtins
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pd2bw_fx.errors import PlanMismatchError
from pd2bw_fx.source_check import allowed_builtins, check_source, operators_called
from pd2bw_fx.untraced_operands import NAMESPACE

if TYPE_CHECKING:
    from pd2bw_fx.stage import StageProgram

SOURCE_NAME = re.compile(r"<(stage_\d+\.py) [0-9a-f]+>")  # the file of a stage, as tracebacks name it


def build_module(program: StageProgram, tensors: Mapping[str, Tensor], *, copied: bool = True) -> nn.Module:
    """Returns the stage as a module in training mode, with weights from `tensors` (by name in the graph).

    They are `copied`, or else share memory with `tensors`. Raises PlanMismatchError for a source that is not
    a stage's, weights that do not fit it, or an operator that nothing has registered.
    """
    return build_modules(program, tensors, 1, copied=copied)[0]


def build_modules(
    program: StageProgram, tensors: Mapping[str, Tensor], count: int, *, copied: bool = True
) -> list[nn.Module]:
    """Returns so many modules of one class, as `build_module` makes one; torch.compile compiles it once."""
    made = _class_of(program)
    return [_module_of(made, program, tensors, copied=copied) for _ in range(count)]


def _class_of(program: StageProgram) -> type[nn.Module]:
    """Runs the source, once it is checked, in a namespace of its own; a traceback shows its lines."""
    where = _file_of(program)
    tree = check_source(program.source, where)
    require_operators(program)
    filename = _name_of_source(program)
    linecache.cache[filename] = (len(program.source), None, program.source.splitlines(True), filename)
    namespace: dict[str, object] = {
        "__name__": f"stage_{program.stage}",
        "__builtins__": allowed_builtins(),
    }
    with _name_line_of_errors(where, filename):
        exec(compile(tree, filename, "exec"), namespace)
    # torch.compile looks here for what torch's own functions use. Those of the stage keep what they had.
    namespace["__builtins__"] = vars(builtins)
    made = namespace.get(program.class_name)
    if not isinstance(made, type) or not issubclass(made, nn.Module):
        raise PlanMismatchError(f"{where} defines no module class {program.class_name!r}")
    return made


def _module_of(
    made: type[nn.Module], program: StageProgram, tensors: Mapping[str, Tensor], *, copied: bool
) -> nn.Module:
    where = _file_of(program)
    names = (*program.parameters, *program.buffers)
    missing = next((name for name in names if name not in tensors), None)
    if missing is not None:
        raise PlanMismatchError(f"{where} needs the tensor {missing!r}, and the weights do not have it")
    # The weights come from `tensors`: drawing random ones would be lost time.
    with torch.device("meta"), _name_line_of_errors(where, _name_of_source(program)):
        module: nn.Module = made()
    own = {name: tensors[name].detach() for name in names}
    own = {name: tensor.clone() for name, tensor in own.items()} if copied else own
    _fill(module, program, own, where)
    return module.train()


def _file_of(program: StageProgram) -> str:
    return f"stage_{program.stage}.py"


def _name_of_source(program: StageProgram) -> str:
    """Returns the name that tracebacks find the source by; an edited source has another one."""
    return f"<{_file_of(program)} {abs(hash(program.source)):x}>"


@contextmanager
def _name_line_of_errors(where: str, filename: str) -> Iterator[None]:
    """Raises PlanMismatchError, with the line, for anything that fails in a stage that was edited by hand."""
    try:
        yield
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise PlanMismatchError(f"{where}{line}: {type(error).__name__}: {error}") from error


def require_operators(program: StageProgram) -> None:
    """Raises PlanMismatchError for an operator that the stage calls and this process does not know."""
    for namespace, name in operators_called(program.source):
        if not hasattr(getattr(torch.ops, namespace), name):
            if namespace == NAMESPACE:
                raise PlanMismatchError(
                    f"stage_{program.stage}.py calls {name!r}, which is not traced and not known in "
                    f"this process; define it as before the split, by pd2bw_fx.untraced(.., name={name!r})"
                )
            raise PlanMismatchError(
                f"stage_{program.stage}.py calls the operator {namespace}::{name}, which nothing has "
                "registered in this process; import the module that does before the stages are run"
            )


def held_parameters(program: StageProgram, module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the stage's parameters by name in the graph, which for a tied one need not be the module's."""
    local = dict(module.named_parameters(remove_duplicate=False))
    held = {program.ties.get(name, name): parameter for name, parameter in local.items()}
    return {name: held[name] for name in program.parameters}


def held_buffers(program: StageProgram, module: nn.Module) -> dict[str, Tensor]:
    """Returns the stage's buffers and constants by name in the graph."""
    local = dict(module.named_buffers(remove_duplicate=False))
    held = {program.ties.get(name, name): buffer for name, buffer in local.items()}
    return {name: held[name] for name in program.buffers}


def held_tensors(program: StageProgram, module: nn.Module) -> dict[str, Tensor]:
    """Returns all tensors that the stage holds, by name in the graph."""
    return {**held_parameters(program, module), **held_buffers(program, module)}


def _fill(module: nn.Module, program: StageProgram, own: Mapping[str, Tensor], where: str) -> None:
    filled: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        canonical = program.ties.get(name, name)
        _check_fits(name, parameter, own.get(canonical), where)
        if canonical not in filled:
            filled[canonical] = nn.Parameter(own[canonical], requires_grad=parameter.requires_grad)
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner)._parameters[attribute] = filled[canonical]
    for name, buffer in list(module.named_buffers(remove_duplicate=False)):
        canonical = program.ties.get(name, name)
        _check_fits(name, buffer, own.get(canonical), where)
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner)._buffers[attribute] = own[canonical]
    for inner in module.modules():
        if isinstance(inner, nn.RNNBase):
            inner._init_flat_weights()
    there = {program.ties.get(n, n) for n, _ in module.named_parameters(remove_duplicate=False)}
    there |= {program.ties.get(n, n) for n, _ in module.named_buffers(remove_duplicate=False)}
    missing = sorted(own.keys() - there)
    if missing:
        raise PlanMismatchError(f"{where} builds no tensor {missing[0]!r}, though it should hold it")


def _check_fits(name: str, built: Tensor, given: Tensor | None, where: str) -> None:
    if given is None:
        raise PlanMismatchError(
            f"{where} builds a tensor {name!r}, and the stage has only those of the model that was split; to "
            "add a layer with weights, add it to the model, and split it again"
        )
    if built.shape != given.shape:
        raise PlanMismatchError(
            f"{where} builds {name!r} with shape {tuple(built.shape)}, the weights have {tuple(given.shape)}"
        )
