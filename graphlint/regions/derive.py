"""What the regions of a file say about the helpers that hold them.

A function whose region calls one of its parameters captures what it is given; so does a class whose method captures what
its constructor (or, for a decorator with arguments, its `__call__`) was given. A generator that yields inside a capture,
a function that returns a capture, a class that begins one in `__enter__`, and a subclass of any of these are contexts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphlint import ir
from graphlint.regions import apis
from graphlint.regions.contexts import yields
from graphlint.regions.facts import Facts, Parameter, Wrapper
from graphlint.regions.names import Argument, Where
from graphlint.regions.outline import Scope, Spot, self_class
from graphlint.regions.search import FileSearch, Found

_DEPTH = 5
_RUN = frozenset({"forward", "__call__", "step", "run", "apply"})  # methods that run an object as a whole


class Root(NamedTuple):
    """A parameter that a captured expression comes from."""

    scope: Scope  # the function whose parameter it is
    name: str


class Deriver:
    """Adds what one file's regions show to `facts`."""

    def __init__(self, search: FileSearch, facts: Facts) -> None:
        self.search = search
        self.facts = facts
        self.module = search.outline.module

    def learn(self, found: list[Found]) -> None:
        for one in found:
            self._context_around(one)
            self._wrapper_around(one)
        self._factories()
        self._classes(found)

    def _name(self, scope: Scope) -> str:
        return f"{self.module}.{scope.qualname}"

    # -- contexts

    def _context_around(self, found: Found) -> None:
        scope, region = found.scope.function(), found.region
        if scope is None or scope.func is None:
            return
        if region.kind in _ENTERED and scope.func.is_generator and yields(region.body) and _is_context_manager(scope.func):
            self.facts.add_context(self._name(scope), region.kind, method=_is_method(scope))
        if scope.parent is not None and scope.parent.kind == "class" and region.kind in _ENTERED:
            entry = scope.parent.binds.get("__enter__") or scope.parent.binds.get("__aenter__")
            if entry and not region.body and scope.func.name in self._reached(scope.parent, entry[0].func):
                kind = "graph" if region.kind == "manual" else region.kind
                self.facts.add_context(self._name(scope.parent), kind, method=False)

    def _reached(self, cls: Scope, start: object, depth: int = 0) -> set[str]:
        """The methods of the class that `start` runs on `self`, itself included."""
        scope = self.search.outline.by_node.get(id(start))
        if scope is None or scope.func is None or depth > _DEPTH:
            return set()
        names = {scope.func.name}
        for site in self.search.outline.calls:
            func = site.call.func
            if site.scope is scope and type(func) is ir.Attr and type(func.obj) is ir.Name and func.name in cls.binds:
                if self_class(func.obj.id, scope) is cls and func.name not in names:
                    names |= self._reached(cls, cls.binds[func.name][0].func, depth + 1)
        return names

    def _factories(self) -> None:
        """Functions that return a capture context."""
        for scope in self.search.outline.scopes:
            if scope.func is None or scope.func.name == "<lambda>":
                continue
            for value, spot in scope.returns:
                if type(value) not in (ir.Call, ir.Name, ir.IfElse):
                    continue
                context = self.search.contexts.of(value, Where(scope, spot))
                if context is not None:
                    self.facts.add_context(self._name(scope), context.kind, method=_is_method(scope))

    def _classes(self, found: list[Found]) -> None:
        """Subclasses of contexts and wrappers, and classes that say by name that they manage graphs."""
        capturing = {id(scope) for one in found if one.values for scope in one.scope.chain() if scope.kind == "class"}
        for scope in self.search.outline.scopes:
            if scope.cls is None or scope.parent is None:
                continue
            for base in scope.cls.bases:
                for name in self.search.names.dotted(base, Where(scope.parent, scope.spot)):
                    self._inherit(scope, name)
            if id(scope) in capturing and "cudagraph" in scope.cls.name.lower().replace("_", ""):
                if self._name(scope) not in self.facts.contexts:
                    self.facts.add_wrapper(self._name(scope), Wrapper("wrapper", (), self._switches(self._constructor(scope))))

    def _inherit(self, scope: Scope, base: str) -> None:
        kind = apis.context_kind(base)
        canonical = self.facts.canonical(base, self.search.summary.path, self.search.follow)
        if kind is None and canonical is not None:
            kind = self.facts.contexts.get(canonical)
        if kind is not None:
            self.facts.add_context(self._name(scope), kind, method=False)
        wrapper = self.facts.wrappers.get(canonical) if canonical is not None else None
        if wrapper is not None:
            own = self._constructor(scope)
            takes = wrapper.takes
            if own is not None and own.func is not None:
                takes = tuple(one for param in takes for one in _parameters(own.func) if one.name == param.name)
                wrapper = wrapper._replace(takes=takes, switches=self._switches(own))
            if takes or not wrapper.takes or wrapper.decorates:
                self.facts.add_wrapper(self._name(scope), wrapper)

    def _constructor(self, cls: Scope) -> Scope | None:
        made = cls.binds.get("__init__")
        return self.search.outline.by_node.get(id(made[0].func)) if made else None

    # -- wrappers

    def _wrapper_around(self, found: Found) -> None:
        if found.region.kind == "compile" or _is_test(found.scope):
            return
        roots = {root for value in found.values for root in self._roots(value.value, value.where, found.region, 0)}
        if found.region.decorated is not None or not roots:
            return
        for root in roots:
            self._add(root, found)

    def _add(self, root: Root, found: Found) -> None:
        func = root.scope.func
        if func is None or func.name == "<lambda>":
            return
        parameters = [one for one in _parameters(func) if one.name == root.name]
        kind = "graphed-callable" if found.region.kind == "graphed-callable" else "wrapper"
        wrapper = Wrapper(kind, tuple(parameters), self._switches(root.scope), backward=found.region.backward)
        cls = root.scope.parent
        if cls is None or cls.kind != "class" or not _is_method(root.scope):
            self.facts.add_wrapper(self._name(root.scope), wrapper)
        elif func.name == "__init__":
            self.facts.add_wrapper(self._name(cls), wrapper)
        elif func.name == "__call__" and found.scope.owner_class() is cls and _keeps(cls, root.name):
            made = self._constructor(cls)
            self.facts.add_wrapper(self._name(cls), wrapper._replace(takes=(), switches=self._switches(made), decorates=True))
        else:
            self.facts.add_wrapper(self._name(root.scope), wrapper)

    def _switches(self, scope: Scope | None) -> tuple[Parameter, ...]:
        """Parameters that by name and default turn graphs on or off."""
        if scope is None or scope.func is None:
            return ()
        return tuple(
            one
            for one in _parameters(scope.func)
            if "graph" in one.name.lower() and isinstance(one.default, ir.Const) and isinstance(one.default.value, bool)
        )

    def _roots(self, expr: ir.Expr, where: Where, region: object, depth: int) -> Iterator[Root]:
        """The parameters that a captured callable comes from."""
        if depth > _DEPTH:
            return
        if type(expr) is ir.Attr:
            yield from self._attr_roots(expr, where, region, depth)
        elif type(expr) is ir.Name:
            yield from self._name_roots(expr.id, where, region, depth)
        elif type(expr) is ir.Subscript or type(expr) is ir.Star:
            inner = expr.obj if type(expr) is ir.Subscript else expr.value
            yield from self._roots(inner, where, region, depth + 1)
        elif type(expr) is ir.IfElse:
            yield from self._roots(expr.body, where, region, depth + 1)
            yield from self._roots(expr.orelse, where, region, depth + 1)
        elif type(expr) is ir.Sequence:
            for item in expr.items:
                yield from self._roots(item, where, region, depth + 1)
        elif type(expr) is ir.Lambda:
            yield from self._body_roots(self.search.outline.scope_of(expr.func), region, depth)

    def _attr_roots(self, expr: ir.Attr, where: Where, region: object, depth: int) -> Iterator[Root]:
        owner = self_class(expr.obj.id, where.scope) if type(expr.obj) is ir.Name else None
        if owner is None:
            if expr.name in _RUN:
                yield from self._roots(expr.obj, where, region, depth + 1)
            return
        for binding in owner.attrs.get(expr.name, ()):
            if binding.value is not None:
                yield from self._roots(binding.value, Where(binding.scope, binding.spot), region, depth + 1)
        for binding in owner.binds.get(expr.name, ()):
            if binding.kind == "function" and isinstance(binding.func, ir.Function):
                yield from self._body_roots(self.search.outline.scope_of(binding.func), region, depth)

    def _name_roots(self, name: str, where: Where, region: object, depth: int) -> Iterator[Root]:
        if self_class(name, where.scope) is not None:
            return
        for binding in self.search.names.bindings(name, where):
            place = Where(binding.scope, binding.spot)
            if binding.kind == "param" and isinstance(binding.func, ir.Param):
                if binding.func.kind in ("pos", "kw", "*") and _may_be_called(binding.func.annotation):
                    yield Root(binding.scope, name)
            elif binding.kind == "value" and binding.value is not None:
                yield from self._roots(binding.value, place, region, depth + 1)
            elif binding.kind == "loop" and binding.value is not None:
                yield from self._loop_roots(binding.value, place, region, depth)
            elif binding.kind == "function" and isinstance(binding.func, ir.Function):
                if binding.scope.kind == "function":  # a closure
                    yield from self._body_roots(self.search.outline.scope_of(binding.func), region, depth)

    def _loop_roots(self, source: ir.Expr, where: Where, region: object, depth: int) -> Iterator[Root]:
        if type(source) is ir.Call and type(source.func) is ir.Name and source.func.id in ("zip", "enumerate", "reversed", "list"):
            for arg in source.args:
                yield from self._loop_roots(arg, where, region, depth + 1)
        else:
            yield from self._roots(source, where, region, depth + 1)

    def _body_roots(self, scope: Scope | None, region: object, depth: int) -> Iterator[Root]:
        """The parameters outside `scope` that calls in its body come from."""
        if scope is None or depth > _DEPTH:
            return
        for site in self.search.outline.calls:
            if site.scope is scope:
                for root in self._roots(site.call.func, Where(scope, site.spot), region, depth + 2):
                    if root.scope is not scope:
                        yield root


