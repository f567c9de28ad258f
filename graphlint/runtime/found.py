"""What lies within reach of a function: places that hold tensors, places that hold plain values, and the objects that
they belong to. `discover.py` fills it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

WIDTH = 256  # longer containers are data, not state
PLAIN = (bool, int, float, str, type(None))
MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) | {"forward"}


@dataclass(frozen=True)
class Slot:
    """A place that holds a tensor: `get()` reads it, `set(tensor)` binds another. `kind` says what watches call it."""

    label: str
    kind: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


@dataclass(frozen=True)
class Plain:
    """A place that holds a Python value the code reads. `look(key)` gives it, None when it is gone; `put(value)`
    sets it. It is `close` when the guarded function itself names it, or its object has it.
    """

    label: str
    look: Callable[[Any], Any]
    key: Any
    put: Callable[[Any], None] | None = None
    close: bool = True


@dataclass
class Found:
    """Everything within reach of a function, by readable label."""

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    scalers: dict[str, Any] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    generators: list[torch.Generator] = field(default_factory=list)
    names: list[Slot] = field(default_factory=list)  # variables of closures and globals that hold a tensor or nothing
    plain: list[Plain] = field(default_factory=list)
    iterators: list[Plain] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)  # leaves that only a watched call showed
    objects: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, Any] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def submodules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every module once, with its path."""
        seen: set[int] = set()
        for root, module in self.modules.items():
            for name, sub in module.named_modules():
                if id(sub) not in seen:
                    seen.add(id(sub))
                    yield f"{root}.{name}" if name else root, sub

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter once: those of modules by path, those that only an optimizer knows by index, and any other
        tensor that gathers gradients.
        """
        seen: set[int] = set()
        for path, module in self.submodules():
            for name, param in module._parameters.items():
                if param is not None and id(param) not in seen:
                    seen.add(id(param))
                    yield f"{path}.{name}", param
        for path, optimizer in self.optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                for p, param in enumerate(group["params"]):
                    if id(param) not in seen:
                        seen.add(id(param))
                        yield f"{path}.param_groups[{g}]['params'][{p}]", param
        others = [(slot.label, slot.get()) for slot in self.loose()]
        for label, tensor in [*others, *((f"tensor #{i}", t) for i, t in enumerate(self.hidden))]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf and id(tensor) not in seen:
                seen.add(id(tensor))
                yield label, tensor

    def loose(self) -> Iterator[Slot]:
        """Tensors outside of modules and optimizers as they are now: variables, attributes and elements come and go."""
        yield from self.names
        for label, owner in self.objects.items():
            for name, value in list(owner.__dict__.items()):
                if isinstance(value, torch.Tensor):
                    place = owner.__dict__
                    yield Slot(f"{label}.{name}", "tensor", getter(place, name), setter(place, name))
        for label, container in self.containers.items():
            if isinstance(container, set) or len(container) > WIDTH:
                continue
            pairs = container.items() if isinstance(container, dict) else enumerate(container)
            for key, value in list(pairs):
                if isinstance(value, torch.Tensor):
                    yield Slot(f"{label}[{key!r}]", "tensor", getter(container, key), setter(container, key))

    def owners(self) -> Iterator[tuple[str, Any]]:
        """The objects whose `__dict__` a call may change."""
        yield from self.submodules()
        yield from self.optimizers.items()
        yield from self.scalers.items()
        yield from self.schedulers.items()
        yield from self.objects.items()


def module_plain(path: str, module: torch.nn.Module) -> Iterator[Plain]:
    """The plain attributes that a module's own class or user set: scales, flags, names."""
    for name, value in module.__dict__.items():
        if name not in MODULE_INTERNALS and isinstance(value, PLAIN) and value is not None:
            yield Plain(f"{path}.{name}", module.__dict__.get, name)


def module_tensors(path: str, module: torch.nn.Module) -> Iterator[Slot]:
    """Parameters, buffers and plain tensor attributes of one module (not of its children)."""
    if isinstance(module, torch.jit.ScriptModule):  # its tables are in C++
        for kind, tensors in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
            for name, _ in tensors(recurse=False):
                put = functools.partial(setattr, module, name)
                yield Slot(f"{path}.{name}", kind, functools.partial(getattr, module, name), put)
        return
    for name in list(module._parameters):
        yield Slot(f"{path}.{name}", "parameter", getter(module._parameters, name), setter(module._parameters, name))
    for name in list(module._buffers):
        yield Slot(f"{path}.{name}", "buffer", getter(module._buffers, name), setter(module._buffers, name))
    for name, value in list(module.__dict__.items()):
        if isinstance(value, torch.Tensor):
            yield Slot(f"{path}.{name}", "buffer", getter(module.__dict__, name), setter(module.__dict__, name))


def getter(mapping: Any, key: Any) -> Callable[[], Any]:
    return (
        functools.partial(mapping.get, key) if isinstance(mapping, dict) else functools.partial(element, mapping, key)
    )


def setter(mapping: Any, key: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        mapping[key] = value

    return put


def element(sequence: Any, index: int) -> Any:
    return sequence[index] if index < len(sequence) else None
