"""What is still alive: tensors that a program can reach at one moment of the walk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from graphlint.flow.values import Bound, Choice, Closure, Holder, Partial, Scope, Storage, Tensor, Value, Wrapped

if TYPE_CHECKING:
    from graphlint.flow import events as ev

MAX_VALUES = 4_000  # looked at; what lies further off counts as dead


def graphs_alive(frame: ev.Frame | None) -> frozenset[Storage]:
    """The storages of tensors with an autograd graph behind them that the frames on the stack can reach."""
    todo: list[Value] = []
    while frame is not None:
        todo.append(frame.scope)
        frame = frame.parent
    found: set[Storage] = set()
    seen: set[int] = set()
    while todo and len(seen) < MAX_VALUES:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.grad and not value.leaf and value.storage.owner != "param":
                found.add(value.storage)
        else:
            todo.extend(_inner(value))
    return frozenset(found)


def _inner(value: Value) -> Iterable[Value]:
    """The values that one value keeps alive."""
    if isinstance(value, Scope):
        return [*value.slots.values(), *([value.outer] if value.outer is not None else [])]
    if isinstance(value, Holder):
        return list(value.slots.values())
    if isinstance(value, Choice):
        return value.values
    if isinstance(value, Closure):
        return [value.scope]
    if isinstance(value, Bound):
        return [value.receiver]
    if isinstance(value, Partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [value.func] if isinstance(value, Wrapped) else []
