"""What the regions of a file say about the helpers that hold them.

A function whose region calls one of its parameters captures what it is given; so does a class whose method captures
what its constructor (or, for a decorator with arguments, its `__call__`) was given. A generator that yields inside a
capture, a function that returns one, a class that begins one in `__enter__`, and a subclass of these are contexts.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphlint import ir
from graphlint.regions import apis
from graphlint.regions.contexts import yields
from graphlint.regions.facts import Facts, Parameter, Wrapper
from graphlint.regions.names import Where
from graphlint.regions.roots import Root, Roots
from graphlint.regions.scopes import Scope, self_class
from graphlint.regions.search import FileSearch, Found
from graphlint.regions.text import render


class Deriver:
    """Adds what one file's regions show to `facts`."""

    def __init__(self, search: FileSearch, facts: Facts) -> None:
        self.search = search
        self.facts = facts
        self.module = search.outline.module
        self.roots = Roots(search.outline, search.names)

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
        if (
            region.kind in _ENTERED
            and scope.func.is_generator
            and yields(region.body)
            and _is_context_manager(scope.func)
        ):
            self.facts.add_context(self.module, scope, region.kind)
        if scope.parent is not None and scope.parent.kind == "class" and region.kind in _ENTERED:
            entry = scope.parent.binds.get("__enter__") or scope.parent.binds.get("__aenter__")
            if entry and not region.body and scope.func.name in self._reached(scope.parent, entry[0].func):
                kind = "graph" if region.kind == "manual" else region.kind
                self.facts.add_context(self.module, scope.parent, kind)

    def _reached(self, cls: Scope, start: object) -> set[str]:
        """The methods of the class that `start` runs on `self`, itself included."""
        names: set[str] = set()
        waiting = [start]
        while waiting:
            scope = self.search.outline.by_node.get(id(waiting.pop()))
            if scope is None or scope.func is None or scope.func.name in names:
                continue
            names.add(scope.func.name)
            for site in scope.calls:
                func = site.call.func
                if type(func) is ir.Attr and type(func.obj) is ir.Name and func.name in cls.binds:
                    if self_class(func.obj.id, scope) is cls:
                        waiting.append(cls.binds[func.name][0].func)
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
                    self.facts.add_context(self.module, scope, context.kind)
                    if any("property" in render(one) for one in scope.func.decorators):
                        self.facts.properties.add(self._name(scope))

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
                    made = Wrapper(
                        "wrapper", (), self._switches(self._constructor(scope)), conditional=self._conditional(scope)
                    )
                    self.facts.add_wrapper(self.module, scope, made)

    def _inherit(self, scope: Scope, base: str) -> None:
        kind = apis.context_kind(base)
        canonical = self.facts.canonical(base, self.search.summary.path, self.search.follow)
        if kind is None and canonical is not None:
            kind = self.facts.contexts.get(canonical)
        if kind is not None:
            self.facts.add_context(self.module, scope, kind)
        wrapper = self.facts.wrappers.get(canonical) if canonical is not None else None
        if wrapper is not None:
            own = self._constructor(scope)
            takes = wrapper.takes
            if own is not None and own.func is not None:
                takes = tuple(one for param in takes for one in _parameters(own.func) if one.name == param.name)
                wrapper = wrapper._replace(takes=takes, switches=self._switches(own))
            if takes or not wrapper.takes or wrapper.decorates:
                self.facts.add_wrapper(self.module, scope, wrapper)

    def _constructor(self, cls: Scope) -> Scope | None:
        made = cls.binds.get("__init__")
        return self.search.outline.by_node.get(id(made[0].func)) if made else None

    # -- wrappers

    def _wrapper_around(self, found: Found) -> None:
        if found.region.kind == "compile" or _is_test(found.scope):
            return
        if found.region.decorated is not None:
            return
        for root in dict.fromkeys(root for value in found.values for root in self.roots.of(value.value, value.where)):
            self._add(root, found)

    def _add(self, root: Root, found: Found) -> None:
        func = root.scope.func
        if func is None or func.name == "<lambda>":
            return
        parameters = [one for one in _parameters(func) if one.name == root.name]
        kind = found.region.kind if found.region.kind in _KEPT else "wrapper"
        cls = root.scope.parent
        holder = cls if cls is not None and cls.kind == "class" else root.scope
        wrapper = Wrapper(
            kind,
            tuple(parameters),
            self._switches(root.scope),
            backward=found.region.backward,
            conditional=not found.region.certain or self._conditional(holder),
        )
        if cls is None or cls.kind != "class" or not _is_method(root.scope):
            self.facts.add_wrapper(self.module, root.scope, wrapper)
        elif func.name == "__init__":
            self.facts.add_wrapper(self.module, cls, wrapper)
        elif func.name == "__call__" and found.scope.owner_class() is cls and _keeps(cls, root.name):
            made = self._constructor(cls)
            self.facts.add_wrapper(
                self.module, cls, wrapper._replace(takes=(), switches=self._switches(made), decorates=True)
            )
        else:
            self.facts.add_wrapper(self.module, root.scope, wrapper)

    def _conditional(self, holder: Scope) -> bool:
        """Whether a function, or any method of a class, asks a setting about graphs that is no parameter of it."""
        cls = holder if holder.kind == "class" else None
        shown = {one.name for one in self._switches(self._constructor(cls) if cls is not None else holder)}
        for test, scope, spot in self.search.outline.tests:
            if any(one is holder for one in scope.chain()):
                for switch in _switches_in(test):
                    if not self._shown(switch, Where(scope, spot), shown):
                        return True
        return False

    def _shown(self, switch: ir.Expr, where: Where, shown: set[str]) -> bool:
        """Whether a setting comes from one of the parameters that a caller gives."""
        values = [value for value, _ in self.search.names.values(switch, where)]
        return bool(shown) and any(isinstance(one, ir.Name) and one.id in shown for one in (switch, *values))

    def _switches(self, scope: Scope | None) -> tuple[Parameter, ...]:
        """Parameters that by name and default turn graphs on or off."""
        if scope is None or scope.func is None:
            return ()
        return tuple(
            one
            for one in _parameters(scope.func)
            if "graph" in one.name.lower() and isinstance(one.default, ir.Const) and isinstance(one.default.value, bool)
        )


def _switches_in(test: ir.Expr) -> Iterator[ir.Expr]:
    """The names in a test that read as a setting about graphs."""
    if isinstance(test, ir.Unary):
        yield from _switches_in(test.operand)
    elif isinstance(test, ir.Bool):
        for value in test.values:
            yield from _switches_in(value)
    elif isinstance(test, ir.Compare):
        for value in (test.left, *test.rights):
            yield from _switches_in(value)
    elif isinstance(test, ir.Call):
        yield from _switches_in(test.func)
    elif isinstance(test, (ir.Name, ir.Attr)):
        name = (test.id if isinstance(test, ir.Name) else test.name).lower()
        if "graph" in name and any(word in name for word in _SETTING):
            yield test


_SETTING = ("use", "enable", "disable", "with", "allow", "mode", "should")
_KEPT = frozenset({"graphed-callable", "warp", "cupy", "other-backend"})
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
