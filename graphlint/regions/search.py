"""Finds the regions of one file, and goes round a project until its own capturing helpers are all known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from graphlint import ir
from graphlint.regions import apis, bodies
from graphlint.regions.compiled import Compiled
from graphlint.regions.constants import UNKNOWN, Constants
from graphlint.regions.contexts import Context, Contexts, Opened, expected_to_be_refused
from graphlint.regions.facts import Facts, Wrapper
from graphlint.regions.names import Argument, Callee, Names, Where, arguments
from graphlint.regions.outline import CallSite, DecoratorSite, Outline, Scope, Spot
from graphlint.regions.region import Region
from graphlint.regions.text import listing, render

Follow = Callable[[str, str], "str | None"]


class Found(NamedTuple):
    """A region with where it stands, and where the captured expressions are written."""

    region: Region
    scope: Scope
    spot: Spot
    values: tuple[Argument, ...] = ()


class FileSearch:
    """The search in one file; `found()` may be asked again after `facts` has grown."""

    def __init__(self, summary: ir.Summary, facts: Facts, follow: Follow) -> None:
        self.summary = summary
        self.facts = facts
        self.follow = follow
        self.outline = Outline(summary)
        self.names = Names(self.outline)
        self.contexts = Contexts(self.outline, self.names, facts, follow)
        self.constants = Constants(self.outline, self.names)
        self.compiled = Compiled(self.outline, self.names, self.constants)
        self.terminals = {_terminal(site.call.func) for site in self.outline.calls}
        self.terminals |= {_terminal(site.expr) for site in self.outline.decorators}
        self._aliases = self._held_by_names()

    def found(self) -> list[Found]:
        """Every region of the file, by row."""
        out: list[Found] = []
        for site in self.outline.withs:
            opened = self.contexts.opened_by(site)
            if opened is not None:
                out.append(self._opened(opened, site.scope, site.spot))
        for call in self.outline.calls:
            if self._interesting(_terminal(call.call.func)):
                out += self._call(call)
        for decorator in self.outline.decorators:
            out += self._decorator(decorator)
        out.sort(key=lambda one: (one.region.row, one.region.end_row, one.region.kind))
        return out

    def _interesting(self, terminal: str) -> bool:
        return (
            terminal in apis.TERMINALS
            or terminal in apis.EXTERNAL
            or terminal in self.facts.terminals
            or terminal in self._aliases
            or "StreamBeginCapture" in terminal
        )

    def _held_by_names(self) -> set[str]:
        """Names that stand for something imported under another name, or held in a variable: worth resolving."""
        out: set[str] = set()
        for scope in self.outline.scopes:
            for name, bindings in scope.binds.items():
                for one in bindings:
                    if one.kind == "import" and one.dotted.rpartition(".")[2] != name:
                        out.add(name)
                    elif one.kind == "value" and type(one.value) in (ir.Attr, ir.Name, ir.Call, ir.IfElse):
                        out.add(name)
        return out

    # -- by form

    def _opened(self, opened: Opened, scope: Scope, spot: Spot) -> Found:
        context = opened.context
        values = tuple(self._called_in(opened.body, scope))
        region = self._region(
            opened.row, opened.end_row, context.kind, context.api, scope, spot.stmt,
            captured=listing([one.value for one in values]) or "nothing", body=opened.body, call=context.call,
            certain=context.certain,
        )  # fmt: skip
        return Found(region, scope, spot, values)

    def _call(self, site: CallSite) -> Iterator[Found]:
        terminal = _terminal(site.call.func)
        if terminal in ("enter_context", "enter_async_context", "__enter__"):
            opened = self.contexts.entered_by(site)
            if opened is not None:
                yield self._opened(opened, site.scope, site.spot)
            return
        if apis.begin_of(terminal) is not None:
            found = self._begin(site, terminal)
            if found is not None:
                yield found
            return
        where = Where(site.scope, site.spot)
        for callee in self.names.callees(site.call.func, where):
            found = self._capturing_call(site, callee, where)
            if found is not None:
                yield found
                return

    def _begin(self, site: CallSite, terminal: str) -> Found | None:
        """A begin call and the statements up to the end call that belongs to it."""
        names = self.names.dotted(site.call.func, Where(site.scope, site.spot))
        inside = site.scope.function()
        if any(name.startswith("super()") for name in names) or (inside and inside.func and inside.func.name == terminal):
            return None
        end = self._end_of(site, apis.begin_of(terminal) or "")
        body = bodies.until(site.spot, end.spot) if end is not None else None
        last = end.call.at[2] if end is not None and body is not None else site.call.at[2]
        values = tuple(self._called_in(body or (), site.scope))
        region = self._region(
            site.call.at[0], last, apis.begin_kind(names[0], terminal), render(site.call.func), site.scope, site.spot.stmt,
            captured=listing([one.value for one in values]) or "what follows the call", body=body or (), call=site.call,
        )  # fmt: skip
        return Found(region, site.scope, site.spot, values)

    def _end_of(self, begin: CallSite, terminal: str) -> CallSite | None:
        after = [
            site
            for site in self.outline.calls
            if site.scope is begin.scope
            and site.call.at[:2] > begin.call.at[:2]
            and (_terminal(site.call.func) == terminal or terminal == "StreamEndCapture" and terminal in _terminal(site.call.func))
        ]
        own = [site for site in after if _receiver(site.call) == _receiver(begin.call)]
        return min(own or after, key=lambda site: site.call.at[:2], default=None)

    def _capturing_call(self, site: CallSite, callee: Callee, where: Where) -> Found | None:
        given = arguments(site.call, where)
        verdict = self.compiled.verdict(callee, given)
        if verdict is not None:
            if not verdict.records:
                return None
            values = self._compiled_values(site, callee, given, where)
            return self._captures(site, "compile", callee.name, values, verdict.certain, backward=True)
        canonical = self.facts.canonical(callee.name, self.summary.path, self.follow)
        wrapper = self.facts.wrappers.get(canonical) if canonical is not None else None
        if wrapper is not None:
            return self._wrapped(site, callee, wrapper, given, where)
        known = apis.external(callee.name)
        if known is not None:
            values = _taken(known.takes, [*callee.bound, *given])
            if self._switched(given) is False or expected_to_be_refused(site.spot):
                return None
            if not values and known.takes and not known.decorates and known is not apis.GRAPHED:
                return None
            return self._captures(site, known.kind, callee.name, values, self._switched(given) is None, known.backward)
        return None

    def _compiled_values(
        self, site: CallSite, callee: Callee, given: tuple[Argument, ...], where: Where
    ) -> tuple[Argument, ...]:
        values = _taken(("model",), given)
        if not values and callee.name not in ("torch.compile", "torch.compiler.compile") and type(site.call.func) is ir.Attr:
            if "optimize" not in callee.name:
                return (Argument("", site.call.func.obj, where),)
        return values

    def _wrapped(
        self, site: CallSite, callee: Callee, wrapper: Wrapper, given: tuple[Argument, ...], where: Where
    ) -> Found | None:
        """A call of a capturing helper of the project."""
        every = [*callee.bound, *given]
        if self._off(wrapper, every) or expected_to_be_refused(site.spot):
            return None
        values = tuple(one for parameter in wrapper.takes for one in _passed(parameter.name, parameter.index, every))
        spread = any(one.name in ("*", "**") for one in every)
        if not values and wrapper.takes and not wrapper.decorates and not spread:
            return None
        certain = self._switched(given) is None and not any(_passed(one.name, one.index, every) for one in wrapper.switches)
        return self._captures(site, wrapper.kind, callee.name, values, certain, wrapper.backward)

    def _off(self, wrapper: Wrapper, given: list[Argument]) -> bool:
        """Whether a flag of the helper, given or by default, says that nothing is captured."""
        if self._switched(given) is False:
            return True
        for switch in wrapper.switches:
            passed = list(_passed(switch.name, switch.index, given))
            default = switch.default
            if not passed and isinstance(default, ir.Const) and default.value is False:
                return not any(one.name == "**" for one in given)
        return False

    def _switched(self, given: tuple[Argument, ...] | list[Argument]) -> bool | None:
        """False where a keyword that speaks of graphs is the literal False, True where a variable decides, else None."""
        decided: bool | None = None
        for one in given:
            if "graph" in one.name.lower() and one.name.lower().startswith(("use", "enable", "with", "cuda", "graph")):
                literals = list(self.constants.of(one.value, one.where))
                if literals and all(literal is False or literal is None and len(literals) == 1 for literal in literals):
                    return False if literals[0] is False else decided
                if UNKNOWN in literals or False in literals:
                    decided = True
        return decided

    def _captures(
        self, site: CallSite, kind: str, name: str, values: tuple[Argument, ...], certain: bool, backward: bool
    ) -> Found:
        call, spot = site.call, site.spot
        exprs = tuple(one.value for one in values)
        row, end_row = call.at[0], call.at[2]
        if site.decorates is not None:
            exprs, captured = exprs if kind != "compile" else (), site.decorates.name
        else:
            if site.applied is not None and not exprs:
                exprs, end_row = tuple(site.applied.args[:1]), site.applied.at[2]
                values = tuple(Argument("", one, Where(site.scope, spot)) for one in exprs)
            captured = listing(exprs) or "the object it is attached to"
        api = render(call.func) if "?" in name or "()" in name or not _outside(name) else name
        region = self._region(
            row, end_row, kind, api, site.scope, spot.stmt, captured=captured, callables=exprs,
            decorated=site.decorates, call=call, certain=certain, backward=backward,
        )  # fmt: skip
        return Found(region, site.scope, spot, values)

    def _decorator(self, site: DecoratorSite) -> Iterator[Found]:
        if not self._interesting(_terminal(site.expr)):
            return
        where = Where(site.scope, site.spot)
        for callee in self.names.callees(site.expr, where):
            canonical = self.facts.canonical(callee.name, self.summary.path, self.follow)
            wrapper = self.facts.wrappers.get(canonical) if canonical is not None else None
            known = apis.external(callee.name)
            verdict = self.compiled.verdict(callee, ())
            records = verdict is not None and verdict.records
            if wrapper is None and known is None and not records:
                continue
            if wrapper is not None and self._off(wrapper, list(callee.bound)):
                continue
            kind = "compile" if records else wrapper.kind if wrapper is not None else known.kind if known else "wrapper"
            region = self._region(
                site.expr.at[0], site.expr.at[2], kind, render(site.expr), site.scope, site.spot.stmt,
                captured=site.decorates.name, decorated=site.decorates,
                backward=records or bool(known and known.backward) or bool(wrapper and wrapper.backward),
            )  # fmt: skip
            yield Found(region, site.scope, site.spot)
            return

    # -- helpers

    def _region(
        self, row: int, end_row: int, kind: str, api: str, scope: Scope, stmt: ir.Stmt, *, captured: str,
        body: tuple[ir.Stmt, ...] = (), callables: tuple[ir.Expr, ...] = (),
        decorated: ir.Function | ir.Class | None = None, call: ir.Call | None = None, certain: bool = True,
        backward: bool = False,
    ) -> Region:  # fmt: skip
        owner = scope.function()
        return Region(
            path=self.summary.path, module=self.summary.module, row=row, end_row=end_row, kind=kind, api=api,
            captured=captured, function=scope.qualname, stmt=stmt, owner=owner.func if owner is not None else None,
            body=body, callables=callables, decorated=decorated, call=call, certain=certain, backward=backward,
        )  # fmt: skip

    def _called_in(self, body: tuple[ir.Stmt, ...], scope: Scope) -> Iterator[Argument]:
        """The callees of the outermost calls in the statements of a region."""
        if not body:
            return
        first, last = body[0].at[0], body[-1].at[2]
        inside = [one for one in self.outline.calls if first <= one.call.at[0] and one.call.at[2] <= last and one.scope is scope]
        inside.sort(key=lambda site: (site.call.at[0], site.call.at[1], -site.call.at[2], -site.call.at[3]))
        for site in inside:
            if _terminal(site.call.func) not in _PLUMBING:
                yield Argument("", site.call.func, Where(site.scope, site.spot))


_PLUMBING = frozenset({"range", "len", "print", "super", "enumerate", "zip", "isinstance", "getattr", "tuple", "list", "dict"})


def _terminal(func: ir.Expr) -> str:
    if type(func) is ir.Attr:
        return func.name
    if type(func) is ir.Name:
        return func.id
    if type(func) is ir.Call and func.args and _terminal(func.func) == "partial":
        return _terminal(func.args[0])
    return ""


def _receiver(call: ir.Call) -> str:
    return render(call.func.obj) if type(call.func) is ir.Attr else ""


def _outside(name: str) -> bool:
    return name.startswith(("torch.", "transformer_engine.", "warp.", "tensordict.", "triton.", "graphlint."))


def _passed(name: str, index: int, given: list[Argument] | tuple[Argument, ...]) -> Iterator[Argument]:
    """The argument for the parameter `name` at `index`."""
    positional = [one for one in given if one.name in ("", "*")]
    if 0 <= index < len(positional) and all(one.name == "" for one in positional[: index + 1]):
        yield positional[index]
        return
    for one in given:
        if one.name == name:
            yield one


def _taken(names: tuple[str, ...], given: list[Argument] | tuple[Argument, ...]) -> tuple[Argument, ...]:
    """The arguments for the first parameters, by position or by name; for make_graphed_callables its usual names too."""
    out = [one for index, name in enumerate(names) for one in _passed(name, index, given)]
    if not out and names == ("callables",):
        out = [one for one in given if one.name in ("modules", "module")]
    return tuple(out)


__all__ = ["Context", "FileSearch", "Follow", "Found"]
