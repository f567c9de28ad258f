"""What a step can reach: the modules, optimizers, generators and plain values behind a callable.

A step is a closure, a method or a `functools.partial`; nobody should have to list its state a second time.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))
_INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}  # bookkeeping of nn.Module itself
_DEPTH = 5  # how many holders deep state is looked for
_WIDTH = 1000  # longest list or dict that is searched


@dataclass
class Slot:
    """A place on the host that holds a plain value and can be set again."""

    label: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


@dataclass
class Reached:
    """State that a callable can touch, by the name under which it was found."""

    modules: dict[str, Any] = field(default_factory=dict)  # roots only: no module of another one
    optimizers: dict[str, Any] = field(default_factory=dict)
    keepers: dict[str, Any] = field(default_factory=dict)  # schedulers, scalers: whatever has a state_dict
    generators: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)  # loose tensors: counters, caches, static inputs
    slots: list[Slot] = field(default_factory=list)


def eager(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a guard guards; anything else as it is."""
    return fn._fn if type(fn).__name__ == "CaptureSafe" else fn  # type: ignore[attr-defined]


def reach(*roots: Any) -> Reached:
    """The state that the given callables and objects can reach, without calling anything."""
    search = _Search()
    for root in roots:
        search.visit(root, _label(root), 0)
    return search.finish()


def _label(root: Any) -> str:
    return "model" if isinstance(root, torch.nn.Module) else str(getattr(root, "__name__", type(root).__name__))


class _Search:
    def __init__(self) -> None:
        self.found = Reached()
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # an id is only unique while its object lives

    def finish(self) -> Reached:
        inner = {id(m) for root in self.found.modules.values() for m in root.modules() if m is not root}
        self.found.modules = {n: m for n, m in self.found.modules.items() if id(m) not in inner}
        return self.found

    def visit(self, value: Any, name: str, depth: int) -> None:
        if depth > _DEPTH or isinstance(value, (*_PLAIN, type, types.ModuleType)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if self._take(value, name):
            return
        for inner_name, inner in _inside(value, name, self.found.slots):
            self.visit(inner, inner_name, depth + 1)

    def _take(self, value: Any, name: str) -> bool:
        """Files the value if it is state of a kind that torch knows."""
        found = self.found
        if isinstance(value, torch.nn.Module):
            self._file(found.modules, name, value)
            for path, part in value.named_modules():
                attributes = {k: v for k, v in vars(part).items() if k not in _INTERNALS}
                found.slots.extend(_attribute_slots(vars(part), f"{name}.{path}" if path else name, attributes))
        elif isinstance(value, torch.optim.Optimizer):
            self._file(found.optimizers, name, value)
        elif isinstance(value, torch.Generator):
            self._file(found.generators, name, value)
        elif isinstance(value, torch.Tensor):
            self._file(found.tensors, name, value)
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self._file(found.keepers, name, value)
        else:
            return False
        return True

    def _file(self, drawer: dict[str, Any], name: str, value: Any) -> None:
        while name in drawer:
            name += "'"
        drawer[name] = value


def _inside(value: Any, name: str, slots: list[Slot]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from [(name, value.func), *((name, a) for a in value.args), *value.keywords.items()]
    elif isinstance(value, types.MethodType):
        yield from [(name, value.__self__), (name, value.__func__)]
    elif isinstance(value, types.FunctionType):
        yield from _function(value, slots)
    elif isinstance(value, dict):
        plain = {k: v for k, v in list(value.items())[:_WIDTH] if isinstance(v, _PLAIN)}
        slots.extend(_item_slot(f"{name}[{k!r}]", value, k) for k in plain)
        yield from ((str(k), v) for k, v in list(value.items())[:_WIDTH])
    elif isinstance(value, (list, tuple, set)):
        yield from ((f"{name}[{i}]", v) for i, v in enumerate(list(value)[:_WIDTH]))
    elif hasattr(value, "__dict__") and not isinstance(value, types.BuiltinFunctionType):
        slots.extend(_attribute_slots(vars(value), name, vars(value)))
        yield from list(vars(value).items())
        if hasattr(value, "__wrapped__"):
            yield name, value.__wrapped__


def _function(fn: types.FunctionType, slots: list[Slot]) -> Iterator[tuple[str, Any]]:
    """Closure cells, globals that the code names, defaults, and what a decorator wrapped."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # a cell not filled yet
            continue
        if isinstance(content, _PLAIN):
            slots.append(_cell_slot(name, cell))
        yield name, content
    for name in sorted(_names(fn.__code__)):
        if name in fn.__globals__:
            content = fn.__globals__[name]
            if isinstance(content, _PLAIN):
                slots.append(_item_slot(name, fn.__globals__, name))
            yield name, content
    yield from ((fn.__name__, d) for d in fn.__defaults__ or ())
    if hasattr(fn, "__wrapped__"):
        yield fn.__name__, fn.__wrapped__


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*(_names(c) for c in inner))


def _attribute_slots(holder: dict[str, Any], name: str, attributes: dict[str, Any]) -> Iterator[Slot]:
    """Plain attributes, and lists of plain values: a trainer's counters and its list of losses."""
    for key, value in list(attributes.items()):
        if isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(v, _PLAIN) for v in value)):
            yield _item_slot(f"{name}.{key}", holder, key)


def _item_slot(label: str, holder: dict[Any, Any], key: Any) -> Slot:
    return Slot(label, lambda: holder.get(key), lambda value: holder.__setitem__(key, value))


def _cell_slot(label: str, cell: types.CellType) -> Slot:
    return Slot(label, lambda: cell.cell_contents, lambda value: setattr(cell, "cell_contents", value))
