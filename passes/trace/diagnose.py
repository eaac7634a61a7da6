"""Why a front end failed, in one line, and whether the model runs at all."""

from __future__ import annotations

import functools
import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence

from pd2bw_fx.attributes import attributes_kept, without_repeats
from pd2bw_fx.drawing import gpus
from pd2bw_fx.errors import InputError, Pd2bwError, TraceError
from pd2bw_fx.state import same_bits

from .conditions import Conditions
from .program import MODEL_PREFIX, Program

_PACKAGE = Path(__file__).resolve().parent
_TORCH = Path(torch.__file__).resolve().parent
_MAX_LENGTH = 300
_CONDITION = re.compile(r"\b(if|while|assert|and|or|not)\b")
_ASSIGNMENT = re.compile(r"\s*(\w+)\s*=[^=]")
_DRAWS = re.compile(r"\b(rand|randn|randint|random|uniform_?|bernoulli_?)\b")
_LINES_BEFORE = 8
# For who works on torch: its own switches, and a line of its own or of ours where it came upon something.
_OF_TRACERS = re.compile(
    r" (For more information, run with TORCH_LOGS=\S+"
    r"|Caused by: \([^)]*\)"  # told as the place, whole
    r"|consider using data-dependent friendly APIs such as \w+, \w+ and \w+\.|Suggested fixes:$)"
)
_FRAME = re.compile(r'File "([^"]*)", line (\d+), in [^\n]*\n([^\n]*)')


def one_line(error: BaseException) -> str:
    """The first lines of an error that say something, without torch's advice on its own settings."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines if line]
    text = _OF_TRACERS.sub("", " ".join(lines[:3])) or type(error).__name__
    text = text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 3] + "..."
    return f"{type(error).__name__}: {text}" if not text.startswith(type(error).__name__) else text


def source_line(error: BaseException) -> str | None:
    """The innermost line of the model author's code that the error came through, with its text."""
    own = _authors_place(error)
    if own is None:
        return None
    file, number = own
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}" + (f": {text}" if text else "")


def chooses_at_random(error: BaseException) -> bool:
    """Whether a random number decides in Python where the error came through.

    It is drawn in the condition, or in one of the lines before, and comes into the condition by name.
    """
    own = _authors_place(error)
    if own is None:
        return False
    file, number = own
    condition = linecache.getline(file, number)
    if not _CONDITION.search(condition):
        return False
    names, read = set[str](), list[str]()
    for n in range(number, max(0, number - _LINES_BEFORE), -1):
        line = linecache.getline(file, n)
        assigned = _ASSIGNMENT.match(line)
        if n == number or (assigned and assigned[1] in names):
            names |= set(re.findall(r"\w+", line))
            read.append(line)
    return any(_DRAWS.search(line) for line in read)


def _authors_place(error: BaseException) -> tuple[str, int] | None:
    own = None
    for frame in traceback.extract_tb(error.__traceback__):
        if is_the_authors(frame.filename) and frame.filename.endswith(".py"):
            own = frame.filename, frame.lineno or 0
    return own


def met_packed_sequences(error: BaseException) -> bool:
    """Whether one was at hand where the error came through."""
    return any(
        isinstance(value, PackedSequence)
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for value in frame.f_locals.values()
    )


def line_of(node: fx.Node) -> str:
    """The innermost line of the model author's code that a traced node comes from, with its text."""
    own = "a line that torch has not kept"
    for file, number, text in _FRAME.findall(node.meta.get("stack_trace") or ""):
        if is_the_authors(file) and file.endswith(".py"):
            own = f"{Path(file).name}:{number}: {text.strip()}"
    return own


@functools.cache
def is_the_authors(file: str) -> bool:
    """Whether code of that file is the model's, and not torch's or what traces it."""
    parents = Path(file).resolve().parents
    return _TORCH not in parents and _PACKAGE not in parents


