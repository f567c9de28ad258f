"""A local that the region takes is bound anew for the next replay, and nothing else takes it: the graph goes on with
the first one."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from graphlint import ir
from graphlint.checks.base import Report, Walk, at
from graphlint.checks.keys import statements
from graphlint.checks.memory import captured
from graphlint.flow import events as ev
from graphlint.flow.values import Unknown
from graphlint.link import inner, names_in


def passed_over_local(walk: Walk) -> Iterator[Report]:
    """`x = next(batches)` before each replay, and `x` used by the region alone. What `x` is need not be known: the
    graph has the one of its capture."""
    for capture in captured(walk):
        function = capture.frame.func
        reads = {
            event.cell.key: event
            for event in walk.of(ev.ReadEvent)
            if event.capture is capture
            and isinstance(event.value, Unknown)
            and event.cell.holder is capture.frame.scope
        }
        if function is None or not reads:
            continue
        for change in walk.of(ev.WriteEvent):
            read = reads.get(change.cell.key) if change.cell.holder is capture.frame.scope else None
            if (
                read is None
                or change.capture is not None
                or change.clock < capture.end
                or not isinstance(change.new, Unknown)
                or not change.sure
            ):
                continue
            replayed = any(
                event.clock > change.clock and event.frame is capture.frame for event in walk.replays(capture)
            )
            if replayed and not _used_elsewhere(str(change.cell.key), change.at, read.at, capture, function):
                report = at(change, "rebound-input", capture, value=str(change.cell.key))
                report.related.append((read.frame, read.at, "the graph goes on reading what stood here at capture"))
                yield report
                break


def _used_elsewhere(name: str, change: ir.Span, read: ir.Span, capture: ev.Capture, function: ir.Function) -> bool:
    """Whether a statement of the function, other than the region and those that bind the name itself, mentions it after
    the change."""
    return any(
        stmt.at[0] >= change[0] and name in _mentions(stmt) and not _binds(stmt, name) and not _around(stmt.at, read)
        for stmt in statements(function.body)
    )


def _around(outer: ir.Span, at_: ir.Span) -> bool:
    return outer[:2] <= at_[:2] and at_[2:] <= outer[2:]


def _mentions(stmt: ir.Stmt) -> set[str]:
    """The names in a statement itself, without the statements inside it."""
    found: set[str] = set()
    nested = set(map(id, inner(stmt)))
    if isinstance(stmt, (ir.Define, ir.DefineClass)):
        return set(names_in(stmt))
    for field in stmt.__struct_fields__ if isinstance(stmt, msgspec.Struct) else ():
        value = getattr(stmt, field)
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            if id(part) not in nested and not isinstance(part, (ir.Handler, ir.Case)):
                found |= set(names_in(part))
    return found


def _binds(stmt: ir.Stmt, name: str) -> bool:
    return isinstance(stmt, ir.Assign) and any(
        isinstance(target, ir.Name) and target.id == name for target in stmt.targets
    )


__all__ = ["passed_over_local"]
