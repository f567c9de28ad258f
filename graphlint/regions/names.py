"""What an expression is called: dotted names through imports, aliases, attributes of `self` and `functools.partial`.

A name may mean several things (`ctx = torch.cuda.graph(g) if use else nullcontext()`), so the answer is a tuple of
possibilities. `?` begins a name whose start is unknown (`?device_module.graph`), `()` stands for the result of a call
(`torch.cuda.CUDAGraph().capture_begin`). Depth is bounded, so that a name bound to itself ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphlint import ir
from graphlint.regions.outline import Outline
from graphlint.regions.scopes import Binding, Scope, Spot, self_class

_DEPTH = 7
_MANY = 8  # more possibilities than this say nothing


class Where(NamedTuple):
    """The scope and the statement from which a name is read."""

    scope: Scope
    spot: Spot | None


class Argument(NamedTuple):
    """An argument and the place where it is written; `name` is "" for a positional one, "*" or "**" for a spread."""

    name: str
    value: ir.Expr
    where: Where


class Callee(NamedTuple):
    """What a call calls, and what partials have already filled in."""

    name: str
    bound: tuple[Argument, ...] = ()


class Names:
    """Resolves names in one file."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self._memo: dict[tuple[int, int], tuple[str, ...]] = {}

    def dotted(self, expr: ir.Expr, where: Where, depth: int = 0) -> tuple[str, ...]:
        """Every dotted name that `expr` may mean."""
        key = (id(expr), id(where.spot))
        found = self._memo.get(key)
        if found is None:
            found = tuple(dict.fromkeys(self._dotted(expr, where, depth)))[:_MANY]
            if depth == 0:
                self._memo[key] = found
        return found

    def _dotted(self, expr: ir.Expr, where: Where, depth: int) -> Iterator[str]:
        if depth > _DEPTH:
            yield "?"
        elif type(expr) is ir.Name:
            yield from self._name(expr, where, depth)
        elif type(expr) is ir.Attr:
            yield from self._attr(expr, where, depth)
        elif type(expr) is ir.Call:
            yield from self._result(expr, where, depth)
        elif type(expr) is ir.IfElse:
            yield from self.dotted(expr.body, where, depth + 1)
            yield from self.dotted(expr.orelse, where, depth + 1)
        elif type(expr) is ir.Bool:
            for value in expr.values:
                yield from self.dotted(value, where, depth + 1)
        elif type(expr) is ir.Walrus or type(expr) is ir.Await or type(expr) is ir.Star:
            yield from self.dotted(expr.value, where, depth + 1)
        elif type(expr) is ir.Subscript:
            yield from (name + "[]" for name in self.dotted(expr.obj, where, depth + 1))
        else:
            yield "?"

    def _name(self, expr: ir.Name, where: Where, depth: int) -> Iterator[str]:
        owner = self_class(expr.id, where.scope)
        if owner is not None:
            yield f"{self.outline.module}.{owner.qualname}()"
            return
        bindings = self.bindings(expr.id, where)
        if not bindings:
            yield expr.id if expr.id in _BUILTINS else f"?{expr.id}"
        for binding in bindings:
            yield from self._meaning(expr.id, binding, depth)

    def _meaning(self, name: str, binding: Binding, depth: int) -> Iterator[str]:
        if binding.kind == "import":
            yield binding.dotted
        elif binding.kind in ("function", "class") and isinstance(binding.func, (ir.Function, ir.Class)):
            yield f"{self.outline.module}.{binding.func.qualname}"
        elif binding.kind == "value" and binding.value is not None:
            yield from self.dotted(binding.value, Where(binding.scope, binding.spot), depth + 1)
        elif binding.kind == "param" and isinstance(binding.func, ir.Param) and binding.func.annotation is not None:
            yield from self._annotated(name, binding.func.annotation, binding, depth)
        else:
            yield f"?{name}"

    def _annotated(self, name: str, annotation: ir.Expr, binding: Binding, depth: int) -> Iterator[str]:
        """A parameter annotated with a class is an instance of it; any other annotation leaves it unknown."""
        if type(annotation) is ir.Name or type(annotation) is ir.Attr:
            above = binding.scope.parent or binding.scope
            for found in self.dotted(annotation, Where(above, binding.scope.spot), depth + 1):
                if (
                    found[:1] != "?"
                    and found.rpartition(".")[2][:1].isupper()
                    and found.rpartition(".")[2] not in _VAGUE
                ):
                    yield found + "()"
                    return
        yield f"?{name}"

    def _attr(self, expr: ir.Attr, where: Where, depth: int) -> Iterator[str]:
        if type(expr.obj) is ir.Name:
            owner = self_class(expr.obj.id, where.scope)
            if owner is not None:
                yield from self._self_attr(owner, expr, depth)
                return
        for base in self.dotted(expr.obj, where, depth + 1):
            yield f"{base}.{expr.name}"

    def _self_attr(self, owner: Scope, expr: ir.Attr, depth: int) -> Iterator[str]:
        values = owner.attrs.get(expr.name, []) + [one for one in owner.binds.get(expr.name, ()) if one.kind == "value"]
        found = False
        for binding in values:
            if binding.value is None or (type(binding.value) is ir.Const and binding.value.value is None):
                continue
            for name in self.dotted(binding.value, Where(binding.scope, binding.spot), depth + 1):
                if name != "?" and not name.startswith("?self"):
                    found = True
                    yield name
        if not found:
            yield (
                f"{self.outline.module}.{owner.qualname}.{expr.name}"
                if expr.name in owner.binds
                else f"?self.{expr.name}"
            )

    def _result(self, expr: ir.Call, where: Where, depth: int) -> Iterator[str]:
        for name in self.dotted(expr.func, where, depth + 1):
            if name == "getattr" and len(expr.args) >= 2:
                yield from self._getattr(expr, where, depth)
            elif name in _PARTIALS and expr.args:
                yield from self.dotted(expr.args[0], where, depth + 1)
            elif name in _DEVICE_MODULES:
                yield "torch.cuda"
            elif name == "super":
                yield "super()"
            elif name in _TRANSPARENT and expr.args:
                yield from self.dotted(expr.args[-1], where, depth + 1)
            else:
                yield name + "()"

    def _getattr(self, expr: ir.Call, where: Where, depth: int) -> Iterator[str]:
        name = expr.args[1]
        if type(name) is ir.Const and isinstance(name.value, str):
            yield from (f"{base}.{name.value}" for base in self.dotted(expr.args[0], where, depth + 1))
        elif self.dotted(expr.args[0], where, depth + 1) == ("torch",):
            yield "torch.cuda"  # getattr(torch, device_type): some device module
        else:
            yield "?"

    # -- bindings

    def bindings(self, name: str, where: Where) -> list[Binding]:
        """What may have bound `name` when the statement at `where` runs, latest first."""
        for scope in where.scope.chain():
            if scope.kind == "class" and scope is not where.scope:
                continue
            if name in scope.outside:
                scope = scope.outside[name]
            found = scope.binds.get(name)
            if found:
                return (
                    _reaching(found, where)
                    if scope is where.scope and where.spot is not None
                    else list(reversed(found))
                )
        return []

    def callees(self, func: ir.Expr, where: Where, depth: int = 0) -> list[Callee]:
        """What calling `func` calls; arguments that a `functools.partial` has filled in travel along."""
        if depth > _DEPTH:
            return []
        if type(func) is ir.Call:
            names = self.dotted(func.func, where)
            if any(name in _PARTIALS for name in names) and func.args:
                bound = arguments(func, where)[1:]
                inner = self.callees(func.args[0], where, depth + 1)
                return [Callee(one.name, one.bound + bound) for one in inner]
        if type(func) is ir.IfElse:
            return self.callees(func.body, where, depth + 1) + self.callees(func.orelse, where, depth + 1)
        source = self._bound_to(func, where)
        if source:
            return [one for value, place in source for one in self.callees(value, place, depth + 1)]
        return [Callee(name) for name in self.dotted(func, where)]

    def _bound_to(self, func: ir.Expr, where: Where) -> list[tuple[ir.Expr, Where]]:
        """The partials and conditionals that a plain name or `self.name` holds; empty when it is anything else."""
        bindings: list[Binding] = []
        if type(func) is ir.Name and self_class(func.id, where.scope) is None:
            bindings = self.bindings(func.id, where)
        elif type(func) is ir.Attr and type(func.obj) is ir.Name:
            owner = self_class(func.obj.id, where.scope)
            bindings = owner.attrs.get(func.name, []) if owner is not None else []
        if not any(one.kind == "value" and type(one.value) in (ir.Call, ir.IfElse) for one in bindings):
            return []
        if any(one.kind not in ("value", "opaque") for one in bindings):
            return []
        return [(one.value, Where(one.scope, one.spot)) for one in bindings if one.value is not None]

    def values(self, expr: ir.Expr, where: Where, depth: int = 0) -> Iterator[tuple[ir.Expr, Where]]:
        """The expressions that a name, a `self` attribute or a conditional may hold; any other expression itself."""
        if depth > _DEPTH:
            return
        if type(expr) is ir.IfElse:
            yield from self.values(expr.body, where, depth + 1)
            yield from self.values(expr.orelse, where, depth + 1)
            return
        if type(expr) is ir.Bool:
            for value in expr.values:
                yield from self.values(value, where, depth + 1)
            return
        if type(expr) is ir.Walrus:
            yield from self.values(expr.value, where, depth + 1)
            return
        bindings: list[Binding] = []
        if type(expr) is ir.Name and self_class(expr.id, where.scope) is None:
            bindings = self.bindings(expr.id, where)
        elif type(expr) is ir.Attr and type(expr.obj) is ir.Name:
            owner = self_class(expr.obj.id, where.scope)
            if owner is not None:
                bindings = owner.attrs.get(expr.name, []) + [
                    b for b in owner.binds.get(expr.name, ()) if b.kind == "value"
                ]
        held = [one for one in bindings if one.kind == "value" and one.value is not None]
        if not held:
            yield expr, where
        for one in held:
            if one.value is not None:
                yield from self.values(one.value, Where(one.scope, one.spot), depth + 1)


