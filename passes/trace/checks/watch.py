"""What a forward does that a trace would silently get wrong, observed while it runs.

- A custom autograd function: the tracer keeps its forward and differentiates through that, whatever its
  backward does.
- Layers that a first call makes: they would be made anew, with other weights, in every call.
- Python's own random numbers, and attributes that change from call to call: the trace would keep their values
  at the time of tracing.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from pd2bw_fx.attributes import is_of_attributes
from pd2bw_fx.modes import LAYERS_WITH_MODES

from .places import LOSS, PLAIN, Place, differ, is_generator, places_of, snapshot
from .tensor_attributes import attributes_on

# Autograd functions that torch.library makes of registered operators, and we of custom functions: the trace
# keeps them whole.
_KEPT_WHOLE = (
    "torch._library.autograd",
    "pd2bw_fx.custom_function",
    "pd2bw_fx.ctc",
    "pd2bw_fx.untraced_loss",
    "pd2bw_fx.untraced_part",
)


@dataclass(frozen=True, slots=True)
class Change:
    """A plain value that the forward changed: an attribute of a module, or at another place."""

    place: Place
    before: Any
    after: Any
    module: nn.Module | None = None  # of an attribute
    path: str = ""

    @property
    def attribute(self) -> str:
        return str(self.place.keys[0])

    @property
    def is_of_a_layer(self) -> bool:
        """Whether a layer of torch computes something else because of it."""
        if self.module is None:
            return False
        if self.attribute == "training":
            return isinstance(self.module, LAYERS_WITH_MODES)
        return type(self.module).__module__.startswith("torch.nn")

    @property
    def is_of_a_counter(self) -> bool:
        return not self.is_of_a_layer and {type(self.before), type(self.after)} <= {int, float}

    def __str__(self) -> str:
        what = "" if self.place.is_outside else "attribute "
        return f"{what}{self.place.name} ({self.before!r} before the forward, {self.after!r} after)"


@dataclass(frozen=True, slots=True)
class Stepped:
    """A list that the forward made longer, or a counter of itertools or a number of numpy that it changed."""

    place: Place
    before: Any
    after: Any


@dataclass(slots=True)
class Watch:
    """What one run of the forward changed or depended on; names are paths of attributes."""

    custom_functions: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    assigned_tensors: tuple[str, ...] = ()  # attributes that are not buffers, so that nothing keeps them
    drew_python_random: bool = False
    on_layers: tuple[str, ...] = ()  # tensors assigned to layers of torch
    on_tensors: tuple[str, ...] = ()  # attributes set on parameters and buffers themselves
    filled: tuple[str, ...] = ()  # lists, dicts and objects whose contents changed
    made: tuple[str, ...] = ()  # new parameters
    made_buffers: tuple[str, ...] = ()  # new buffers
    foreign: tuple[nn.Parameter, ...] = ()  # parameters that results depend on and that are not the model's
    stepped: tuple[Stepped, ...] = ()
    generators: tuple[str, ...] = ()  # that it has drawn from, other than those of Python and numpy for all
    # Called at the end of a forward instead of looking: to look at followed numbers is to ask something.
    instead: Callable[[], None] | None = None
    _parameters: frozenset[str] = frozenset()
    _buffers: frozenset[str] = frozenset()
    _attributes: dict[int, dict[str, Any]] = field(default_factory=dict)
    _tensors: dict[int, dict[str, int]] = field(default_factory=dict)
    _contents: dict[int, dict[str, Any]] = field(default_factory=dict)
    _on_tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    _random: Any = None
    _places: dict[tuple[Any, ...], tuple[Place, Any, Any]] = field(default_factory=dict)

    def before(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        if self.instead is not None:
            return
        self._parameters = frozenset(name for name, _ in model.named_parameters())
        self._buffers = frozenset(name for name, _ in model.named_buffers())
        modules = {key: module for key, (_, module) in _modules(model, loss_fn).items()}
        self._attributes = {key: _plain_attributes(module) for key, module in modules.items()}
        self._tensors = {key: _tensor_attributes(module) for key, module in modules.items()}
        self._contents = {key: _contents(module) for key, module in modules.items()}
        self._on_tensors = _on_tensors(model)
        self._random = random_state()
        self._places = {
            place.identity: (place, value, snapshot(value)) for place, value in places_of(model, loss_fn)
        }

    def after(self, model: nn.Module, loss_fn: Callable[..., Any] | None, results: Iterable[Any]) -> None:
        if self.instead is not None:
            self.instead()
            return
        self.made = tuple(name for name, _ in model.named_parameters() if name not in self._parameters)
        self.made_buffers = tuple(name for name, _ in model.named_buffers() if name not in self._buffers)
        self.drew_python_random = random_state() != self._random
        nodes = _autograd_nodes(results)
        self.custom_functions = tuple(_custom_functions(nodes))
        own = set(model.parameters())
        leaves = leaves_of(results)
        self.foreign = tuple(leaf for leaf in leaves if type(leaf) is nn.Parameter and leaf not in own)
        known = _modules(model, loss_fn)
        assigned = [
            (f"{path}.{name}" if path else name, type(module).__module__.startswith("torch.nn."))
            for key, (path, module) in known.items()
            for name, identity in _tensor_attributes(module).items()
            if self._tensors.get(key, {}).get(name) != identity and not _is_of_a_hook(module, name)
        ]
        self.assigned_tensors = tuple(name for name, is_a_layers in assigned if not is_a_layers)
        self.on_layers = tuple(name for name, is_a_layers in assigned if is_a_layers)
        self.on_tensors = tuple(
            f"{tensor}.{name}"
            for tensor, attributes in _on_tensors(model).items()
            for name, found in attributes.items()
            if found != self._on_tensors.get(tensor, {}).get(name)
        )
        self.filled = tuple(
            f"{path}.{name}" if path else name
            for key, (path, module) in known.items()
            for name, found in _contents(module).items()
            if found != self._contents.get(key, {}).get(name)
        )
        self.changes = tuple(
            Change(_attribute(module, path, name), self._attributes[key].get(name), value, module, path)
            for key, (path, module) in known.items()
            for name, value in _plain_attributes(module).items()
            if key in self._attributes and differ(self._attributes[key].get(name), value)
        )
        self._compare_places(model, loss_fn)

    def _compare_places(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        changed = [
            (place, value, before, after)
            for place, value in places_of(model, loss_fn)
            if (known := self._places.get(place.identity)) is not None
            for before in known[2:]
            if differ(before, after := snapshot(value))
        ]
        self.generators = tuple(place.name for place, value, _, _ in changed if is_generator(value))
        self.stepped = tuple(
            Stepped(place, before, after)
            for place, value, before, after in changed
            if not isinstance(value, PLAIN) and not is_generator(value) and type(before) is type(after)
        )
        moved = [
            Change(place, before, after)
            for place, value, before, after in changed
            if isinstance(value, PLAIN) and isinstance(before, PLAIN)
        ]
        self.changes += tuple(moved)
        names = [change.place.name for change in moved if change.place.is_outside]
        self.filled += tuple(dict.fromkeys([*names, *(stepped.place.name for stepped in self.stepped)]))


def _modules(model: nn.Module, loss_fn: Callable[..., Any] | None) -> dict[int, tuple[str, nn.Module]]:
    """Those of the model, and of a loss that is one, by their identity and with their paths."""
    known: dict[int, tuple[str, nn.Module]] = {}
    for start, root in (("", model), (LOSS, loss_fn)):
        for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
            known.setdefault(_identity(module), (".".join(filter(None, (start, path))), module))
    return known


def _attribute(module: nn.Module, path: str, name: str) -> Place:
    is_outside = path.partition(".")[0] == LOSS
    return Place(vars(module), (name,), f"{path}.{name}" if path else name, is_outside)


def _identity(module: nn.Module) -> int:
    """Returns the identity of the module's attributes.

    The tracer makes another module object each time it reads a layer that has two names, or a module with
    such a layer in it; the dict of attributes is the same.
    """
    return id(vars(module))


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}


def _contents(module: nn.Module) -> dict[str, Any]:
    """Returns the contents, nested ones too, of the author's own lists, dicts, sets, queues and objects."""
    return {
        name: _held(value)
        for name, value in vars(module).items()
        if name not in _OF_ANY_MODULE and _holds(value)
    }