_ENTERED = frozenset({"graph", "manual", "warp", "cupy", "other-backend"})


def _is_context_manager(func: ir.Function) -> bool:
    for decorator in func.decorators:
        expr = decorator.func if isinstance(decorator, ir.Call) else decorator
        name = expr.name if isinstance(expr, ir.Attr) else expr.id if isinstance(expr, ir.Name) else ""
        if "contextmanager" in name:
            return True
    return False


def _is_method(scope: Scope) -> bool:
    return scope.parent is not None and scope.parent.kind == "class"


def _is_test(scope: Scope) -> bool:
    function = scope.function()
    return function is not None and function.func is not None and function.func.name.startswith("test_")


def _keeps(cls: Scope, name: str) -> bool:
    """Whether a parameter of that name is stored on `self`."""
    return any(
        type(one.value) is ir.Name and one.value.id == name for bindings in cls.attrs.values() for one in bindings
    )


def _parameters(func: ir.Function) -> list[Parameter]:
    """The parameters as a caller counts them; keyword-only ones have position -1."""
    out: list[Parameter] = []
    skip = 1 if func.qualname.count(".") and func.params and func.params[0].name in ("self", "cls") else 0
    index = 0
    for param in func.params[skip:]:
        positional = param.kind in ("pos", "*")
        out.append(Parameter(param.name, index if positional else -1, param.default))
        index += positional
    return out


_DATA = ("Tensor", "int", "float", "bool", "str", "device", "Stream", "dtype", "Generator", "CUDAGraph", "None")


def _may_be_called(annotation: ir.Expr | None) -> bool:
    if isinstance(annotation, ir.Attr):
        return annotation.name not in _DATA
    return not (isinstance(annotation, ir.Name) and annotation.id in _DATA)


__all__ = ["Deriver", "Root", "Spot", "Argument"]
