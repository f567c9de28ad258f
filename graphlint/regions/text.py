"""Expressions as short text, for people."""

from __future__ import annotations

from collections.abc import Iterable

from graphlint import ir

_WIDTH = 60


def render(expr: ir.Expr) -> str:
    """`expr` as one would write it, arguments left out, cut at 60 characters."""
    text = _render(expr)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _render(expr: ir.Expr) -> str:
    if isinstance(expr, ir.Name):
        return expr.id
    if isinstance(expr, ir.Attr):
        return f"{_render(expr.obj)}.{expr.name}"
    if isinstance(expr, ir.Call):
        return f"{_render(expr.func)}({'...' if expr.args or expr.keywords else ''})"
    if isinstance(expr, ir.Subscript):
        return f"{_render(expr.obj)}[{_render(expr.index)}]"
    if isinstance(expr, ir.Const):
        return repr(expr.value) if not expr.kind else str(expr.value)
    if isinstance(expr, ir.Lambda):
        return "lambda"
    if isinstance(expr, ir.Sequence):
        return "(" + ", ".join(_render(item) for item in expr.items) + ")"
    if isinstance(expr, ir.Star):
        return "*" + _render(expr.value)
    if isinstance(expr, ir.IfElse):
        return f"{_render(expr.body)} or {_render(expr.orelse)}"
    return "..."


def listing(exprs: Iterable[ir.Expr], most: int = 3) -> str:
    """The first few expressions, each once, joined by commas."""
    texts = list(dict.fromkeys(render(expr) for expr in exprs))
    shown = ", ".join(texts[:most])
    return shown + (", ..." if len(texts) > most else "")
