"""The modules and the state behind a step, found by themselves, and put back after a measurement.

Finding and restoring are the guard's (`discover.py`, `state.py`). What is added here are learning-rate schedulers: a
guarded step should not hold one, a measured step may.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphlint.runtime.discover import discover
from graphlint.runtime.found import Found
from graphlint.runtime.state import State

_ON_HOST, _ON_DEVICE = 0, 1 << 62  # bytes of room for the copies of a snapshot


class World:
    """What a step can reach."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.found = discover(fn, {})
        defaults = list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []
        device = torch.device("cuda", torch.cuda.current_device()) if defaults else torch.device("cpu")
        self.state = State(self.found, device, defaults)
        self.schedulers = list(_schedulers(self.found, fn))

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The modules that are part of no other one, by name; `self.model` of a method is called `model`."""
        found = self.found.modules
        inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
        return {name.removeprefix("self."): module for name, module in found.items() if id(module) not in inner}

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name."""
        return {name.removeprefix("self."): optimizer for name, optimizer in self.found.optimizers.items()}

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The step's own generators, beside the default ones."""
        return tuple(self.found.generators)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers, optimizer state and loose tensors that exist now, each once; gradients are left out."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for slot in self.state.slots():
            tensor = slot.get()
            if isinstance(tensor, torch.Tensor) and slot.kind != "gradient" and id(tensor) not in seen:
                seen.add(id(tensor))
                found[slot.label.removeprefix("self.")] = tensor
        return found

    def submodules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every module with its path."""
        for root, module in self.modules.items():
            for path, part in module.named_modules():
                yield f"{root}.{path}" if path else root, part

    def module(self, path: str) -> torch.nn.Module | None:
        """The module of that path."""
        return dict(self.submodules()).get(path)

    def snapshot(self, on_host: bool = False) -> Snapshot:
        """Everything as it is now; `on_host` keeps the copies in host memory."""
        return Snapshot(self, on_host)


class Snapshot:
    """One moment of a World. Restoring keeps addresses: a captured graph knows tensors by theirs."""

    def __init__(self, world: World, on_host: bool) -> None:
        self._inner = world.state.snapshot(_ON_HOST if on_host else _ON_DEVICE)
        self._items = [(p, p.look(p.key)) for p in world.found.plain if p.put is None]  # of dicts and lists
        self._schedulers = [(s, copy.deepcopy(s.state_dict())) for s in world.schedulers]

    def restore(self) -> None:
        """Sets tensors, gradients, optimizers, schedulers, generators and plain host values back."""
        for scheduler, saved in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(saved))
        self._inner.restore()

    def changed(self) -> tuple[str, ...]:
        """Names of the plain host values that differ from this moment now, schedulers' own aside."""
        labels = [change.label for change in self._inner.host_changes()]
        labels += [plain.label for plain, before in self._items if plain.look(plain.key) != before]
        return tuple(dict.fromkeys(label.replace("self.", "", 1) for label in labels))


def _schedulers(found: Found, fn: Callable[..., Any]) -> Iterator[Any]:
    """Learning-rate schedulers in the step's closure, among the globals it names, and in the objects it reaches."""
    seen: set[int] = set()
    for value in _held(found, fn):
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler) and id(value) not in seen:
            seen.add(id(value))
            yield value


def _held(found: Found, fn: Any) -> Iterator[Any]:
    for holder in [*found.objects.values(), *found.modules.values(), getattr(fn, "__self__", None)]:
        yield from list(getattr(holder, "__dict__", {}).values())
    for container in found.containers.values():
        yield from container.values() if isinstance(container, dict) else container
    function = getattr(fn, "__func__", fn)
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a cell not filled yet
                continue
        code = getattr(function, "__code__", None)
        names = code.co_names if code else ()
        yield from (function.__globals__[n] for n in names if n in function.__globals__)
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)


def eager(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a guard guards; anything else as it is."""
    return fn._fn if getattr(type(fn), "is_guard", False) else fn  # type: ignore[attr-defined]
