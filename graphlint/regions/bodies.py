"""Which statements run under a capture that no `with` block shows: from a begin to its end, from `enter_context` on."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from graphlint import ir
from graphlint.regions.scopes import Block, Spot

_LONG = 1000  # statements; no capture that people write is longer


def until(start: Spot, end: Spot) -> Block | None:
    """The statements after `start` up to the one at `end`; None when `end` does not follow `start`."""
    path = {id(spot.stmt): spot.stmt for spot in end.around()}
    out: list[ir.Stmt] = []
    for spot in start.around():
        for stmt in spot.rest:
            if len(out) > _LONG:
                return None
            if id(stmt) in path:
                if stmt is not end.stmt:
                    out.append(_cut(stmt, path))
                return tuple(out)
            out.append(stmt)
        if spot.outer is not None and id(spot.outer.stmt) in path:
            return tuple(out)  # begun in a `try` body, ended in its `finally`
    return None


def _cut(stmt: ir.Stmt, path: dict[int, ir.Stmt]) -> ir.Stmt:
    """A compound statement without what comes at and after the end inside it."""
    if isinstance(stmt, ir.With):
        return msgspec.structs.replace(stmt, body=_before(stmt.body, path))
    if isinstance(stmt, (ir.If, ir.For, ir.While)):
        return msgspec.structs.replace(stmt, body=_before(stmt.body, path), orelse=_before(stmt.orelse, path))
    if isinstance(stmt, ir.Try):
        body = _before(stmt.body, path)
        whole = body is stmt.body
        return msgspec.structs.replace(stmt, body=body, orelse=_before(stmt.orelse, path) if whole else (), final=())
    return stmt


def _before(block: Block, path: dict[int, ir.Stmt]) -> Block:
    for index, stmt in enumerate(block):
        if id(stmt) in path:
            return block[:index] if stmt is next(iter(path.values())) else (*block[:index], _cut(stmt, path))
    return block


def onwards(start: Spot, closes: Callable[[ir.Stmt], bool]) -> Block:
    """The statements after `start` up to the end of the enclosing statement that `closes`, else of the function."""
    out: list[ir.Stmt] = []
    spot: Spot | None = start
    while spot is not None:
        if spot is not start and closes(spot.stmt):
            break
        out.extend(spot.rest[:_LONG])
        spot = spot.outer
    return tuple(out)
