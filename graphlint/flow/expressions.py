"""Expressions -> values. One method per expression of `ir.py`; facts that a check may want are recorded on the way."""

from __future__ import annotations

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow.operators import Operators
from graphlint.flow.values import (
    NO,
    REST,
    UNKNOWN,
    Bound,
    External,
    Host,
    Items,
    Mapping,
    ModuleValue,
    Partial,
    Scope,
    Symbol,
    Tensor,
    Unknown,
    Value,
    Wrapped,
    const,
    join,
)
from graphlint.regions.region import Region


class Expressions(Operators):
    """Names, calls, displays, comprehensions."""

    # -- names

    def _Name(self, node: ir.Name) -> Value:
        scope: Scope | None = self.frame.scope
        name = node.id
        if scope is not None and name in scope.redirect:
            scope = scope.redirect[name]
        while scope is not None:
            value = scope.slots.get(name)
            if value is not None:
                return self.read(scope, name, value, node.at)
            if scope.outer is None:
                break
            scope = scope.outer
        found = self.global_name(scope, name) if scope is not None else None
        if found is not None and scope is not None:
            return self.read(scope, name, found, node.at)
        return Symbol(f"builtins.{name}") if name in BUILTINS else Unknown(name)

    def _Const(self, node: ir.Const) -> Value:
        if node.kind:
            return Host(node.kind)
        return const(node.value)

    # -- attributes, calls

    def _Attr(self, node: ir.Attr) -> Value:
        obj = self.eval(node.obj)
        return self.attribute(obj, node.name, node.at)

    def _Call(self, node: ir.Call) -> Value:
        func = self.eval(node.func)
        args: list[Value] = []
        keywords: dict[str, Value] = {}
        for arg in node.args:
            if isinstance(arg, ir.Star):
                spread = self.eval(arg.value)
                if isinstance(spread, Items) and spread.exact:
                    args.extend(self.read(spread, index, one, arg.at) for index, one in enumerate(spread.values))
                else:
                    args.append(Bound(spread, "*"))
            else:
                args.append(self.eval(arg))
        for word in node.keywords:
            value = self.eval(word.value)
            if word.name is not None:
                keywords[word.name] = value
            elif isinstance(value, Mapping):
                for key, one in list(value.slots.items()):
                    if key != REST:
                        keywords[str(key)] = self.read(value, key, one, word.value.at)
                if REST in value.slots:
                    keywords["**"] = value
            else:
                keywords["**"] = value
        result = self.call(func, args, keywords, node.at)
        if self.known_regions and not self.open:
            region = self.known_regions.get((self.frame.module.path, node.at))
            if region is not None and region.callables:
                self.capture_callables(region, node.at)
        return result

    def capture_callables(self, region: Region, at: ir.Span) -> None:
        """A wrapper that captures what it is given, where the walk itself did not see it capture."""
        raise NotImplementedError

    # -- displays

    def _Sequence(self, node: ir.Sequence) -> Value:
        values: list[Value] = []
        exact = True
        for item in node.items:
            if isinstance(item, ir.Star):
                spread = self.eval(item.value)
                if isinstance(spread, Items) and spread.exact:
                    values.extend(spread.values)
                else:
                    exact = False
                    values.extend(spread.values if isinstance(spread, Items) else [UNKNOWN])
            else:
                values.append(self.eval(item))
        return self.items(node.kind, values, node.at, exact)

    def _DictDisplay(self, node: ir.DictDisplay) -> Value:
        made = Mapping(self.site(node.at), self.tick())
        made.made_in = self.capture
        for key, value in zip(node.keys, node.values, strict=True):
            item = self.eval(value)
            if key is None:
                if isinstance(item, Mapping):
                    made.slots.update(item.slots)
                else:
                    made.slots[REST] = UNKNOWN
                continue
            name = self.key(self.eval(key))
            if name is NO:
                made.slots[REST] = join(made.slots[REST], item) if REST in made.slots else item
            else:
                made.slots[name] = item
        return made

    def _Comprehension(self, node: ir.Comprehension) -> Value:
        values: list[Value] = []
        keys: list[Value] = []
        exact = self._rounds(node, 0, values, keys)
        if node.kind == "dict":
            mapping = Mapping(self.site(node.at), self.tick())
            for key, value in zip(keys, values, strict=True):
                name = self.key(key)
                mapping.slots[REST if name is NO or not exact else name] = value
            return mapping
        if not values:
            return self.items("list", [], node.at)
        made = self.items("set" if node.kind == "set" else "list", values, node.at, exact)
        if self.captures and not self.open and any(isinstance(one, Tensor) for one in values):
            self.happen(ev.MutateEvent, node.item.at, made, "collect", tuple(values))
        return made

    def _rounds(self, node: ir.Comprehension, level: int, values: list[Value], keys: list[Value]) -> bool:
        """Runs the loops of a comprehension from `level` inwards; whether the result's length is known."""
        if level == len(node.loops):
            if node.kind == "dict":
                keys.append(self.eval(node.item))
                values.append(self.eval(node.value) if node.value is not None else UNKNOWN)
            else:
                values.append(self.eval(node.item))
            return True
        loop = node.loops[level]
        source = self.eval(loop.source)
        self.happen(ev.LoopEvent, loop.source.at, source)
        items = self.iterate(source, loop.source.at)
        exact = (isinstance(source, Items) and source.exact) or self.counted(source, len(items))
        self.frame.loops += 1
        for item in items:
            self.assign(loop.target, item, loop.target.at)
            wanted: bool | None = True
            for condition in loop.conditions:
                value = self.eval(condition)
                self.happen(ev.TestEvent, condition.at, "comprehension", value)
                known = self.truth(value)
                wanted = False if known is False else (None if known is None else wanted)
                if wanted is False:
                    break
            if wanted is None:
                exact = False
            if wanted is not False:
                exact = self._rounds(node, level + 1, values, keys) and exact
        self.frame.loops -= 1
        return exact

    @staticmethod
    def counted(source: Value, taken: int) -> bool:
        """Whether `source` is a `range` of which all `taken` numbers were walked."""
        if not (
            isinstance(source, External)
            and source.name == "range"
            and all(isinstance(one, Host) and isinstance(one.value, int) for one in source.args)
        ):
            return False
        try:
            return len(range(*[one.value for one in source.args])) == taken  # type: ignore[attr-defined]
        except (TypeError, ValueError, OverflowError):
            return False

    def _Format(self, node: ir.Format) -> Value:
        parts: list[str] = list(node.texts[:1])
        for part, text in zip(node.values, node.texts[1:] or [""] * len(node.values), strict=True):
            value = self.eval(part)
            self.happen(ev.FormatEvent, part.at, value)
            if isinstance(value, Host) and value.known and value.kind in ("str", "int", "bool"):
                parts += [str(value.value), text]
            else:
                parts = []
        whole = len(parts) == 2 * len(node.values) + 1 and sum(map(len, parts)) < 200
        return const("".join(parts)) if whole else Host("str")

    def _Star(self, node: ir.Star) -> Value:
        return self.eval(node.value)

    def _Await(self, node: ir.Await) -> Value:
        return self.eval(node.value)

    def _Lambda(self, node: ir.Lambda) -> Value:
        return self.closure(node.func, node.at)

    def _Walrus(self, node: ir.Walrus) -> Value:
        value = self.eval(node.value)
        self.assign(node.target, value, node.at)
        return value

    def _Yield(self, node: ir.Yield) -> Value:
        value = self.maybe(node.value)
        frame = self.frame
        if node.spread:
            frame.yields.extend(self.iterate(value, node.at))
            return UNKNOWN
        if callable(frame.on_yield):
            frame.on_yield(value)
        else:
            frame.yields.append(value)
        return UNKNOWN


BUILTINS = frozenset(dir(__import__("builtins")))

__all__ = ["BUILTINS", "Expressions", "ModuleValue", "Partial", "Wrapped"]
