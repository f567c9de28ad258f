"""Graphs kept under a key that leaves out something the region reads."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from graphlint import ir
from graphlint.checks.base import Report, Walk
from graphlint.flow import events as ev
from graphlint.flow.values import (
    Host,
    Instance,
    Items,
    Mapping,
    Value,
)
from graphlint.link import inner


def incomplete_key(walk: Walk) -> Iterator[Report]:
    """A graph kept under a key is replayed by a later call of the same function, whose locals differ in what the region read and the key leaves out."""
    for capture in walk.captures:
        if capture.kind not in ("graph", "manual") or capture.graph is None:
            continue
        reads = {event.cell.key: event for event in walk.of(ev.ReadEvent) if event.capture is capture and event.cell.holder is capture.frame.scope and isinstance(event.value, Host)}
        for replay in walk.replays(capture):
            names = replay.names.get(id(capture.frame.func))
            if names is None or names is capture.frame.scope.slots or not reads:
                continue
            for name, read in reads.items():
                now = names.get(name)
                if _other_constant(read.value, now) and name != "training":
                    yield from _at_key(capture, str(name), read, walk)
                    return


def _other_constant(then: Value, now: Value | None) -> bool:
    if not (isinstance(then, Host) and isinstance(now, Host) and then.kind in ("int", "float", "bool") and now.kind == then.kind):
        return False
    return then.known and now.known and then.value != now.value


def _at_key(capture: ev.Capture, name: str, read: ev.ReadEvent, walk: Walk) -> Iterator[Report]:
    """Reports where the key is made: the assignment of the name under which the graph is stored."""
    kept = next((event for event in walk.of(ev.WriteEvent) if isinstance(event.cell.holder, Mapping) and event.clock > capture.end and _holds(event.new, capture)), None)
    if kept is None:
        return
    function = capture.frame.func
    assigned = _key_expression(function, kept.at) if function is not None else None
    if assigned is not None and name in _mentioned(assigned[1], function):
        return
    report = Report("incomplete-graph-key", capture.frame, assigned[0] if assigned else kept.at, capture, {"why": f"`{name}`", "value": "key"})
    report.related.append((read.frame, read.at, f"the region reads `{name}` here"))
    yield report


def _statements(body: tuple[ir.Stmt, ...]) -> Iterator[ir.Stmt]:
    for stmt in body:
        yield stmt
        yield from _statements(tuple(inner(stmt)))


def _key_expression(function: ir.Function, kept: ir.Span) -> tuple[ir.Span, ir.Expr] | None:
    """Where the key of `graphs[key] = ...` is made: its own assignment, or the index itself."""
    index: ir.Expr | None = None
    for stmt in _statements(function.body):
        if isinstance(stmt, ir.Assign) and stmt.at == kept:
            index = next((target.index for target in stmt.targets if isinstance(target, ir.Subscript)), None)
    if index is None:
        return None
    for stmt in _statements(function.body):
        if isinstance(stmt, ir.Assign) and stmt.value is not None and isinstance(index, ir.Name):
            if any(isinstance(target, ir.Name) and target.id == index.id for target in stmt.targets):
                return stmt.at, stmt.value
    return kept, index


def asks_for_key(node: object, name: str) -> bool:
    """Whether the code asks if a key is in the dict `name`: `key in self.name`, `name.get(key)`."""
    if isinstance(node, ir.Compare) and any(op in ("in", "not in") for op in node.ops) and any(_called(right) == name for right in node.rights):
        return True
    if isinstance(node, ir.Call) and isinstance(node.func, ir.Attr) and node.func.name == "get" and _called(node.func.obj) == name:
        return True
    if isinstance(node, (tuple, list)):
        return any(asks_for_key(one, name) for one in node)
    return isinstance(node, msgspec.Struct) and any(asks_for_key(getattr(node, field), name) for field in node.__struct_fields__ if field != "at")


def _called(node: ir.Expr) -> str:
    return node.id if isinstance(node, ir.Name) else (node.name if isinstance(node, ir.Attr) else "")


def _mentioned(expression: ir.Expr, function: ir.Function | None) -> set[str]:
    """The names in an expression, and those that they are assigned from."""
    found = set(names_in(expression))
    for stmt in _statements(function.body) if function is not None else ():
        if isinstance(stmt, ir.Assign) and stmt.value is not None:
            if any(isinstance(target, ir.Name) and target.id in found for target in stmt.targets):
                found |= set(names_in(stmt.value))
    return found


def names_in(node: object) -> Iterator[str]:
    """Every name that an expression mentions."""
    if isinstance(node, ir.Name):
        yield node.id
    elif isinstance(node, (tuple, list)):
        for one in node:
            yield from names_in(one)
    elif isinstance(node, msgspec.Struct):
        for field in node.__struct_fields__:
            if field != "at":
                yield from names_in(getattr(node, field))


def _holds(value: Value, capture: ev.Capture) -> bool:
    if value is capture.graph:
        return True
    if isinstance(value, (Items, Mapping)):
        return any(_holds(one, capture) for one in value.slots.values())
    return isinstance(value, Instance) and any(one is capture.graph for one in value.slots.values())
