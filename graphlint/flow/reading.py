"""What expressions are made of: how one is evaluated, and how a value is read from its cell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow.state import State
from graphlint.flow.values import (
    NONE,
    Bound,
    Cell,
    Choice,
    Closure,
    Holder,
    Host,
    Scope,
    Tensor,
    Unknown,
    Value,
    alternatives,
)

MAX_ORIGINS = 6


class Reading(State):
    """Evaluates by the name of a node's type. `call`, `attribute` and `run` belong to the parts built on it."""

    def call(self, func: Value, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
        raise NotImplementedError

    def attribute(self, obj: Value, name: str, at: ir.Span) -> Value:
        raise NotImplementedError

    def closure(self, func: ir.Function, at: ir.Span) -> Closure:
        raise NotImplementedError

    def assign(self, target: ir.Expr, value: Value, at: ir.Span) -> None:
        raise NotImplementedError

    def global_name(self, scope: Scope, name: str) -> Value | None:
        raise NotImplementedError

    def iterate(self, value: Value, at: ir.Span) -> list[Value]:
        raise NotImplementedError

    # -- dispatch

    def eval(self, node: ir.Expr) -> Value:
        made: Value = getattr(self, "_" + type(node).__name__)(node)
        return made

    def maybe(self, node: ir.Expr | None) -> Value:
        return NONE if node is None else self.eval(node)

    # -- cells

    def read(self, holder: Holder, key: Any, value: Value, at: ir.Span) -> Value:
        """A value read from a cell: remembers the cell in host values, and tells the checks when a capture reads it."""
        capture = self.open[-1] if self.open else None
        if (
            capture is not None
            and holder.born < capture.begin
            and (
                isinstance(value, (Host, Tensor, Choice))
                or (isinstance(value, Unknown) and holder is capture.frame.scope)
            )
        ):
            self.happen(ev.ReadEvent, at, Cell(holder, key), value)
        elif capture is None and self.written_in_capture:
            cell = Cell(holder, key)
            if cell in self.written_in_capture:
                self.happen(ev.ReadEvent, at, cell, value)
        lasting = (
            not isinstance(holder, Scope)
            or holder.outer is None
            or (capture is not None and holder.born < capture.begin)
        )
        if lasting:
            return self._tag(value, Cell(holder, key))
        return value

    def _tag(self, value: Value, cell: Cell) -> Value:
        if isinstance(value, Host):
            if value.kind in ("device", "dtype") or len(value.origins) >= MAX_ORIGINS:
                return value
            return replace(value, origins=value.origins | {cell})
        if isinstance(value, Choice) and any(isinstance(one, Host) for one in value.values):
            return Choice(tuple(self._tag(one, cell) for one in value.values))
        return value

    # -- asking values

    def origins(self, value: Value) -> frozenset[Cell]:
        """The cells that the host values in it were read from."""
        found: frozenset[Cell] = frozenset()
        for one in alternatives(value):
            if isinstance(one, Host):
                found |= one.origins
        return found

    def marks(self, value: Value) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for one in alternatives(value):
            if isinstance(one, Host):
                found |= one.marks
        return found

    def place_of(self, target: ir.Expr) -> tuple[Holder, Any] | None:
        """The holder and key that a name or attribute stands for, where that is known."""
        raise NotImplementedError

    def narrow(self, test: ir.Expr) -> Any:
        raise NotImplementedError

    def assuming(self, narrowed: Any, truth: bool) -> Any:
        raise NotImplementedError


def unresolved(value: Value) -> bool:
    """Whether nothing is known of it."""
    return isinstance(value, Unknown) or (isinstance(value, Bound) and isinstance(value.receiver, Unknown))
