"""Capture contexts: expressions that capture while they are entered, and the regions they open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from graphlint import ir
from graphlint.regions import apis
from graphlint.regions.bodies import onwards
from graphlint.regions.facts import Facts
from graphlint.regions.names import Names, Where
from graphlint.regions.outline import Outline
from graphlint.regions.scopes import CallSite, Spot, WithSite
from graphlint.regions.text import render

_DEPTH = 4


class Context(NamedTuple):
    """An expression that captures while it is entered."""

    kind: str
    api: str
    call: ir.Call | None
    certain: bool = True


class Opened(NamedTuple):
    """A region opened by entering a context: its text, its statements."""

    context: Context
    row: int
    end_row: int
    body: tuple[ir.Stmt, ...]


class Contexts:
    """Recognises capture contexts in one file."""

    def __init__(self, outline: Outline, names: Names, facts: Facts, follow: Callable[[str, str], str | None]) -> None:
        self.outline = outline
        self.names = names
        self.facts = facts
        self.follow = follow

    def kind_of(self, name: str) -> str | None:
        """The kind of region that `with name(...)` opens: a known API or a context manager of the project."""
        known = apis.context_kind(name)
        if known is not None:
            return known
        canonical = self.facts.canonical(name, self.outline.summary.path, self.follow)
        if canonical is not None:
            return self.facts.contexts.get(canonical)
        return self._by_method(name)

    def _by_method(self, name: str) -> str | None:
        """A method of an object whose type is unknown, by a name that only capturing methods of the project have."""
        base, _, terminal = name.rpartition(".")
        unknown = base[:1] == "?" or base.endswith(("()", "[]"))
        return self.facts.methods.get(terminal) if unknown else None

    def of(self, expr: ir.Expr, where: Where, depth: int = 0) -> Context | None:
        """What `expr` captures when it is entered, or None."""
        if depth > _DEPTH:
            return None
        if type(expr) is ir.Call:
            return self._of_call(expr, where, depth)
        if type(expr) not in (ir.Name, ir.Attr, ir.IfElse, ir.Bool, ir.Walrus):
            return None
        found: list[Context | None] = []
        for value, place in self.names.values(expr, where):
            found.append(self._instance(value, place) if value is expr else self.of(value, place, depth + 1))
        contexts = [one for one in found if one is not None]
        return contexts[0]._replace(certain=len(contexts) == len(found) and contexts[0].certain) if contexts else None

    def _instance(self, expr: ir.Expr, where: Where) -> Context | None:
        for name in self.names.dotted(expr, where):
            kind = apis.instance_kind(name) or self._property_kind(name)
            if kind is not None:
                return Context(kind, render(expr), None)
        return None

    def _property_kind(self, name: str) -> str | None:
        """The kind of `with self.capture:` where a property returns the context."""
        canonical = self.facts.canonical(name, self.outline.summary.path, self.follow)
        return self.facts.contexts.get(canonical) if canonical in self.facts.properties else None

    def _of_call(self, call: ir.Call, where: Where, depth: int) -> Context | None:
        callees = self.names.callees(call.func, where)
        for callee in callees:
            kind = self.kind_of(callee.name)
            if kind is not None:
                return Context(kind, _spelling(callee.name, call), call, len(callees) == 1)
            instance = apis.instance_kind(callee.name + "()")
            if instance is not None:
                return Context(instance, callee.name, call)
        for argument in call.args:  # a context handed to another context manager: use_torch_stream(torch.cuda.graph(g))
            if type(argument) is ir.Call or type(argument) is ir.Name:
                inner = self.of(argument, where, depth + 2)
                if inner is not None:
                    return inner
        return None

    # -- regions

    def opened_by(self, site: WithSite) -> Opened | None:
        """The region of a `with` statement; managers entered after the capture are part of what is captured."""
        where = Where(site.scope, site.spot)
        items = site.stmt.items
        for index, item in enumerate(items):
            context = self.of(item.context, where)
            if context is not None:
                body = site.stmt.body
                if index + 1 < len(items):
                    start = items[index + 1].context.at
                    body = (ir.With((start[0], start[1], *site.stmt.at[2:]), items[index + 1 :], body),)
                return Opened(context, site.stmt.at[0], site.stmt.at[2], body)
        return None

    def entered_by(self, site: CallSite) -> Opened | None:
        """The region that `stack.enter_context(ctx)` or `ctx.__enter__()` opens."""
        func = site.call.func
        if type(func) is not ir.Attr:
            return None
        where = Where(site.scope, site.spot)
        if func.name == "__enter__":
            context = self.of(func.obj, where)
            leaves = _method_call(func.obj, ("__exit__",))
            body = onwards(site.spot, lambda stmt: False)
        else:
            context = self.of(site.call.args[0], where) if site.call.args else None
            leaves = _method_call(func.obj, ("close", "aclose", "__exit__"))
            body = onwards(site.spot, _binds_stack(func.obj))
        if context is None:
            return None
        captured = _up_to(body, leaves)
        end = captured[-1].at[2] if captured else site.spot.stmt.at[2]
        return Opened(context, site.spot.stmt.at[0], max(end, site.spot.stmt.at[2]), captured)


def _spelling(name: str, call: ir.Call) -> str:
    return render(call.func) if "?" in name or "()" in name else name


def _binds_stack(stack: ir.Expr) -> Callable[[ir.Stmt], bool]:
    text = render(stack)

    def closes(stmt: ir.Stmt) -> bool:
        return isinstance(stmt, ir.With) and any(
            (item.target is not None and render(item.target) == text) or render(item.context) == text
            for item in stmt.items
        )

    return closes


def _method_call(receiver: ir.Expr, methods: tuple[str, ...]) -> Callable[[ir.Stmt], bool]:
    text = render(receiver)

    def matches(stmt: ir.Stmt) -> bool:
        call = stmt.value if isinstance(stmt, (ir.Do, ir.Assign, ir.Return)) else None
        return (
            isinstance(call, ir.Call)
            and isinstance(call.func, ir.Attr)
            and call.func.name in methods
            and render(call.func.obj) == text
        )

    return matches


def _up_to(body: tuple[ir.Stmt, ...], leaves: Callable[[ir.Stmt], bool]) -> tuple[ir.Stmt, ...]:
    for index, stmt in enumerate(body):
        if leaves(stmt):
            return body[:index]
    return body


def yields(body: tuple[ir.Stmt, ...]) -> bool:
    """Whether the statements hand control to a caller (the body of a `@contextmanager`)."""
    return any(isinstance(stmt, ir.Do) and isinstance(stmt.value, ir.Yield) for stmt in _flat(body)) or any(
        isinstance(stmt, ir.Assign) and isinstance(stmt.value, ir.Yield) for stmt in _flat(body)
    )


def _flat(body: tuple[ir.Stmt, ...]) -> Iterator[ir.Stmt]:
    for stmt in body:
        yield stmt
        for name in ("body", "orelse", "final"):
            yield from _flat(getattr(stmt, name, ()))


def expected_to_be_refused(spot: Spot) -> bool:
    """Whether a test expects the call at `spot` to be rejected for its arguments, before anything is captured."""
    for around in spot.around():
        if isinstance(around.stmt, ir.With):
            for item in around.stmt.items:
                call = item.context
                if isinstance(call, ir.Call) and call.args:
                    name = render(call.func).rpartition(".")[2]
                    if (name == "raises" or name.startswith("assertRaises")) and render(call.args[0]) in (
                        "TypeError",
                        "ValueError",
                    ):
                        return True
    return False
