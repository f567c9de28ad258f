"""Takes back what a run of a region wrote: device memory, random states. A capture executes nothing, and a comparison
must leave no trace."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphlint.runtime.dryrun import hoststate


class Undo:
    """Saves outside memory just before an operator first writes to it, and the random states at once."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._torch = torch.default_generator.get_state()
        self._random = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def before(self, func: Any, args: Any, kwargs: Any, born: dict[int, int], identity: Any) -> None:
        """Called with every operator that writes to its arguments."""
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and identity(tensor) not in born:
                    self.keep(tensor.untyped_storage())

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Saves memory as it is now, once."""
        if storage._cdata not in self._saved:
            self._saved[storage._cdata] = (storage, storage.clone())

    def restore(self) -> None:
        """Puts memory and random states back."""
        for storage, saved in self._saved.values():
            if storage.nbytes() == saved.nbytes():
                storage.copy_(saved)
        self._saved.clear()
        torch.default_generator.set_state(self._torch)
        random.setstate(self._random)
        numpy: Any = sys.modules.get("numpy")
        if self._numpy is not None and numpy is not None:
            numpy.random.set_state(self._numpy)


def gradients(roots: dict[str, Any]) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
    """Every leaf that wants a gradient below the roots, with its gradient, by the leaf's id."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for _, value in hoststate.reachable(roots):
        parts = (
            value._parameters.values()
            if isinstance(value, torch.nn.Module)
            else [part for _, part in hoststate._parts("", value)]
        )
        for part in parts:
            if isinstance(part, torch.Tensor) and part.requires_grad and part.is_leaf:
                found[id(part)] = (part, part.grad)
    return found


def modes_of_now() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context that brings back the modes a region was captured under: gradients, inference, autocast."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype, cache = (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", dtype=dtype, enabled=autocast, cache_enabled=cache),
        ):
            yield

    return again