def _reaching(found: list[Binding], where: Where) -> list[Binding]:
    """The bindings that may reach `where`, latest first: back to one in a block that runs whenever `where` runs."""
    assert where.spot is not None
    row = where.spot.stmt.at[0]
    own = {id(spot.block): spot.index for spot in where.spot.around()}
    before = [one for one in found if one.spot is None or one.row < row]
    if not before:
        return list(reversed(found))
    out: list[Binding] = []
    for one in reversed(before):
        out.append(one)
        if one.spot is None or id(one.spot.block) in own:
            break
    return out


def arguments(call: ir.Call, where: Where) -> tuple[Argument, ...]:
    """The arguments of a call, in order."""
    positional = [Argument("*" if type(arg) is ir.Star else "", arg, where) for arg in call.args]
    return tuple(positional + [Argument(word.name or "**", word.value, where) for word in call.keywords])


_PARTIALS = frozenset({"functools.partial", "partial"})
_TRANSPARENT = frozenset({"typing.cast", "typing_extensions.cast"})
_DEVICE_MODULES = frozenset({"torch.get_device_module", "torch.utils.backend_registration._get_device_module"})
_BUILTINS = frozenset(
    {"getattr", "super", "dict", "list", "tuple", "isinstance", "hasattr", "setattr", "type", "partial"}
)
_VAGUE = frozenset(
    {"Any", "Optional", "Union", "Callable", "Literal", "Type", "Sequence", "Iterable", "List", "Dict", "Tuple"}
)
