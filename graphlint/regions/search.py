"""The regions of one file."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import NamedTuple

from graphlint import ir
from graphlint.regions import apis, bodies
from graphlint.regions.calls import Calls, Capture
from graphlint.regions.contexts import Contexts, Opened
from graphlint.regions.facts import Facts
from graphlint.regions.names import Argument, Names, Where
from graphlint.regions.outline import Outline, terminal
from graphlint.regions.region import Region
from graphlint.regions.scopes import Binding, CallSite, DecoratorSite, Scope, Spot
from graphlint.regions.text import listing, render


class Found(NamedTuple):
    """A region with where it stands, and where the captured expressions are written."""

    region: Region
    scope: Scope
    spot: Spot
    values: tuple[Argument, ...] = ()


class FileSearch:
    """The search in one file; `found()` may be asked again after `facts` has grown."""

    def __init__(self, summary: ir.Summary, facts: Facts, follow: Callable[[str, str], str | None]) -> None:
        self.summary = summary
        self.facts = facts
        self.follow = follow
        self.outline = Outline(summary)
        self.names = Names(self.outline)
        self.contexts = Contexts(self.outline, self.names, facts, follow)
        self.calls = Calls(self.outline, self.names, facts, follow)
        self._ordered: dict[int, list[CallSite]] = {}
        self._ends: dict[tuple[int, str], list[CallSite]] = {}
        self._aliases = self._held_by_names()
        self._declared = {id(scope) for scope in self.outline.scopes if self._is_declared(scope)}
        self.mentions = {terminal(site.call.func) for site in self.outline.calls}
        self.mentions |= {terminal(site.expr) for site in self.outline.decorators}
        self.mentions |= {terminal(item.context) for site in self.outline.withs for item in site.stmt.items}
        self.mentions |= {terminal(base) for scope in self.outline.scopes if scope.cls for base in scope.cls.bases}
        imported = self._imported()
        self.mentions |= {name.rpartition(".")[2] for name in imported}
        self._packages = {name.partition(".")[0] for name in imported} | {summary.module.partition(".")[0]}

    def found(self) -> list[Found]:
        """Every region of the file, by row."""
        out = [self._whole(scope) for scope in self.outline.scopes if id(scope) in self._declared]
        entered: set[int] = set()
        for site in self.outline.withs:
            opened = self.contexts.opened_by(site)
            if opened is not None:
                entered.add(id(opened.context.call))
                out.append(self._opened(opened, site.scope, site.spot))
        for call in self.outline.calls:
            if id(call.call) not in entered and self._interesting(terminal(call.call.func)):
                found = self._call(call)
                if found is not None:
                    out.append(found)
        for decorator in self.outline.decorators:
            if self._interesting(terminal(decorator.expr)):
                out += self._decorator(decorator)
        out.sort(key=lambda one: (one.region.row, one.region.end_row, one.region.kind))
        return out

    def _interesting(self, name: str) -> bool:
        return (
            name in apis.TERMINALS
            or name in apis.EXTERNAL
            or name in self.facts.terminals
            or name in self._aliases
            or "StreamBeginCapture" in name
            or "compile" in name
        )

    def _held_by_names(self) -> set[str]:
        """Names that stand for something imported under another name, or held in a variable: worth resolving."""
        return {
            name
            for scope in self.outline.scopes
            for name, bindings in (*scope.binds.items(), *scope.attrs.items())
            if any(_renames(one, name) for one in bindings)
        }

    def _imported(self) -> set[str]:
        binds = [one for scope in self.outline.scopes for bindings in scope.binds.values() for one in bindings]
        return {one.dotted for one in binds if one.kind == "import"}

    def _is_declared(self, scope: Scope) -> bool:
        """A function that the configuration names and that is no helper: its own body is what is captured."""
        name = f"{self.outline.module}.{scope.qualname}"
        if scope.func is None or name not in self.facts.declared or scope.func.is_generator:
            return False
        params = {param.name for param in scope.func.params}
        called = {
            site.call.func.id
            for site in self.outline.calls
            if _within(site.scope, scope) and type(site.call.func) is ir.Name
        }
        if params & called or any(one.parent is scope for one in self.outline.scopes):
            return False
        self.facts.withdraw(name)
        return True

    # -- by form

    def _whole(self, scope: Scope) -> Found:
        assert scope.func is not None and scope.parent is not None and scope.spot is not None
        region = self._region(
            scope.parent,
            scope.spot.stmt,
            (scope.func.at[0], scope.func.at[2]),
            kind="wrapper",
            api="[tool.graphlint] regions",
            captured=scope.func.qualname,
            decorated=scope.func,
        )
        return Found(region, scope.parent, scope.spot)

    def _call(self, site: CallSite) -> Found | None:
        name = terminal(site.call.func)
        if name in ("enter_context", "enter_async_context", "__enter__"):
            opened = self.contexts.entered_by(site)
            return self._opened(opened, site.scope, site.spot) if opened is not None else None
        ending = apis.ending_of(name)
        if ending is not None:
            return self._begin(site, name, ending)
        capture = self.calls.judge(site)
        if capture is None and site.decorates is not None:
            context = self.contexts.of(site.call, Where(site.scope, site.spot))
            if context is not None:  # a context manager used as a decorator: each call of the function is captured
                capture = Capture(context.kind, context.api, certain=context.certain)
        return self._captured(site, capture) if capture is not None else None

    def _opened(self, opened: Opened, scope: Scope, spot: Spot) -> Found:
        context = opened.context
        values = tuple(self._called_in(opened.body, scope))
        region = self._region(
            scope,
            spot.stmt,
            (opened.row, opened.end_row),
            kind=context.kind,
            api=context.api,
            captured=listing([one.value for one in values]) or "nothing",
            body=opened.body,
            call=context.call,
            certain=context.certain,
        )
        return Found(region, scope, spot, values)

    def _begin(self, site: CallSite, name: str, ending: str) -> Found | None:
        """A begin call and the statements up to the end call that belongs to it."""
        names = self.names.dotted(site.call.func, Where(site.scope, site.spot))
        inside = site.scope.function()
        kind = apis.begin_kind(names[0], name, self._packages)
        if kind is None or any(one.startswith("super()") for one in names):
            return None
        if inside is not None and inside.func is not None and inside.func.name == name:
            return None  # a method that hands the call on
        end = self._end_of(site, ending)
        body = bodies.until(site.spot, end.spot) if end is not None else None
        last = end.call.at[2] if end is not None and body is not None else site.call.at[2]
        values = tuple(self._called_in(body or (), site.scope))
        region = self._region(
            site.scope,
            site.spot.stmt,
            (site.call.at[0], last),
            kind=kind,
            api=render(site.call.func),
            captured=listing([one.value for one in values]) or "what follows the call",
            body=body or (),
            call=site.call,
        )
        return Found(region, site.scope, site.spot, values)

    def _end_of(self, begin: CallSite, ending: str) -> CallSite | None:
        key = (id(begin.scope), ending)
        if key not in self._ends:
            calls = self._calls_from(begin.scope, (0, 0, 0, 0))
            self._ends[key] = [site for site in calls if apis.ends(terminal(site.call.func), ending)]
        ends = self._ends[key]
        after = ends[bisect.bisect_right(ends, _order(begin), key=_order) :]
        own = (site for site in after if _receiver(site.call) == _receiver(begin.call))
        return next(own, after[0] if after else None)

    def _captured(self, site: CallSite, capture: Capture) -> Found:
        call, values, end_row = site.call, capture.values, site.call.at[2]
        where = Where(site.scope, site.spot)
        if site.decorates is not None and capture.kind == "compile":
            values = ()
        elif site.applied is not None and not values:
            values = tuple(Argument("", one, where) for one in site.applied.args[:1])
            end_row = site.applied.at[2]
        exprs = tuple(one.value for one in values)
        below = site.decorates.name if site.decorates is not None else ""
        region = self._region(
            site.scope,
            site.spot.stmt,
            (call.at[0], end_row),
            kind=capture.kind,
            api=capture.name if _outside(capture.name) else render(call.func),
            captured=below or listing(exprs) or "the object it is attached to",
            callables=exprs,
            decorated=site.decorates,
            call=call,
            certain=capture.certain,
            backward=capture.backward,
        )
        return Found(region, site.scope, site.spot, values)

    def _decorator(self, site: DecoratorSite) -> Iterator[Found]:
        capture = self.calls.judge_decorator(site)
        if capture is not None:
            region = self._region(
                site.scope,
                site.spot.stmt,
                (site.expr.at[0], site.expr.at[2]),
                kind=capture.kind,
                api=capture.name if _outside(capture.name) else render(site.expr),
                captured=site.decorates.name,
                decorated=site.decorates,
                certain=capture.certain,
                backward=capture.backward,
            )
            yield Found(region, site.scope, site.spot)

    # -- helpers

    def _region(
        self,
        scope: Scope,
        stmt: ir.Stmt,
        rows: tuple[int, int],
        *,
        kind: str,
        api: str,
        captured: str,
        body: tuple[ir.Stmt, ...] = (),
        callables: tuple[ir.Expr, ...] = (),
        decorated: ir.Function | ir.Class | None = None,
        call: ir.Call | None = None,
        certain: bool = True,
        backward: bool = False,
    ) -> Region:
        owner = scope.function()
        return Region(
            path=self.summary.path,
            module=self.summary.module,
            row=rows[0],
            end_row=rows[1],
            kind=kind,
            api=api,
            captured=captured,
            function=scope.qualname,
            stmt=stmt,
            owner=owner.func if owner is not None else None,
            body=body,
            callables=callables,
            decorated=decorated,
            call=call,
            certain=certain,
            backward=backward,
        )

    def _called_in(self, body: tuple[ir.Stmt, ...], scope: Scope) -> Iterator[Argument]:
        """The callees of the calls in the statements of a region, in the order of the text."""
        if not body:
            return
        last = body[-1].at[2]
        seen = 0
        for site in self._calls_from(scope, body[0].at):
            if site.call.at[0] > last or seen > _MANY:
                return
            if site.call.at[2] <= last and terminal(site.call.func) not in _PLUMBING:
                seen += 1
                yield Argument("", site.call.func, Where(site.scope, site.spot))

    def _calls_from(self, scope: Scope, at: ir.Span) -> Iterator[CallSite]:
        """The calls of a scope in the order of the text, outer before inner, from a position on."""
        if id(scope) not in self._ordered:
            self._ordered[id(scope)] = sorted(scope.calls, key=_order)
        calls = self._ordered[id(scope)]
        start = bisect.bisect_left(calls, (at[0], at[1], -1 << 40, 0), key=_order)
        return (calls[index] for index in range(start, len(calls)))


def _order(site: CallSite) -> tuple[int, int, int, int]:
    at = site.call.at
    return (at[0], at[1], -at[2], -at[3])


_MANY = 400  # calls of one region that are looked at to say what it captures
_PLUMBING = frozenset(
    {"range", "len", "print", "super", "enumerate", "zip", "isinstance", "getattr", "tuple", "list", "dict"}
)
_SHOWN = ("torch.", "transformer_engine.", "warp.", "tensordict.", "triton.", "graphlint.")


def _within(scope: Scope, outer: Scope) -> bool:
    return any(one is outer for one in scope.chain())


def _renames(binding: Binding, name: str) -> bool:
    if binding.kind == "import":
        return binding.dotted.rpartition(".")[2] != name
    return binding.kind == "value" and type(binding.value) in (ir.Attr, ir.Name, ir.Call, ir.IfElse)


def _receiver(call: ir.Call) -> str:
    return render(call.func.obj) if type(call.func) is ir.Attr else ""


def _outside(name: str) -> bool:
    return name.startswith(_SHOWN) and "()" not in name
