"""Calls that capture a callable they are given: compile calls, graphed callables, wrappers known or found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from graphlint import ir
from graphlint.regions import apis
from graphlint.regions.arguments import passed, taken
from graphlint.regions.compiled import Compiled
from graphlint.regions.constants import UNKNOWN, Constants
from graphlint.regions.contexts import expected_to_be_refused
from graphlint.regions.facts import Facts, Wrapper, says_so
from graphlint.regions.names import Argument, Callee, Names, Where, arguments
from graphlint.regions.outline import Outline
from graphlint.regions.scopes import CallSite, DecoratorSite


class Capture(NamedTuple):
    """A call that captures: kind, callee by name, what it captures, whether for certain, whether the backward too."""

    kind: str
    name: str
    values: tuple[Argument, ...] = ()
    certain: bool = True
    backward: bool = False


class Calls:
    """Judges the calls and decorators of one file."""

    def __init__(self, outline: Outline, names: Names, facts: Facts, follow: Callable[[str, str], str | None]) -> None:
        self.path = outline.summary.path
        self.names = names
        self.facts = facts
        self.follow = follow
        self.constants = Constants(outline, names)
        self.compiled = Compiled(outline, self.constants)

    def judge(self, site: CallSite) -> Capture | None:
        """What the call captures, or None."""
        where = Where(site.scope, site.spot)
        for callee in self.names.callees(site.call.func, where):
            found = self._judge(site, callee, where)
            if found is not None:
                return found
        return None

    def judge_decorator(self, site: DecoratorSite) -> Capture | None:
        """The same for a decorator without parentheses: what stands below it is captured."""
        for callee in self.names.callees(site.expr, Where(site.scope, site.spot)):
            verdict = self.compiled.verdict(callee, ())
            if verdict is not None and verdict.records:
                return Capture("compile", callee.name, certain=verdict.certain, backward=True)
            wrapper, known = self._wrapper(callee), apis.external(callee.name)
            if wrapper is not None and not self._off(wrapper, list(callee.bound)):
                return Capture(wrapper.kind, callee.name, certain=not wrapper.conditional, backward=wrapper.backward)
            if wrapper is None and known is not None:
                return Capture(known.kind, callee.name, backward=known.backward)
        return None

    def _judge(self, site: CallSite, callee: Callee, where: Where) -> Capture | None:
        given = arguments(site.call, where)
        verdict = self.compiled.verdict(callee, given)
        if verdict is not None:
            return self._compiled(site, callee, given, where, verdict.certain) if verdict.records else None
        every = [one for argument in (*callee.bound, *given) for one in self._spread(argument)]
        wrapper = self._wrapper(callee)
        if wrapper is not None:
            return self._wrapped(site, callee, wrapper, every)
        known = apis.external(callee.name)
        return self._known(site, callee, known, every) if known is not None else None

    def _wrapper(self, callee: Callee) -> Wrapper | None:
        canonical = self.facts.canonical(callee.name, self.path, self.follow)
        return self.facts.wrappers.get(canonical) if canonical is not None else None

    def _compiled(
        self, site: CallSite, callee: Callee, given: tuple[Argument, ...], where: Where, certain: bool
    ) -> Capture | None:
        values = taken(("model",), given)
        func = site.call.func
        if not values and not callee.name.startswith("torch."):
            if type(func) is ir.Attr and func.name == "compile":  # model.compile(mode=...)
                values = (Argument("", func.obj, where),)
            elif site.decorates is None and site.applied is None:
                return None  # a helper that is given settings only
        if any(type(one.value) is ir.Const for one in values):
            return None
        return Capture("compile", callee.name, values, certain, True)

    def _known(self, site: CallSite, callee: Callee, known: apis.External, given: list[Argument]) -> Capture | None:
        switch = self._switch(given)
        if switch is False or expected_to_be_refused(site.spot):
            return None
        values = taken(known.takes, given)
        if known is apis.GRAPHED:
            values = values or tuple(one for one in given if one.name in ("modules", "module"))
        elif not values and known.takes and not known.decorates:
            return None
        return Capture(known.kind, callee.name, values, switch is None, known.backward)

    def _wrapped(self, site: CallSite, callee: Callee, wrapper: Wrapper, given: list[Argument]) -> Capture | None:
        """A call of a capturing helper of the project."""
        if self._off(wrapper, given) or expected_to_be_refused(site.spot):
            return None
        values = tuple(one for param in wrapper.takes for one in passed(param.name, param.position, given))
        used = bool(values) or site.decorates is not None or site.applied is not None
        says = says_so(callee.name.rpartition(".")[2])
        if wrapper.decorates and not used and not says:
            return None
        if wrapper.takes and not wrapper.decorates and not values and not any(one.name in ("*", "**") for one in given):
            return None
        switched = [self._on(one) for switch in wrapper.switches for one in passed(switch.name, switch.position, given)]
        if wrapper.conditional and not switched and not says:
            return None
        certain = not wrapper.conditional and all(switched) and self._switch(given) is None
        return Capture(wrapper.kind, callee.name, values, certain, wrapper.backward)

    # -- settings

    def _off(self, wrapper: Wrapper, given: list[Argument]) -> bool:
        """Whether a flag of the helper, given or by default, says that nothing is captured."""
        if self._switch(given) is False:
            return True
        for switch in wrapper.switches:
            default = switch.default
            if not any(passed(switch.name, switch.position, given)) and isinstance(default, ir.Const):
                if default.value is False and not any(one.name == "**" for one in given):
                    return True
        return False

    def _on(self, argument: Argument) -> bool:
        """Whether an argument is the literal True."""
        return list(self.constants.of(argument.value, argument.where)) == [True]

    def _switch(self, given: Sequence[Argument]) -> bool | None:
        """False where a keyword about graphs is the literal False, True where a variable decides, else None."""
        decided: bool | None = None
        for one in given:
            if "graph" in one.name.lower() and one.name.lower().startswith(_SWITCH):
                literals = list(self.constants.of(one.value, one.where))
                if literals and all(literal is False for literal in literals):
                    return False
                if UNKNOWN in literals or False in literals:
                    decided = True
        return decided

    def _spread(self, argument: Argument) -> list[Argument]:
        """`**options` as the keywords it holds, where the dict can be seen."""
        if argument.name != "**":
            return [argument]
        entries = self.constants.entries(argument.value, argument.where)
        return [Argument(key, value, where) for key, value, where in entries] or [argument]


_SWITCH = ("use", "enable", "with", "cuda", "graph")
