"""Who calls the function that captures, and with what: at a later replay the same caller hands the same expressions to
nobody, and their values of then tell what the graph has frozen."""

from __future__ import annotations

import ast
from types import CodeType, FrameType
from typing import Any

from graphlint.runtime.dryrun import sites

_LEVELS = 3
PLAIN = (bool, int, float, str, type(None))
Handed = dict[str, ast.expr]


class Callers:
    """The calls that led to a capture, innermost first: the code of each caller, and which of its expressions became
    which parameter of the function below."""

    def __init__(self, frame: FrameType) -> None:
        self._levels: list[tuple[CodeType, dict[str, Any], Handed]] = []
        below = frame
        while len(self._levels) < _LEVELS:
            above = _user_above(below)
            call = _call(above, below) if above is not None else None
            if above is None or call is None or above.f_code.co_name == "<module>":
                return
            self._levels.append((above.f_code, above.f_globals, _handed(call, below.f_code)))
            below = above

    @property
    def codes(self) -> list[CodeType]:
        """The code of every caller, innermost first."""
        return [code for code, _, _ in self._levels]

    def values(self, frame: FrameType | None) -> dict[str, Any]:
        """Plain values that the parameters of the capturing function would get now, from the innermost caller that is
        at work at or above `frame`."""
        codes = self.codes
        while frame is not None and frame.f_code not in codes:
            frame = frame.f_back
        if frame is None:
            return {}
        known = sites.locals_of(frame)
        for code, namespace, handed in reversed(self._levels[: codes.index(frame.f_code) + 1]):
            if code is not frame.f_code and not known:
                return {}
            known = {name: _value(expression, namespace, known) for name, expression in handed.items()}
            known = {name: value for name, value in known.items() if isinstance(value, PLAIN)}
        return known


def _user_above(frame: FrameType) -> FrameType | None:
    above = frame.f_back
    while above is not None and sites.is_library(above.f_code.co_filename):
        above = above.f_back
    return above


def _call(above: FrameType, below: FrameType) -> ast.Call | None:
    """The one call of the function below on the line that runs above; None where it can't be told."""
    tree = sites.parsed(above.f_code.co_filename)
    found = [
        node
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.Call)
        and node.lineno <= above.f_lineno <= (node.end_lineno or node.lineno)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
        == below.f_code.co_name
    ]
    return found[0] if len(found) == 1 else None


def _handed(call: ast.Call, code: CodeType) -> Handed:
    """Parameter -> expression, for the arguments that are plain names or attributes."""
    names = list(code.co_varnames[: code.co_argcount])
    if isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    pairs = [*zip(names, call.args, strict=False), *((word.arg or "", word.value) for word in call.keywords)]
    return {name: part for name, part in pairs if isinstance(part, (ast.Name, ast.Attribute))}


def _value(expression: ast.expr, namespace: dict[str, Any], known: dict[str, Any]) -> Any:
    """A name's or an attribute's value; reading it runs no code beyond properties. An object() where it has none."""
    if isinstance(expression, ast.Name):
        return known.get(expression.id, namespace.get(expression.id, object()))
    if isinstance(expression, ast.Attribute):
        owner = _value(expression.value, namespace, known)
        return getattr(owner, "__dict__", {}).get(expression.attr, object())
    return object()


def key_row(filename: str, scopes: list[CodeType]) -> int:
    """The row where a graph's key is made, in the innermost of these functions that looks for a graph by its key (`if
    key not in graphs`); 0 where none does.

    A name that is the key and nothing else (`key = ...`) is told where it is made, any other value at the test.
    """
    tree = sites.parsed(filename)
    for code in scopes:
        for scope in ast.walk(tree) if tree else ():
            if (
                isinstance(scope, ast.FunctionDef)
                and scope.name == code.co_name
                and scope.lineno <= code.co_firstlineno + len(scope.decorator_list)
                and code.co_firstlineno <= (scope.end_lineno or 0)
            ):
                row = _key_of(scope)
                if row:
                    return row
    return 0


def _key_of(scope: ast.FunctionDef) -> int:
    for node in ast.walk(scope):
        for test in ast.walk(node.test) if isinstance(node, ast.If) else ():
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.In, ast.NotIn)):
                made = _assignment(scope, test.left)
                return made or test.lineno
    return 0


def _assignment(scope: ast.FunctionDef, key: ast.expr) -> int:
    """The row of the last plain assignment to a name that says it is the key, above its test."""
    rows = [
        node.lineno
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and isinstance(key, ast.Name)
        and "key" in key.id.lower()
        and node.lineno < key.lineno
        and any(isinstance(target, ast.Name) and target.id == key.id for target in node.targets)
    ]
    return max(rows, default=0)
