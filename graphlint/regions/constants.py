"""Which literals an expression may be: through names, conditionals, defaults, test parameters, argparse and dicts."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint import ir
from graphlint.regions.names import Names, Where
from graphlint.regions.outline import Outline
from graphlint.regions.scopes import Binding, CallSite, Scope

UNKNOWN = object()
_DEPTH = 6


class Constants:
    """Literals in one file."""

    def __init__(self, outline: Outline, names: Names) -> None:
        self.outline = outline
        self.names = names
        self._options: dict[str, list[CallSite]] | None = None

    def of(self, expr: ir.Expr, where: Where, depth: int = 0) -> Iterator[object]:
        """Every literal that `expr` may be; `UNKNOWN` where something can't be seen."""
        if depth > _DEPTH:
            yield UNKNOWN
        elif type(expr) is ir.Const:
            yield expr.value if not expr.kind else UNKNOWN
        elif type(expr) is ir.IfElse:
            yield from self.of(expr.body, where, depth + 1)
            yield from self.of(expr.orelse, where, depth + 1)
        elif type(expr) is ir.Bool:
            for value in expr.values:
                yield from self.of(value, where, depth + 1)
        elif type(expr) is ir.Name:
            yield from self._name(expr, where, depth)
        elif type(expr) is ir.Attr:
            yield from self._attr(expr, where, depth)
        else:
            yield UNKNOWN

    def _name(self, expr: ir.Name, where: Where, depth: int) -> Iterator[object]:
        bindings = self.names.bindings(expr.id, where)
        if not bindings:
            yield UNKNOWN
        for binding in bindings:
            yield from self._bound(expr.id, binding, depth)

    def _bound(self, name: str, binding: Binding, depth: int) -> Iterator[object]:
        place = Where(binding.scope, binding.spot)
        if binding.kind == "value" and binding.value is not None:
            yield from self.of(binding.value, place, depth + 1)
        elif binding.kind == "loop" and type(binding.value) is ir.Sequence:
            for item in binding.value.items:
                yield from self.of(item, place, depth + 1)
        elif binding.kind == "param":
            if binding.value is not None:
                yield from self.of(binding.value, Where(binding.scope.parent or binding.scope, None), depth + 1)
            yield from self._parametrized(name, binding.scope, depth)
            yield UNKNOWN
        else:
            yield UNKNOWN

    def _parametrized(self, name: str, scope: Scope, depth: int) -> Iterator[object]:
        """The values that `pytest.mark.parametrize` hands to a test, on the function or on a class around it."""
        for around in scope.chain():
            node = around.func or around.cls
            if node is None or around.parent is None:
                continue
            for decorator in node.decorators:
                if isinstance(decorator, ir.Call) and isinstance(decorator.func, ir.Attr):
                    if decorator.func.name == "parametrize" and len(decorator.args) >= 2:
                        yield from self._column(name, decorator, Where(around.parent, around.spot), depth)

    def _column(self, name: str, call: ir.Call, where: Where, depth: int) -> Iterator[object]:
        heads = [str(head) for head in self.of(call.args[0], where, depth + 1)]
        if isinstance(call.args[0], ir.Sequence):
            heads = [str(next(self.of(item, where, depth + 1))) for item in call.args[0].items]
        elif len(heads) == 1:
            heads = [one.strip() for one in heads[0].split(",")]
        rows = [value for value, _ in self.names.values(call.args[1], where)]
        if name not in heads or not rows or not isinstance(rows[0], ir.Sequence):
            return
        for row in rows[0].items:
            cells: tuple[ir.Expr, ...] = (row,)
            if isinstance(row, ir.Call) and isinstance(row.func, ir.Attr) and row.func.name == "param":
                cells = row.args
            elif len(heads) > 1 and isinstance(row, ir.Sequence):
                cells = row.items
            if heads.index(name) < len(cells):
                yield from self.of(cells[heads.index(name)], where, depth + 1)

    def _attr(self, expr: ir.Attr, where: Where, depth: int) -> Iterator[object]:
        values = [(value, place) for value, place in self.names.values(expr, where) if value is not expr]
        for value, place in values:
            yield from self.of(value, place, depth + 1)
        if not values:
            yield from self._option(expr.name, depth)
            yield from self._field(expr, where, depth)
            yield UNKNOWN

    def _option(self, name: str, depth: int) -> Iterator[object]:
        """`args.name`: the default and the choices of an argparse option of that name in this file."""
        for site in self._argparse().get(name, ()):
            where = Where(site.scope, site.spot)
            for word in site.call.keywords:
                if word.name == "default":
                    yield from self.of(word.value, where, depth + 1)
                elif word.name == "choices" and isinstance(word.value, ir.Sequence):
                    for item in word.value.items:
                        yield from self.of(item, where, depth + 1)

    def _argparse(self) -> dict[str, list[CallSite]]:
        if self._options is None:
            self._options = {}
            for site in self.outline.calls:
                func, args = site.call.func, site.call.args
                if type(func) is ir.Attr and func.name == "add_argument" and args and type(args[-1]) is ir.Const:
                    option = str(args[-1].value).lstrip("-").replace("-", "_")
                    self._options.setdefault(option, []).append(site)
        return self._options

    def _field(self, expr: ir.Attr, where: Where, depth: int) -> Iterator[object]:
        """`config.name`: the default of that field where the class of `config` is in this file."""
        for name in self.names.dotted(expr.obj, where):
            inner = name.removesuffix("()").removeprefix(self.outline.module + ".")
            for scope in self.outline.scopes:
                if name.endswith("()") and scope.kind == "class" and scope.qualname == inner:
                    for binding in scope.binds.get(expr.name, ()):
                        yield from self._bound(expr.name, binding, depth + 1)

    # -- dicts

    def entries(self, expr: ir.Expr, where: Where, depth: int = 0) -> Iterator[tuple[str, ir.Expr, Where]]:
        """The entries that the dict `expr` may have, with what is stored into it later in the scope."""
        if depth > _DEPTH:
            return
        if type(expr) is ir.DictDisplay:
            for key, value in zip(expr.keys, expr.values, strict=True):
                if key is None:
                    yield from self.entries(value, where, depth + 1)
                elif type(key) is ir.Const and isinstance(key.value, str):
                    yield key.value, value, where
        elif type(expr) is ir.Call and "dict" in self.names.dotted(expr.func, where):
            for word in expr.keywords:
                if word.name is None:
                    yield from self.entries(word.value, where, depth + 1)
                else:
                    yield word.name, word.value, where
        elif type(expr) is ir.IfElse:
            yield from self.entries(expr.body, where, depth + 1)
            yield from self.entries(expr.orelse, where, depth + 1)
        elif type(expr) is ir.Binary and expr.op == "|":
            yield from self.entries(expr.left, where, depth + 1)
            yield from self.entries(expr.right, where, depth + 1)
        elif type(expr) is ir.Name:
            yield from self._stored(expr.id, where)
            for value, place in self.names.values(expr, where):
                if value is not expr:
                    yield from self.entries(value, place, depth + 1)
        elif type(expr) is ir.Attr:
            for value, place in self.names.values(expr, where):
                if value is not expr:
                    yield from self.entries(value, place, depth + 1)

    def _stored(self, name: str, where: Where) -> Iterator[tuple[str, ir.Expr, Where]]:
        for scope in where.scope.chain():
            for key, value, spot in scope.stores.get(name, ()):
                yield key, value, Where(scope, spot)
            if name in scope.binds:
                return
