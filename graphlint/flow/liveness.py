"""What is still alive: tensors that a program can reach at one moment of the walk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from graphlint.flow.values import (
    Bound,
    Choice,
    Closure,
    External,
    Holder,
    ModuleValue,
    Partial,
    Scope,
    Storage,
    Tensor,
    Value,
    Wrapped,
)

if TYPE_CHECKING:
    from graphlint.flow import events as ev

MAX_VALUES = 4_000  # looked at; what lies further off counts as dead


def graphs_alive(frame: ev.Frame | None) -> frozenset[Storage]:
    """The storages of tensors with an autograd graph behind them that the frames on the stack can reach."""
    return frozenset(
        one.storage
        for one in _reached(_scopes(frame)) or ()
        if one.grad and not one.leaf and one.storage.owner != "param"
    )


def tensors_alive(frame: ev.Frame | None, more: Iterable[Value] = ()) -> frozenset[Storage] | None:
    """The storages of all tensors that the frames on the stack, or `more`, can reach; None when those are too many."""
    found = _reached([*_scopes(frame), *more], MAX_VALUES)
    return None if found is None else frozenset(one.storage for one in found)


def _scopes(frame: ev.Frame | None) -> list[Value]:
    scopes: list[Value] = []
    while frame is not None:
        scopes.append(frame.scope)
        frame = frame.parent
    return scopes


def _reached(todo: list[Value], limit: int = 0) -> list[Tensor] | None:
    """The tensors that can be reached; with a `limit` None instead of an answer that is not whole."""
    found: list[Tensor] = []
    seen: set[int] = set()
    while todo and len(seen) < MAX_VALUES:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        else:
            todo.extend(_inner(value))
    return None if limit and todo else found


def _inner(value: Value) -> Iterable[Value]:
    """The values that one value keeps alive."""
    if isinstance(value, Scope):
        return [*value.slots.values(), *([value.outer] if value.outer is not None else [])]
    if isinstance(value, External):
        return [*value.slots.values(), *value.args, *value.keywords.values()]
    if isinstance(value, Holder):
        return list(value.slots.values())
    if isinstance(value, ModuleValue):
        return [value.module.scope] if value.module.scope is not None else []
    if isinstance(value, Choice):
        return value.values
    if isinstance(value, Closure):
        return [value.scope]
    if isinstance(value, Bound):
        return [value.receiver]
    if isinstance(value, Partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Wrapped):
        return [value.func, *(one for one in value.facts.get("results", {}).values() if isinstance(one, Value))]
    return []