def require_eager_run(program: Program) -> None:
    """Runs the model once as it is; InputError with its own words if it does not accept the example inputs.

    Buffers and random generators are as before afterwards. Weights that hold no data are not run.
    """
    if not holds_data(program):
        return
    try:
        _run(program)
    except Pd2bwError:
        raise
    except Exception as error:
        given = dict(zip(program.flat.names, program.flat.tensors, strict=True))
        if program.record.reached_loss:
            raise _own_words("loss_fn", given, error, advice=_LOSS_ACCEPTED) from error
        raise _own_words(type(program.model).__name__, given, error) from error


_EXAMPLE = "the example inputs"
_ACCEPTED = "expected inputs that model(*args, **kwargs) accepts"
_LOSS_ACCEPTED = "the model has run; expected what loss_fn(output, targets) accepts"


@contextmanager
def blaming_the_model(
    name: str,
    forward: Callable[[Mapping[str, Tensor]], Any] | None,
    example: Mapping[str, Tensor] | None,
    *,
    inputs: str = _EXAMPLE,
    advice: str = _ACCEPTED,
) -> Iterator[None]:
    """What runs the traced program in here may raise only where the model itself does not: else InputError.

    torch.export lets through what shapes allow, such as integers where weights are floats.
    """
    try:
        yield
    except Pd2bwError:
        raise
    except Exception:
        if forward is None or example is None:
            raise
        try:
            forward(example)
        except Exception as own:
            raise _own_words(name, example, own, inputs, advice) from own
        raise


def _own_words(
    name: str,
    example: Mapping[str, Tensor],
    error: Exception,
    inputs: str = _EXAMPLE,
    advice: str = _ACCEPTED,
) -> InputError:
    shapes = ", ".join(
        f"{given} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for given, tensor in example.items()
    )
    place = source_line(error)
    at = f" (at {place})" if place else ""
    return InputError(f"{name} itself raises on {inputs} ({shapes}): {one_line(error)}{at}; {advice}")


def conditions_of(program: Program) -> Conditions:
    """What the model asks of the values of tensors on the example inputs; nothing where it cannot be run."""
    conditions = Conditions()
    if holds_data(program):
        with conditions.recorded():
            _run(program)
    return conditions


def holds_data(program: Program) -> bool:
    tensors = [*program.parameters(), *program.buffers(), *program.flat.tensors]
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def _run(program: Program) -> None:
    with state_kept(program), attributes_kept(program.model), torch.enable_grad():
        program.call(dict(zip(program.flat.names, program.flat.tensors, strict=True)))


@contextmanager
def state_kept(module: nn.Module) -> Iterator[list[str]]:
    """Parameters, buffers, tensors that are plain attributes and random generators come out as they went in.

    The list has the names of those that were written, once the block has ended.
    """
    tensors = {
        name: tensor
        for name, tensor in (*module.named_parameters(), *module.named_buffers(), *_attributes(module))
        if not (isinstance(tensor, FakeTensor) or tensor.is_meta)
    }
    held = {name: (tensor.data, tensor.detach().clone()) for name, tensor in tensors.items()}
    written: list[str] = []
    with torch.random.fork_rng(devices=gpus()):
        try:
            yield written
        finally:
            for name, tensor in tensors.items():
                data, before = held[name]
                is_there = (tensor.shape, tensor.data_ptr()) == (data.shape, data.data_ptr())
                if not is_there or not same_bits(data, before):
                    written.append(name)
                    without_repeats(data).copy_(without_repeats(before, data))
                    tensor.data = data


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if type(value) is torch.Tensor and value.layout is torch.strided:
                yield f"{path}.{name}" if path else name, value


def require_nothing_written(names: list[str], *, how: str = "through .data") -> None:
    """What runs while torch.fx traces is not in its graph: `target.data.mul_(0.9)` is done once, and lost.

    Raises TraceError with the first of these names.
    """
    if names:
        raise TraceError(
            f"the forward writes {names[0].removeprefix(MODEL_PREFIX)!r} {how}, or in place where torch.fx "
            "does not see it; write it under torch.no_grad() and without .data, as torch.export can trace, "
            "or outside of the forward. If only a first call writes it, run the model once, then split it"
        )
