"""Graphs kept under a key that leaves out something the region reads."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from graphlint import ir
from graphlint.checks.base import Report, Walk
from graphlint.flow import events as ev
from graphlint.flow.values import (
    Choice,
    Holder,
    Host,
    Instance,
    Items,
    Key,
    Mapping,
    Value,
)
from graphlint.link import inner, names_in, nodes_in


def incomplete_key(walk: Walk) -> Iterator[Report]:
    """A graph kept under a key is taken again by a later call that differs in something the region reads and the key
    leaves out."""
    for capture in walk.captures:
        if capture.kind not in ("graph", "manual") or capture.graph is None or not walk.replays(capture):
            continue
        kept = kept_under_key(capture, walk)
        if kept is None:
            continue
        for then, _, _ in capture.stack:
            found = left_out(then, capture, walk) if then.func is not None else None
            if found is not None:
                yield from _at_key(capture, found[0], found[1], kept)
                break


def kept_under_key(capture: ev.Capture, walk: Walk) -> ev.WriteEvent | None:
    """Where the graph is put into a dict."""
    for event in walk.of(ev.WriteEvent):
        if isinstance(event.cell.holder, Mapping) and event.clock > capture.end and holds(event.new, capture):
            return event
    return None


def left_out(then: ev.Frame, capture: ev.Capture, walk: Walk) -> tuple[str, ev.ReadEvent, ev.Frame] | None:
    """A local of the capturing call that the region reads, and that is another number in a call that takes the graph as
    it is: its name, where it is read, and that call."""
    reads = [
        event for event in walk.inside(capture) if isinstance(event, ev.ReadEvent) and isinstance(event.value, Host)
    ]
    for frame, now in _takers(then, capture, walk) if reads else ():
        for name, value in then.scope.slots.items():
            for holder, key, one, other in _numbers(then.scope, name, value, now.get(name)):
                if not _other_constant(one, other):
                    continue
                read = next(
                    (
                        event
                        for event in reads
                        if event.value is one or (event.cell.holder is holder and event.cell.key == key)
                    ),
                    None,
                )
                if read is not None:
                    return str(name), read, frame
    return None


def _numbers(
    scope: Holder, name: Key, then: Value, now: Value | None
) -> Iterator[tuple[Holder, Key, Value, Value | None]]:
    """A local and what it is in another call; of `*args` and `**options`, each of the values in it."""
    if isinstance(then, (Items, Mapping)):
        if type(now) is type(then):
            for key, one in then.slots.items():
                yield then, key, one, now.slots.get(key)
    else:
        yield scope, name, then, now


def _takers(then: ev.Frame, capture: ev.Capture, walk: Walk) -> Iterator[tuple[ev.Frame, dict[Key, Value]]]:
    """Later calls of the same function that replay the graph, or give it back, without capturing; with their locals."""
    for replay in walk.replays(capture):
        names = replay.names.get(id(then.func))
        frame: ev.Frame | None = replay.frame
        while frame is not None and frame.func is not then.func:
            frame = frame.parent
        if names is not None and frame is not None:
            yield frame, names
    for event in walk.of(ev.ReturnEvent):
        if (
            event.clock > capture.end
            and event.frame.func is then.func
            and event.frame is not then
            and holds(event.value, capture)
        ):
            yield event.frame, event.frame.scope.slots


def _other_constant(then: Value, now: Value | None) -> bool:
    if not (
        isinstance(then, Host)
        and isinstance(now, Host)
        and then.kind in ("int", "float", "bool")
        and now.kind == then.kind
    ):
        return False
    return then.known and now.known and bool(then.value != now.value)


def _at_key(capture: ev.Capture, name: str, read: ev.ReadEvent, kept: ev.WriteEvent) -> Iterator[Report]:
    """Reports where the key is made or asked for: its assignment, the test whether it is there, or the store."""
    function = kept.frame.func
    assigned = _key_expression(function, kept.at) if function is not None else None
    if assigned is not None and name in _mentioned(assigned[1], function):
        return
    report = Report(
        "incomplete-graph-key",
        kept.frame,
        assigned[0] if assigned else kept.at,
        capture,
        {"why": f"`{name}`", "value": "key"},
    )
    report.related.append((read.frame, read.at, f"the region reads `{name}` here"))
    yield report


def statements(body: tuple[ir.Stmt, ...]) -> Iterator[ir.Stmt]:
    for stmt in body:
        yield stmt
        yield from statements(tuple(inner(stmt)))


def _key_expression(function: ir.Function, kept: ir.Span) -> tuple[ir.Span, ir.Expr] | None:
    """Where the key of `graphs[key] = ...` is made: its own assignment, or the index itself."""
    index: ir.Expr | None = None
    for stmt in statements(function.body):
        if isinstance(stmt, ir.Assign) and stmt.at == kept:
            index = next((target.index for target in stmt.targets if isinstance(target, ir.Subscript)), None)
    if index is None:
        return None
    if not isinstance(index, ir.Name):
        return kept, index
    made = next(
        (
            (stmt.at, stmt.value)
            for stmt in statements(function.body)
            if isinstance(stmt, ir.Assign) and stmt.value is not None and _binds(stmt, index.id)
        ),
        None,
    )
    if made is not None and any(word in index.id.lower() for word in ("key", "sig")):
        return made
    asked = next(
        (stmt.test for stmt in statements(function.body) if isinstance(stmt, ir.If) and _asks(stmt.test, index.id)),
        None,
    )
    return (asked.at, made[1] if made is not None else index) if asked is not None else (made or (kept, index))


def _binds(stmt: ir.Assign, name: str) -> bool:
    return any(isinstance(target, ir.Name) and target.id == name for target in stmt.targets)


def _asks(test: ir.Expr, name: str) -> bool:
    """`name in graphs`, `name not in graphs`."""
    return (
        isinstance(test, ir.Compare)
        and test.ops[0] in ("in", "not in")
        and isinstance(test.left, ir.Name)
        and test.left.id == name
    )


def asks_for_key(node: object, name: str) -> bool:
    """Whether the code asks if a key is in the dict `name`: `key in self.name`, `name.get(key)`."""
    if (
        isinstance(node, ir.Compare)
        and any(op in ("in", "not in") for op in node.ops)
        and any(_called(right) == name for right in node.rights)
    ):
        return True
    if (
        isinstance(node, ir.Call)
        and isinstance(node.func, ir.Attr)
        and node.func.name == "get"
        and _called(node.func.obj) == name
    ):
        return True
    if isinstance(node, (tuple, list)):
        return any(asks_for_key(one, name) for one in node)
    return isinstance(node, msgspec.Struct) and any(
        asks_for_key(getattr(node, field), name) for field in node.__struct_fields__ if field != "at"
    )


def _called(node: ir.Expr) -> str:
    return node.id if isinstance(node, ir.Name) else (node.name if isinstance(node, ir.Attr) else "")


def _mentioned(expression: ir.Expr, function: ir.Function | None) -> set[str]:
    """The names in an expression, and those that they are assigned from."""
    found = set(names_in(expression))
    for stmt in statements(function.body) if function is not None else ():
        if isinstance(stmt, ir.Assign) and stmt.value is not None:
            if any(isinstance(target, ir.Name) and target.id in found for target in stmt.targets):
                found |= set(names_in(stmt.value))
    return found


def called_names(node: object) -> Iterator[str]:
    """The plain names that are called in a piece of code."""
    for one in nodes_in(node):
        if isinstance(one, ir.Call) and isinstance(one.func, ir.Name):
            yield one.func.id


def words_of(stmt: ir.Stmt) -> Iterator[str]:
    """The names and attributes in a statement itself, without the statements inside it."""
    nested = set(map(id, inner(stmt)))
    stack: list[object] = [getattr(stmt, field) for field in stmt.__struct_fields__ if field != "at"]
    while stack:
        node = stack.pop()
        if id(node) in nested:
            continue
        if isinstance(node, (tuple, list)):
            stack.extend(node)
        elif isinstance(node, msgspec.Struct):
            if isinstance(node, ir.Name):
                yield node.id
            elif isinstance(node, ir.Attr):
                yield node.name
            stack.extend(getattr(node, field) for field in node.__struct_fields__ if field != "at")


def holds(value: Value, capture: ev.Capture) -> bool:
    if value is capture.graph:
        return True
    if isinstance(value, Choice):
        return any(holds(one, capture) for one in value.values)
    if isinstance(value, (Items, Mapping)):
        return any(holds(one, capture) for one in value.slots.values())
    return isinstance(value, Instance) and any(one is capture.graph for one in value.slots.values())
