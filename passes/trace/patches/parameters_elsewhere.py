"""Parameters that a forward has from elsewhere than their module: from a list, a partial, a library.

While it traces, torch puts another tensor in a parameter's place in its module. A forward that holds the
parameter itself would put its values into the trace as a constant, which nothing trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._pytree import tree_map

from .detached_data import is_of_data

Instead = Callable[[Tensor], Any]


class ParametersReadInstead(TorchFunctionMode):
    """Passes to every torch function what `instead` returns for a parameter, wherever the caller has it from.

    With `but_data`, `.data` reads the parameter itself; writes through it are found by comparing values.
    """

    def __init__(self, instead: Instead, *, but_data: bool = False) -> None:
        super().__init__()
        self.instead = instead
        self.but_data = but_data

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.but_data and is_of_data(func):
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(self._current, (tuple(args), dict(kwargs or {})))
        if is_tensor_method_or_property(func) and not isinstance(args[0], Tensor):  # a proxy's
            if func.__name__ == "__get__":
                return getattr(args[0], func.__self__.__name__)
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return func(*args, **kwargs)

    def _current(self, value: Any) -> Any:
        return self.instead(value) if isinstance(value, Tensor) else value


def in_their_modules(model: nn.Module) -> Instead:
    """Returns a function from a present parameter or buffer to what its module later has in its place."""
    places = {
        id(tensor): (registry, name)
        for module in model.modules()
        for registry in (module._parameters, module._buffers)
        for name, tensor in registry.items()
        if tensor is not None
    }

    def instead(tensor: Tensor) -> Any:
        if id(tensor) not in places:
            return tensor
        registry, name = places[id(tensor)]
        return registry[name]

    return instead
