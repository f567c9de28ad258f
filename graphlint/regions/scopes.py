"""Nouns of the search in one file: where a statement stands, what binds a name, where calls and `with` blocks are.

A `Spot` is a statement in its block, linked to the blocks around it up to the function's own; "what runs after this
line until the capture ends" is then a walk along spots.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphlint import ir

Block = tuple[ir.Stmt, ...]


class Spot:
    """Where a statement stands: `block[index]`, inside the statement of `outer` (None: directly in the function)."""

    __slots__ = ("block", "index", "outer")

    def __init__(self, block: Block, index: int, outer: Spot | None) -> None:
        self.block = block
        self.index = index
        self.outer = outer

    @property
    def stmt(self) -> ir.Stmt:
        return self.block[self.index]

    @property
    def rest(self) -> Block:
        """The statements after this one in its block."""
        return self.block[self.index + 1 :]

    def around(self) -> Iterator[Spot]:
        """This spot, then the spots of the statements around it, inside the same function."""
        spot: Spot | None = self
        while spot is not None:
            yield spot
            spot = spot.outer


class Binding:
    """One thing that gives a name its value. `kind`: import, value, param, loop, function, class, opaque."""

    __slots__ = ("dotted", "func", "kind", "row", "scope", "spot", "value")

    def __init__(
        self,
        kind: str,
        scope: Scope,
        spot: Spot | None,
        row: int,
        value: ir.Expr | None = None,
        dotted: str = "",
        func: ir.Function | ir.Class | ir.Param | None = None,
    ) -> None:
        self.kind = kind
        self.scope = scope
        self.spot = spot
        self.row = row
        self.value = value
        self.dotted = dotted
        self.func = func


class Scope:
    """A module, class, function or lambda. `stores` are `name["key"] = value` and `name.update(...)` seen in it."""

    __slots__ = (
        "attrs",
        "binds",
        "calls",
        "cls",
        "func",
        "kind",
        "outside",
        "parent",
        "qualname",
        "returns",
        "spot",
        "stores",
    )

    def __init__(self, kind: str, qualname: str, parent: Scope | None, spot: Spot | None) -> None:
        self.kind = kind
        self.qualname = qualname
        self.parent = parent
        self.spot = spot  # where its definition stands
        self.func: ir.Function | None = None
        self.cls: ir.Class | None = None
        self.binds: dict[str, list[Binding]] = {}
        self.attrs: dict[str, list[Binding]] = {}  # of a class: `self.name = value` in any method
        self.stores: dict[str, list[tuple[str, ir.Expr, Spot]]] = {}
        self.outside: dict[str, Scope] = {}  # names declared global or nonlocal
        self.returns: list[tuple[ir.Expr, Spot]] = []
        self.calls: list[CallSite] = []

    def function(self) -> Scope | None:
        """The innermost function around (or this scope itself); a lambda belongs to the function it stands in."""
        scope: Scope | None = self
        while scope is not None and (scope.kind != "function" or scope.func is None or scope.func.name == "<lambda>"):
            scope = scope.parent
        return scope

    def owner_class(self) -> Scope | None:
        """The class whose method this scope is, or stands in."""
        scope: Scope | None = self
        while scope is not None and scope.kind != "class":
            scope = scope.parent
        return scope

    def chain(self) -> Iterator[Scope]:
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


class CallSite:
    """A call: where it stands, what it decorates, and the call it is applied in (`compile(mode=m)(fn)`)."""

    __slots__ = ("applied", "call", "decorates", "scope", "spot")

    def __init__(self, call: ir.Call, scope: Scope, spot: Spot) -> None:
        self.call = call
        self.scope = scope
        self.spot = spot
        self.decorates: ir.Function | ir.Class | None = None
        self.applied: ir.Call | None = None


class DecoratorSite:
    """A decorator without parentheses."""

    __slots__ = ("decorates", "expr", "scope", "spot")

    def __init__(self, expr: ir.Expr, decorates: ir.Function | ir.Class, scope: Scope, spot: Spot) -> None:
        self.expr = expr
        self.decorates = decorates
        self.scope = scope
        self.spot = spot


class WithSite:
    __slots__ = ("scope", "spot", "stmt")

    def __init__(self, stmt: ir.With, scope: Scope, spot: Spot) -> None:
        self.stmt = stmt
        self.scope = scope
        self.spot = spot


def self_class(name: str, scope: Scope) -> Scope | None:
    """The class whose instance `name` is: the first parameter of a method, seen from that method or inside it."""
    for one in scope.chain():
        if one.kind != "function" or one.func is None:
            continue
        if name in one.binds:
            params = one.func.params
            is_method = one.parent is not None and one.parent.kind == "class"
            return one.parent if is_method and params and params[0].name == name else None
    return None
