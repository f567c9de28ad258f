"""Where a captured callable comes from: a parameter, directly or through `self`, a loop, an alias or a closure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphlint import ir
from graphlint.regions.names import Names, Where
from graphlint.regions.outline import Outline, terminal
from graphlint.regions.scopes import Scope, self_class

_DEPTH = 5
_HANDS_ON = frozenset({"getattr", "partial", "MethodType", "wraps"})
_RUN = frozenset({"forward", "__call__", "step", "run", "apply"})  # methods that run an object as a whole


class Root(NamedTuple):
    """A parameter that a captured expression comes from, and the function whose parameter it is."""

    scope: Scope
    name: str


class Roots:
    """Traces captured expressions of one file."""

    def __init__(self, outline: Outline, names: Names) -> None:
        self.outline = outline
        self.names = names
        self._bodies: dict[int, tuple[Root, ...]] = {}
        self._inside = 0  # bodies being looked at

    def of(self, expr: ir.Expr, where: Where, depth: int = 0) -> Iterator[Root]:
        """The parameters that a captured callable comes from."""
        if depth > _DEPTH:
            return
        if type(expr) is ir.Attr:
            yield from self._attr_roots(expr, where, depth)
        elif type(expr) is ir.Name:
            yield from self._name_roots(expr.id, where, depth)
        elif type(expr) is ir.Subscript:
            yield from self.of(expr.obj, where, depth + 1)
        elif type(expr) is ir.Star:
            yield from self.of(expr.value, where, depth + 1)
        elif type(expr) is ir.IfElse:
            yield from self.of(expr.body, where, depth + 1)
            yield from self.of(expr.orelse, where, depth + 1)
        elif type(expr) is ir.Sequence:
            for item in expr.items:
                yield from self.of(item, where, depth + 1)
        elif type(expr) is ir.Call and expr.args and terminal(expr.func) in _HANDS_ON:
            yield from self.of(expr.args[0], where, depth + 1)
        elif type(expr) is ir.Lambda:
            yield from self._body_roots(self.outline.scope_of(expr.func))

    def _attr_roots(self, expr: ir.Attr, where: Where, depth: int) -> Iterator[Root]:
        owner = self_class(expr.obj.id, where.scope) if type(expr.obj) is ir.Name else None
        if owner is None:
            if expr.name in _RUN:
                yield from self.of(expr.obj, where, depth + 1)
            return
        for binding in owner.attrs.get(expr.name, ()):
            if binding.value is not None:
                yield from self.of(binding.value, Where(binding.scope, binding.spot), depth + 1)
        for binding in owner.binds.get(expr.name, ()):
            if binding.kind == "function" and isinstance(binding.func, ir.Function):
                yield from self._body_roots(self.outline.scope_of(binding.func))

    def _name_roots(self, name: str, where: Where, depth: int) -> Iterator[Root]:
        if self_class(name, where.scope) is not None:
            return
        for binding in self.names.bindings(name, where):
            place = Where(binding.scope, binding.spot)
            if binding.kind == "param" and isinstance(binding.func, ir.Param):
                if binding.func.kind in ("pos", "kw", "*") and _may_be_called(binding.func.annotation):
                    yield Root(binding.scope, name)
            elif binding.kind == "value" and binding.value is not None:
                yield from self.of(binding.value, place, depth + 1)
            elif binding.kind == "loop" and binding.value is not None:
                yield from self._loop_roots(binding.value, place, depth)
            elif binding.kind == "function" and isinstance(binding.func, ir.Function):
                if binding.scope.kind == "function":  # a closure
                    yield from self._body_roots(self.outline.scope_of(binding.func))

    def _loop_roots(self, source: ir.Expr, where: Where, depth: int) -> Iterator[Root]:
        if (
            type(source) is ir.Call
            and type(source.func) is ir.Name
            and source.func.id in ("zip", "enumerate", "reversed", "list")
        ):
            for arg in source.args:
                yield from self._loop_roots(arg, where, depth + 1)
        else:
            yield from self.of(source, where, depth + 1)

    def _body_roots(self, scope: Scope | None) -> tuple[Root, ...]:
        """The parameters outside `scope` that calls in its body come from; each body is looked at once."""
        if scope is None or self._inside > _DEPTH:
            return ()
        if id(scope) not in self._bodies:
            self._bodies[id(scope)] = ()  # while it is being looked at: recursion adds nothing
            self._inside += 1
            calls = [self.of(site.call.func, Where(scope, site.spot), 1) for site in scope.calls]
            roots = {root: None for found in calls for root in found if root.scope is not scope}
            self._inside -= 1
            self._bodies[id(scope)] = tuple(roots)
        return self._bodies[id(scope)]


_DATA = ("Tensor", "int", "float", "bool", "str", "device", "Stream", "dtype", "Generator", "CUDAGraph", "None")


def _may_be_called(annotation: ir.Expr | None) -> bool:
    if isinstance(annotation, ir.Attr):
        return annotation.name not in _DATA
    return not (isinstance(annotation, ir.Name) and annotation.id in _DATA)
