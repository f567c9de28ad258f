"""One file, indexed for the search: scopes with what binds each name, and every call with the place where it stands.

Nothing is resolved here; `names.py` does that, and only for the few calls that may capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphlint import ir
from graphlint.regions.scopes import Binding, Block, CallSite, DecoratorSite, Scope, Spot, WithSite, self_class


class Outline:
    """The index of one summary."""

    def __init__(self, summary: ir.Summary) -> None:
        self.summary = summary
        self.module = summary.module
        self.package = summary.module if summary.is_package else summary.module.rpartition(".")[0]
        self.top = Scope("module", "", None, None)
        self.scopes: list[Scope] = [self.top]
        self.calls: list[CallSite] = []
        self.withs: list[WithSite] = []
        self.decorators: list[DecoratorSite] = []
        self.tests: list[tuple[ir.Expr, Scope, Spot]] = []  # what `if` and `while` ask
        self.by_node: dict[int, Scope] = {}  # id of a Function or Class -> its scope
        self._walk(summary.body, self.top, None)

    def scope_of(self, node: ir.Function | ir.Class) -> Scope | None:
        return self.by_node.get(id(node))

    # -- statements

    def _walk(self, block: Block, scope: Scope, outer: Spot | None) -> None:
        for index, stmt in enumerate(block):
            spot = Spot(block, index, outer)
            handler = _HANDLERS.get(type(stmt))
            if handler is not None:
                handler(self, stmt, scope, spot)

    def _assign(self, stmt: ir.Assign, scope: Scope, spot: Spot) -> None:
        if stmt.value is not None:
            self._expr(stmt.value, scope, spot)
        for target in stmt.targets:
            self._target(target, stmt.value, scope, spot)
            if type(target) is ir.Subscript:
                self._expr(target, scope, spot)

    def _target(self, target: ir.Expr, value: ir.Expr | None, scope: Scope, spot: Spot) -> None:
        row = spot.stmt.at[0]
        if type(target) is ir.Name:
            kind = "value" if value is not None else "opaque"
            _bind(scope, target.id, Binding(kind, scope, spot, row, value))
        elif type(target) is ir.Attr and type(target.obj) is ir.Name:
            owner = self_class(target.obj.id, scope)
            if owner is not None and value is not None:
                owner.attrs.setdefault(target.name, []).append(Binding("value", scope, spot, row, value))
        elif type(target) is ir.Subscript and type(target.obj) is ir.Name and type(target.index) is ir.Const:
            if isinstance(target.index.value, str) and value is not None:
                scope.stores.setdefault(target.obj.id, []).append((target.index.value, value, spot))
        elif type(target) is ir.Sequence:
            paired = type(value) is ir.Sequence and len(value.items) == len(target.items)
            values = value.items if paired and type(value) is ir.Sequence else (None,) * len(target.items)
            for item, part in zip(target.items, values, strict=True):
                self._target(item, part, scope, spot)
        elif type(target) is ir.Star:
            self._target(target.value, None, scope, spot)

    def _augment(self, stmt: ir.AugAssign, scope: Scope, spot: Spot) -> None:
        self._expr(stmt.value, scope, spot)

    def _do(self, stmt: ir.Do, scope: Scope, spot: Spot) -> None:
        self._expr(stmt.value, scope, spot)
        call = stmt.value
        if type(call) is ir.Call and type(call.func) is ir.Attr and call.func.name == "update":
            if type(call.func.obj) is ir.Name:
                stores = scope.stores.setdefault(call.func.obj.id, [])
                stores += [(word.name, word.value, spot) for word in call.keywords if word.name]

    def _if(self, stmt: ir.If | ir.While, scope: Scope, spot: Spot) -> None:
        while True:
            self.tests.append((stmt.test, scope, spot))
            self._expr(stmt.test, scope, spot)
            self._walk(stmt.body, scope, spot)
            if len(stmt.orelse) != 1 or not isinstance(stmt.orelse[0], ir.If):
                break
            spot = Spot(stmt.orelse, 0, spot)  # an `elif`: generated code has thousands of them
            stmt = stmt.orelse[0]
        self._walk(stmt.orelse, scope, spot)

    def _for(self, stmt: ir.For, scope: Scope, spot: Spot) -> None:
        self._expr(stmt.source, scope, spot)
        if type(stmt.target) is ir.Name:
            _bind(scope, stmt.target.id, Binding("loop", scope, spot, stmt.at[0], stmt.source))
        elif type(stmt.target) is ir.Sequence:
            for item in stmt.target.items:
                if type(item) is ir.Name:
                    _bind(scope, item.id, Binding("loop", scope, spot, stmt.at[0], stmt.source))
                else:
                    self._target(item, None, scope, spot)
        self._walk(stmt.body, scope, spot)
        self._walk(stmt.orelse, scope, spot)

    def _with(self, stmt: ir.With, scope: Scope, spot: Spot) -> None:
        self.withs.append(WithSite(stmt, scope, spot))
        for item in stmt.items:
            self._expr(item.context, scope, spot)
            if item.target is not None:
                self._target(item.target, None, scope, spot)
        self._walk(stmt.body, scope, spot)

    def _return(self, stmt: ir.Return, scope: Scope, spot: Spot) -> None:
        if stmt.value is not None:
            self._expr(stmt.value, scope, spot)
            scope.returns.append((stmt.value, spot))

    def _raise(self, stmt: ir.Raise, scope: Scope, spot: Spot) -> None:
        if stmt.value is not None:
            self._expr(stmt.value, scope, spot)

    def _try(self, stmt: ir.Try, scope: Scope, spot: Spot) -> None:
        self._walk(stmt.body, scope, spot)
        for handler in stmt.handlers:
            self._walk(handler.body, scope, spot)
        self._walk(stmt.orelse, scope, spot)
        self._walk(stmt.final, scope, spot)

    def _assert(self, stmt: ir.Assert, scope: Scope, spot: Spot) -> None:
        self._expr(stmt.test, scope, spot)

    def _scope(self, stmt: ir.Scope, scope: Scope, spot: Spot) -> None:
        for name in stmt.names:
            target = self.top
            if stmt.kind == "nonlocal":
                outer = [
                    one for one in scope.chain() if one is not scope and one.kind == "function" and name in one.binds
                ]
                target = outer[0] if outer else self.top
            scope.outside[name] = target

    def _import(self, stmt: ir.Import, scope: Scope, spot: Spot) -> None:
        if stmt.symbol == "*":
            return
        module = stmt.module
        if stmt.level:
            parts = self.package.split(".") if self.package else []
            if stmt.level > 1:
                parts = parts[: len(parts) - (stmt.level - 1)]
            module = ".".join([*parts, stmt.module] if stmt.module else parts)
        if stmt.symbol:
            dotted = f"{module}.{stmt.symbol}"
        else:
            dotted = stmt.name if stmt.name == stmt.module.split(".")[0] else stmt.module
        _bind(scope, stmt.name, Binding("import", scope, spot, stmt.at[0], dotted=dotted))

    def _match(self, stmt: ir.Match, scope: Scope, spot: Spot) -> None:
        self._expr(stmt.subject, scope, spot)
        for case in stmt.cases:
            self._walk(case.body, scope, spot)

    def _define(self, stmt: ir.Define, scope: Scope, spot: Spot) -> None:
        func = stmt.func
        _bind(scope, func.name, Binding("function", scope, spot, stmt.at[0], func=func))
        self._decorate(func.decorators, func, scope, spot)
        self._function(func, scope, spot)

    def _function(self, func: ir.Function, scope: Scope, spot: Spot) -> Scope:
        made = Scope("function", func.qualname, scope, spot)
        made.func = func
        self.scopes.append(made)
        self.by_node[id(func)] = made
        for param in func.params:
            made.binds[param.name] = [Binding("param", made, None, func.at[0], param.default, func=param)]
            if param.default is not None:
                self._expr(param.default, scope, spot)
        self._walk(func.body, made, None)
        return made

    def _class(self, stmt: ir.DefineClass, scope: Scope, spot: Spot) -> None:
        cls = stmt.cls
        _bind(scope, cls.name, Binding("class", scope, spot, stmt.at[0], func=cls))
        self._decorate(cls.decorators, cls, scope, spot)
        made = Scope("class", cls.qualname, scope, spot)
        made.cls = cls
        self.scopes.append(made)
        self.by_node[id(cls)] = made
        for base in cls.bases:
            self._expr(base, scope, spot)
        self._walk(cls.body, made, None)

    def _decorate(
        self, decorators: tuple[ir.Expr, ...], node: ir.Function | ir.Class, scope: Scope, spot: Spot
    ) -> None:
        for decorator in decorators:
            start = len(self.calls)
            self._expr(decorator, scope, spot)
            if type(decorator) is ir.Call and not is_partial(decorator):
                for site in self.calls[start:]:
                    if site.call is decorator:
                        site.decorates = node
            else:
                self.decorators.append(DecoratorSite(decorator, node, scope, spot))

    # -- expressions

    def _expr(self, expr: ir.Expr, scope: Scope, spot: Spot) -> None:
        """Collects the calls in an expression; lambdas open a scope, a walrus binds."""
        calls = self.calls
        stack: list[ir.Expr] = [expr]
        while stack:
            node: Any = stack.pop()
            kind = type(node)
            if kind is ir.Name or kind is ir.Const:
                continue
            if kind is ir.Attr:
                stack.append(node.obj)
            elif kind is ir.Call:
                self._call(node, calls, stack, scope, spot)
            else:
                _PARTS[kind](self, node, stack, scope, spot)

    def _call(self, node: ir.Call, calls: list[CallSite], stack: list[ir.Expr], scope: Scope, spot: Spot) -> None:
        site = CallSite(node, scope, spot)
        calls.append(site)
        scope.calls.append(site)
        func = node.func
        if type(func) is ir.Call:
            start = len(calls)
            self._expr(func, scope, spot)
            calls[start].applied = node
        elif type(func) is ir.Attr:
            stack.append(func.obj)
        elif type(func) is not ir.Name:
            stack.append(func)
        stack.extend(node.args)
        for word in node.keywords:
            stack.append(word.value)


def is_partial(expr: ir.Expr) -> bool:
    """Whether `expr` is written as `partial(f, ...)`."""
    if type(expr) is not ir.Call or not expr.args:
        return False
    func = expr.func
    return (type(func) is ir.Attr and func.name == "partial") or (type(func) is ir.Name and func.id == "partial")


def terminal(func: ir.Expr) -> str:
    """The last part of what is called, as written; for a partial called at once, that of the function inside."""
    if type(func) is ir.Attr:
        return func.name
    if type(func) is ir.Name:
        return func.id
    if type(func) is ir.Call and is_partial(func):
        return terminal(func.args[0])
    return ""


_Push = Callable[["Outline", Any, "list[ir.Expr]", Scope, Spot], None]


def _bind(scope: Scope, name: str, binding: Binding) -> None:
    target = scope.outside.get(name, scope)
    target.binds.setdefault(name, []).append(binding)


def _parts_of(*names: str) -> _Push:
    def push(outline: Outline, node: Any, stack: list[ir.Expr], scope: Scope, spot: Spot) -> None:
        for name in names:
            part = getattr(node, name)
            if isinstance(part, tuple):
                stack.extend([one for one in part if one is not None])
            elif part is not None:
                stack.append(part)

    return push


def _lambda(outline: Outline, node: ir.Lambda, stack: list[ir.Expr], scope: Scope, spot: Spot) -> None:
    made = Scope("function", node.func.qualname, scope, spot)
    made.func = node.func
    outline.scopes.append(made)
    outline.by_node[id(node.func)] = made
    for param in node.func.params:
        made.binds[param.name] = [Binding("param", made, None, node.at[0], param.default, func=param)]
        if param.default is not None:
            stack.append(param.default)
    for stmt in node.func.body:
        if isinstance(stmt, ir.Return) and stmt.value is not None:
            outline._expr(stmt.value, made, spot)
            made.returns.append((stmt.value, spot))


def _comprehension(outline: Outline, node: ir.Comprehension, stack: list[ir.Expr], scope: Scope, spot: Spot) -> None:
    stack.append(node.item)
    if node.value is not None:
        stack.append(node.value)
    for loop in node.loops:
        stack.append(loop.source)
        stack.extend(loop.conditions)


def _walrus(outline: Outline, node: ir.Walrus, stack: list[ir.Expr], scope: Scope, spot: Spot) -> None:
    outline._target(node.target, node.value, scope, spot)
    stack.append(node.value)


_PARTS: dict[type, _Push] = {
    ir.Subscript: _parts_of("obj", "index"),
    ir.Slice: _parts_of("low", "high", "step"),
    ir.Binary: _parts_of("left", "right"),
    ir.Unary: _parts_of("operand"),
    ir.Bool: _parts_of("values"),
    ir.Compare: _parts_of("left", "rights"),
    ir.IfElse: _parts_of("test", "body", "orelse"),
    ir.Lambda: _lambda,
    ir.Sequence: _parts_of("items"),
    ir.DictDisplay: _parts_of("keys", "values"),
    ir.Comprehension: _comprehension,
    ir.Format: _parts_of("values"),
    ir.Star: _parts_of("value"),
    ir.Await: _parts_of("value"),
    ir.Yield: _parts_of("value"),
    ir.Walrus: _walrus,
}

_HANDLERS: dict[type, Callable[[Outline, Any, Scope, Spot], None]] = {
    ir.Assign: Outline._assign,
    ir.AugAssign: Outline._augment,
    ir.Do: Outline._do,
    ir.If: Outline._if,
    ir.While: Outline._if,
    ir.For: Outline._for,
    ir.With: Outline._with,
    ir.Return: Outline._return,
    ir.Raise: Outline._raise,
    ir.Try: Outline._try,
    ir.Assert: Outline._assert,
    ir.Scope: Outline._scope,
    ir.Import: Outline._import,
    ir.Match: Outline._match,
    ir.Define: Outline._define,
    ir.DefineClass: Outline._class,
}