_OF_ANY_MODULE = vars(nn.Module()).keys()


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list | set | tuple | deque) or is_of_attributes(value)


def _held(value: Any, depth: int = 0) -> Any:
    """Returns the value in a form to be compared: plain values by value, all others by identity."""
    if not _holds(value) or depth == _DEEPEST:
        return value if isinstance(value, PLAIN) else _Same(value)
    if is_of_attributes(value):
        return _Same(value), _held(vars(value), depth + 1)
    if isinstance(value, dict):
        return [(_held(key, depth + 1), _held(inner, depth + 1)) for key, inner in value.items()]
    if isinstance(value, set):
        return {inner if isinstance(inner, PLAIN) else id(inner) for inner in value}
    return [_held(inner, depth + 1) for inner in value]


_DEEPEST = 4


class _Same:
    """Compares an object by identity, and keeps it alive: a new object may have the id of a freed one."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _tensor_attributes(module: nn.Module) -> dict[str, int]:
    """Returns the identities of attributes that are tensors, tuples of tensors or proxies of torch.fx.

    Parameters and buffers are not among them.
    """
    return {name: id(value) for name, value in vars(module).items() if _is_of_tensors(value)}


def _is_of_a_hook(module: nn.Module, name: str) -> bool:
    """Whether the attribute is a weight that weight_norm, spectral_norm or pruning compute in each call."""
    return any(f"{name}_{kind}" in module._parameters for kind in ("g", "orig"))


def _on_tensors(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the attributes of parameters and buffers themselves, in a form to be compared."""
    return {
        name: {attribute: _held(value) for attribute, value in attributes_on(tensor).items()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def _is_of_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list) and value:
        return all(_is_of_tensors(element) for element in value)
    return isinstance(value, torch.Tensor | fx.Proxy)


def random_state() -> Any:
    """Returns the states of Python's generator and, where numpy is imported, numpy's."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if state is None else (state[1].tolist(), state[2:])


def _autograd_nodes(results: Iterable[Any]) -> list[Any]:
    """Returns the nodes of the autograd graph from the results to the leaves, leaves included."""
    tensors = (value for value in results if isinstance(value, torch.Tensor))
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(waiting), list[Any]()
    while waiting:
        node = waiting.pop()
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def leaves_of(results: Iterable[Any]) -> list[Any]:
    """Returns the leaf tensors that a gradient of the results flows to."""
    variables = (getattr(node, "variable", None) for node in _autograd_nodes(results))
    return [variable for variable in variables if variable is not None]


def _custom_functions(nodes: Iterable[Any]) -> list[str]:
    """Returns the names of autograd functions that are written in Python and not kept whole."""
    found = dict[str, None]()
    for node in nodes:
        forward_class = getattr(node, "_forward_cls", None)
        if forward_class is not None and forward_class.__module__ not in _KEPT_WHOLE:
            found[f"{forward_class.__module__}.{forward_class.__qualname__}"] = None
    return list(found)
