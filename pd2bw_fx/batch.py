"""Turns a training batch, as the model's forward takes it, into flat named inputs and microbatches.

(x, (a, b)), targets  ->  {"x": .., "pair_0": .., "pair_1": .., "targets": ..}  ->  m of these, cut along
                          dimension 0
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from torch import Tensor, nn

from pd2bw_fx.batch_input import TOO_FEW, BatchInput
from pd2bw_fx.containers import entry_at, leaves_of, place_of
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import dtype_from_name, dtype_name
from pd2bw_fx.model_arguments import forward_signature
from pd2bw_fx.names import free_name, name_of_path
from pd2bw_fx.plain_values import PlainValue, plain_values, require_plain
from pd2bw_fx.size_range import ANY_SIZE, SizeRange
from pd2bw_fx.units import counted, were

TARGETS = "targets"


class Microbatches(tuple[Any, ...]):
    """An update's microbatches, cut by the caller: each is a batch of the usual form.

    Their sizes may differ, as those of graphs do, or of what is left at the end of an epoch. The loss of the
    update is the mean of theirs, each counted once whatever its number of samples. Raises InputError for what
    is no sequence of batches.
    """

    __slots__ = ()

    def __new__(cls, batches: Iterable[Any] = ()) -> Self:
        if isinstance(batches, str | bytes | Mapping) or not isinstance(batches, Iterable):
            raise InputError(
                f"Microbatches takes a sequence of batches, found one {type(batches).__name__}; expected "
                "Microbatches([(x[:3], y[:3]), (x[3:], y[3:])])"
            )
        return super().__new__(cls, batches)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How a batch becomes the model's inputs.

    A batch is a tuple or list of the forward's positional arguments (targets last, if a loss_fn takes them),
    a dict of its keyword arguments (targets under "targets"), or, if there is one argument, that tensor.
    `arguments` are the forward's positional parameters in order, `rest` is the name of its `*args`, if any.
    `lengths_asked`: the trace was to leave lengths open, though the model may have fixed them.
    """

    inputs: tuple[BatchInput, ...]
    arguments: tuple[str, ...]
    rest: str | None = None
    has_targets: bool = False
    microbatch_sizes: SizeRange = ANY_SIZE
    plain: tuple[PlainValue, ...] = ()
    lengths_asked: bool = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        targets: Any = None,
        *,
        batched: Collection[str] | None = None,
        microbatch_sizes: SizeRange = ANY_SIZE,
        sizes: Mapping[str, tuple[int | None, ...]] | None = None,
    ) -> Self:
        """Returns the layout of batches that look like these example inputs.

        `batched` names the inputs whose dimension 0 is the batch; None: those whose dimension 0 has the size
        that most inputs have. `microbatch_sizes` are those that the model was traced for, `sizes` those of
        single tensors, by input. Raises InputError where a batch could not tell targets from an argument.
        """
        signature = forward_signature(model)
        kinds = signature.parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = tuple(p.name for p in kinds if p.kind in positional)
        rest = next((p.name for p in kinds if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
        layout = cls((), arguments, rest, targets is not None)
        given = dict(zip(layout._argument_names(len(args)), args, strict=True)) | dict(kwargs or {})
        if targets is not None and TARGETS in given:
            raise InputError(
                f"the forward of {type(model).__name__} is given an argument {TARGETS!r}, as what loss_fn "
                "compares with is called in a batch; rename the argument, or compute the loss in the model"
            )
        order = [*arguments, *(name for name in given if name not in signature.parameters)]
        order += [name for name in signature.parameters if name not in order]
        named = {name: given[name] for name in order if name in given}
        if targets is not None:
            named[TARGETS] = targets
        found = [leaf for name, value in named.items() for leaf in _tensors(name, value)]
        counts = Counter(tensor.shape[0] for _, _, tensor in found if tensor.dim())
        batch_size = max(counts, key=lambda size: counts[size]) if counts else 0
        inputs: list[BatchInput] = []
        for argument, path, tensor in found:
            name = free_name(name_of_path(argument, path), [known.name for known in inputs], first=1)
            is_batched = tensor.dim() > 0 and (
                tensor.shape[0] == batch_size if batched is None else name in batched
            )
            own = (sizes or {}).get(name, ())
            own = (None, *own[1:]) if own and is_batched else own
            inputs.append(BatchInput(name, argument, path, tensor.dim(), tensor.dtype, is_batched, own))
        plain = plain_values(signature, named)
        return cls(tuple(inputs), arguments, rest, targets is not None, microbatch_sizes, plain)

    def flatten(self, batch: Any) -> dict[str, Tensor]:
        """Returns the batch's tensors by input name.

        Raises InputError naming what is missing or of a wrong kind.
        """
        call = self._call(batch)
        found = {known.name: self._find(known, call) for known in self.inputs}
        for plain in self.plain:
            require_plain(plain, call)
        self._require_no_more(call)
        return found

    def require_batches(self, batches: Any) -> None:
        """Raises InputError where what should be many batches, as the rows of a tensor may be, is one."""
        if self._is_one_batch(batches):
            names = ", ".join(dict.fromkeys(known.argument for known in self.inputs))
            batch = f"({names})" if "," in names else names or "batch"
            raise InputError(
                f"batches is a single batch; one for each update was expected, such as [{batch}, ..]"
            )

    def _is_one_batch(self, batches: Any) -> bool:
        if isinstance(batches, Mapping):
            return True
        if isinstance(batches, Tensor):
            return len(self.inputs) > 1 or all(known.num_dims == batches.dim() for known in self.inputs)
        num_arguments = len({known.argument for known in self.inputs})
        is_of_tensors = isinstance(batches, tuple | list) and all(
            isinstance(each, Tensor) for each in batches
        )
        return is_of_tensors and num_arguments > 1 and len(batches) == num_arguments

    def flat_batches(self, batch: Any, num_microbatches: int) -> list[dict[str, Tensor]]:
        """Returns the batch as `flatten` does, or each of its microbatches if the caller has cut it."""
        if not isinstance(batch, Microbatches):
            return [self.flatten(batch)]
        if len(batch) != num_microbatches:
            raise InputError(
                f"{counted(len(batch), 'microbatch')} {were(len(batch))} given, and an update has "
                f"{num_microbatches}; pass as many"
            )
        flat = []
        for number, one in enumerate(batch):
            with _telling_which(number):
                flat.append(self.flatten(one))
        return flat

    def pieces(self, flat: Sequence[Mapping[str, Tensor]], num_microbatches: int) -> list[dict[str, Tensor]]:
        """Returns the microbatches of what `flat_batches` returned. Raises InputError as `cut` does."""
        if len(flat) == 1:
            return self.cut(flat[0], num_microbatches)
        pieces = []
        for number, one in enumerate(flat):
            empty = [known for known in self.inputs if known.batched and not len(one[known.name])]
            if empty:
                raise InputError(
                    f"{empty[0].quoted} has 0 samples in microbatch {number}; each has one at least: "
                    f"{TOO_FEW}"
                )
            with _telling_which(number):
                pieces += self.cut(one, 1)
        return pieces

    def cut(self, flat: Mapping[str, Tensor], num_microbatches: int) -> list[dict[str, Tensor]]:
        """Returns equal microbatches along dimension 0.

        Raises InputError for a batch that cannot be cut so.
        """
        sizes = [(known, flat[known.name].shape[0]) for known in self.inputs if known.batched]
        if len({size for _, size in sizes}) > 1:
            found = ", ".join(f"{known}: {size}" for known, size in sizes)
            raise InputError(
                f"the batch's tensors differ in dimension 0 ({found}); all must have one size. Is one of "
                "them for every microbatch whole (class weights, a mask)? Its dimension 0 is as long as the "
                "example batch, and was taken for it: split with another number of samples"
            )
        if sizes:
            first, size = sizes[0]
            first.require_equal_pieces(size, num_microbatches, self.microbatch_sizes)
        pieces: list[dict[str, Tensor]] = [{} for _ in range(num_microbatches)]
        for known in self.inputs:
            tensor = flat[known.name]
            parts = tensor.chunk(num_microbatches) if known.batched else (tensor,) * num_microbatches
            for piece, part in zip(pieces, parts, strict=True):
                piece[known.name] = part
        return pieces

    def restricted(self, names: Iterable[str]) -> Self:
        """Returns the same layout with only these inputs."""
        wanted = set(names)
        return replace(self, inputs=tuple(known for known in self.inputs if known.name in wanted))

    def to_json(self) -> dict[str, Any]:
        inputs = [asdict(known) | {"dtype": dtype_name(known.dtype)} for known in self.inputs]
        return {
            "inputs": inputs,
            "arguments": list(self.arguments),
            "rest": self.rest,
            "has_targets": self.has_targets,
            "microbatch_sizes": self.microbatch_sizes.to_json(),
            "plain": [asdict(plain) for plain in self.plain],
            "lengths_asked": self.lengths_asked,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        inputs = tuple(
            BatchInput(
                **(
                    entry
                    | {
                        "path": tuple(entry["path"]),
                        "dtype": dtype_from_name(entry["dtype"]),
                        "sizes": tuple(entry["sizes"]),
                    }
                )
            )
            for entry in data["inputs"]
        )
        plain = tuple(PlainValue(**(entry | {"path": tuple(entry["path"])})) for entry in data["plain"])
        arguments = tuple(data["arguments"])
        sizes = SizeRange(*data["microbatch_sizes"])
        asked = data.get("lengths_asked", False)
        return cls(inputs, arguments, data["rest"], data["has_targets"], sizes, plain, asked)

    def _call(self, batch: Any) -> dict[str, Any]:
        """Returns the batch's arguments by name."""
        if isinstance(batch, Microbatches):
            raise InputError("Microbatches were given where one batch is expected; pass them one at a time")
        if isinstance(batch, Mapping):
            return dict(batch)
        if isinstance(batch, Tensor):
            batch = (batch,)
        if not isinstance(batch, tuple | list):
            raise InputError(
                f"the batch is a {type(batch).__name__}; expected a tuple of the model's arguments, a dict "
                f"of them, or a tensor: {self._listing()}"
            )
        targets = {}
        if self.has_targets and len(batch):
            *batch, targets[TARGETS] = batch
            if not batch and any(known.argument != TARGETS for known in self.inputs):
                raise InputError(
                    f"the batch is one tensor, which would be its targets; expected {self._listing()}"
                )
        if self.rest is None and len(batch) > len(self.arguments):
            known = dict.fromkeys(entry.argument for entry in self.inputs)
            by_name = [name for name in known if name not in (*self.arguments, TARGETS)]
            advice = f", of which {', '.join(by_name)} by name alone: give a dict" if by_name else ""
            count = len(batch) + len(targets)
            raise InputError(
                f"the batch has {counted(count, 'entry')}; the model takes {self._listing()}{advice}"
            )
        call = dict(zip(self._argument_names(len(batch)), batch, strict=True))
        if targets and TARGETS in call:
            raise InputError(
                f"the batch has {len(batch) + 1} entries, one of them for the forward's own argument "
                f"{TARGETS!r}, which the example inputs did not have; expected {self._listing()}"
            )
        return call | targets

    def _require_no_more(self, call: Mapping[str, Any]) -> None:
        """Raises InputError for what the example inputs did not have: no stage would read it.

        Leaves are counted, since in another container of the same entries, such as a named tuple, all paths
        differ.
        """
        inputs = {(known.argument, known.path) for known in self.inputs}
        plain = {(known.argument, known.path): known.value for known in self.plain}
        for argument, value in call.items():
            if isinstance(value, Tensor) and (argument, ()) in inputs:
                continue
            found = [(path, leaf) for path, leaf in leaves_of(value) if _counts(path, leaf)]
            tensors = [path for path, leaf in found if isinstance(leaf, Tensor)]
            expected = sum(name == argument for name, _ in inputs)
            more = [path for path in tensors if (argument, path) not in inputs]
            if not more or len(tensors) == expected:
                expected += sum(name == argument and _counts(path, plain[name, path]) for name, path in plain)
                known = {path for name, path in (*inputs, *plain) if name == argument}
                more = [path for path, _ in found if path not in known]
                if len(found) == expected:
                    continue
            if more:
                has = place_of(argument, more[0]) if more[0] else repr(argument)
                raise InputError(
                    f"the batch has {has}, which the example inputs did not have; expected {self._listing()}"
                )

    def _argument_names(self, count: int) -> Iterator[str]:
        """Yields the names of the first `count` positional arguments."""
        for position in range(count):
            if position < len(self.arguments):
                yield self.arguments[position]
            else:
                yield f"{self.rest}_{position - len(self.arguments)}"

    def _find(self, known: BatchInput, call: Mapping[str, Any]) -> Tensor:
        if known.argument not in call:
            raise InputError(
                f"the batch has no {known.argument!r} (found {_names(call)}); expected {self._listing()}"
            )
        value = call[known.argument]
        for key in known.path:
            try:
                value = entry_at(value, (key,))
            except (LookupError, AttributeError, TypeError):
                raise InputError(
                    f"the batch has no {known}: {key!r} is not in a {type(value).__name__}; expected batches "
                    "nested like the example inputs"
                ) from None
        return known.require_alike(value, lengths_asked=self.lengths_asked)

    def _listing(self) -> str:
        return ", ".join(str(known) for known in self.inputs) or "no tensor at all"


@contextmanager
def _telling_which(number: int) -> Iterator[None]:
    """Has an InputError say which of the caller's microbatches it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"microbatch {number}: {error}") from None


def _counts(path: tuple[str | int, ...], leaf: Any) -> bool:
    """Returns whether a leaf counts: None by name is like a missing entry, but None in a list is an entry."""
    return leaf is not None or bool(path and isinstance(path[-1], int))


def _tensors(argument: str, value: Any) -> list[tuple[str, tuple[str | int, ...], Tensor]]:
    return [(argument, path, leaf) for path, leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def _names(call: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, call)) or "nothing"
