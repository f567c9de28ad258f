"""Source text -> `Summary`. Reading happens here, and nowhere else.

The front end is Python's own parser: exact spans, 7 microseconds a line, where libcst takes 67 and has no positions
without its metadata providers (160 more). libcst comes in where `ast` can't: a file whose syntax is newer than the
running Python is read by libcst, what this Python does not know is blanked in place (rows and columns stay), and the
rest goes the common way (`newer.py`). Nothing later in the program sees a syntax tree.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from graphlint import ir

SCHEMA = 1  # raise it whenever ir.py or this file changes what a summary holds: old cache entries are then ignored

_DEPTH = 180  # expressions nested deeper than this become an unknown value: no recursion error on generated code


class SourceError(Exception):
    """A file that can't be read as Python; `row` says where, the message why."""

    def __init__(self, message: str, row: int = 1) -> None:
        super().__init__(message)
        self.row = row


def read(path: str, module: str, text: str) -> ir.Summary:
    """Parses `text`; raises `SourceError` with the row when it is no Python that graphlint can read."""
    tree = parse(text)
    try:
        body = _Lower().block(tree.body)
    except RecursionError as error:
        raise SourceError("nested too deeply to be analysed; simplify the file or exclude it") from error
    return ir.Summary(path, module, path.endswith("__init__.py"), body)


def encode(summary: ir.Summary) -> bytes:
    """Summary -> bytes for the cache."""
    return _ENCODER.encode(summary)


def decode(data: bytes) -> ir.Summary:
    """Bytes from the cache -> Summary; raises `msgspec.MsgspecError` when they are none."""
    made: ir.Summary = _lazy_decoder().decode(data)
    return made


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: Any = None


def _lazy_decoder() -> Any:
    global _DECODER
    if _DECODER is None:
        _DECODER = msgspec.msgpack.Decoder(ir.Summary)
    return _DECODER


def parse(text: str) -> ast.Module:
    """The syntax tree, newer syntax overwritten in place; raises `SourceError` with the row for what is no Python."""
    try:
        return _ast(text)
    except SyntaxError as error:
        from graphlint import newer

        older = newer.blank_newer_syntax(text)
        if older is not None:
            try:
                return _ast(older)
            except (SyntaxError, ValueError):
                pass
        raise SourceError(f"syntax error: {error.msg}", error.lineno or 1) from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deeply for Python's parser"
        raise SourceError(f"can't be parsed: {reason}") from error


def _ast(text: str) -> ast.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in linted code is not our user's concern
        return ast.parse(text)


_OPS = {
    "Add": "+", "Sub": "-", "Mult": "*", "MatMult": "@", "Div": "/", "Mod": "%", "Pow": "**", "LShift": "<<",
    "RShift": ">>", "BitOr": "|", "BitXor": "^", "BitAnd": "&", "FloorDiv": "//", "Eq": "==", "NotEq": "!=",
    "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Is": "is", "IsNot": "is not", "In": "in", "NotIn": "not in",
    "Not": "not", "Invert": "~", "UAdd": "+", "USub": "-", "And": "and", "Or": "or",
}  # fmt: skip


def _op(node: ast.AST) -> str:
    return _OPS[type(node).__name__]


_ROWS = tuple(range(20_000))  # one object for each number: the parser makes four for every node


def _at(node: Any) -> ir.Span:
    row, end = node.lineno, node.end_lineno
    if end < 20_000:
        row, end = _ROWS[row], _ROWS[end]
    return (row, node.col_offset, end, node.end_col_offset)


class _Lower:
    """Turns `ast` nodes into `ir` nodes; one method per node type, named after it."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.bound: list[set[str]] = []
        self.yields: list[bool] = []
        self.depth = 0
        self.table: dict[type, Callable[[Any], Any]] = {}

    # -- dispatch

    def block(self, body: Iterable[ast.stmt]) -> tuple[ir.Stmt, ...]:
        out: list[ir.Stmt] = []
        for node in body:
            made = self._method(node)(node)
            if made is None:
                continue
            if isinstance(made, list):
                out.extend(made)
            else:
                out.append(made)
        return tuple(out)

    def expr(self, node: ast.expr) -> ir.Expr:
        if self.depth > _DEPTH:
            return ir.Name(_at(node), "?")
        self.depth += 1
        try:
            made: ir.Expr = self._method(node)(node)
            return made
        finally:
            self.depth -= 1

    def maybe(self, node: ast.expr | None) -> ir.Expr | None:
        return None if node is None else self.expr(node)

    def exprs(self, nodes: Iterable[ast.expr]) -> tuple[ir.Expr, ...]:
        return tuple([self.expr(node) for node in nodes])

    def _method(self, node: ast.AST) -> Callable[[Any], Any]:
        kind = type(node)
        found = self.table.get(kind)
        if found is None:
            found = self.table[kind] = getattr(self, kind.__name__, self._unknown)
        return found

    def _unknown(self, node: Any) -> Any:
        """Syntax this file has not met: walked through quietly, an unknown value in its place."""
        if isinstance(node, ast.stmt):
            return None
        return ir.Name(_at(node), "?")

    def _bind(self, target: ast.expr) -> None:
        if not self.bound:
            return
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
                self.bound[-1].add(node.id)

    # -- expressions

    def Name(self, node: ast.Name) -> ir.Expr:
        return ir.Name(_at(node), node.id)

    def Constant(self, node: ast.Constant) -> ir.Expr:
        value = node.value
        if value is None or isinstance(value, (bool, str, float)):
            return ir.Const(_at(node), value)
        if isinstance(value, int) and abs(value) < 1 << 62:
            return ir.Const(_at(node), value)
        return ir.Const(_at(node), repr(value)[:40], "ellipsis" if value is ... else type(value).__name__)

    def Attribute(self, node: ast.Attribute) -> ir.Expr:
        return ir.Attr(_at(node), self.expr(node.value), node.attr)

    def Call(self, node: ast.Call) -> ir.Expr:
        return ir.Call(_at(node), self.expr(node.func), self.exprs(node.args), self._keywords(node.keywords))

    def _keywords(self, nodes: Iterable[ast.keyword]) -> tuple[ir.Keyword, ...]:
        return tuple([ir.Keyword(word.arg, self.expr(word.value)) for word in nodes])

    def Subscript(self, node: ast.Subscript) -> ir.Expr:
        return ir.Subscript(_at(node), self.expr(node.value), self.expr(node.slice))

    def Slice(self, node: ast.Slice) -> ir.Expr:
        return ir.Slice(_at(node), self.maybe(node.lower), self.maybe(node.upper), self.maybe(node.step))

    def BinOp(self, node: ast.BinOp) -> ir.Expr:
        return ir.Binary(_at(node), _op(node.op), self.expr(node.left), self.expr(node.right))

    def UnaryOp(self, node: ast.UnaryOp) -> ir.Expr:
        operand = self.expr(node.operand)
        if isinstance(operand, ir.Const) and isinstance(node.op, ast.USub) and isinstance(operand.value, (int, float)):
            return ir.Const(_at(node), -operand.value)
        return ir.Unary(_at(node), _op(node.op), operand)

    def BoolOp(self, node: ast.BoolOp) -> ir.Expr:
        return ir.Bool(_at(node), _op(node.op), self.exprs(node.values))

    def Compare(self, node: ast.Compare) -> ir.Expr:
        return ir.Compare(_at(node), self.expr(node.left), tuple(map(_op, node.ops)), self.exprs(node.comparators))

    def IfExp(self, node: ast.IfExp) -> ir.Expr:
        return ir.IfElse(_at(node), self.expr(node.test), self.expr(node.body), self.expr(node.orelse))

    def Lambda(self, node: ast.Lambda) -> ir.Expr:
        self._enter("<lambda>")
        body = self.expr(node.body)
        bound, yields = self._leave()
        func = ir.Function(
            name="<lambda>",
            qualname=".".join([*self.scope, "<lambda>"]),
            at=_at(node),
            params=self._params(node.args),
            body=(ir.Return(_at(node.body), body),),
            is_generator=yields,
            bound_names=tuple(sorted(bound)),
        )
        return ir.Lambda(_at(node), func)

    def Tuple(self, node: ast.Tuple) -> ir.Expr:
        return ir.Sequence(_at(node), "tuple", self.exprs(node.elts))

    def List(self, node: ast.List) -> ir.Expr:
        return ir.Sequence(_at(node), "list", self.exprs(node.elts))

    def Set(self, node: ast.Set) -> ir.Expr:
        return ir.Sequence(_at(node), "set", self.exprs(node.elts))

    def Dict(self, node: ast.Dict) -> ir.Expr:
        return ir.DictDisplay(_at(node), tuple([self.maybe(key) for key in node.keys]), self.exprs(node.values))

    def ListComp(self, node: ast.ListComp) -> ir.Expr:
        return self._comprehension(node, "list", node.elt)

    def SetComp(self, node: ast.SetComp) -> ir.Expr:
        return self._comprehension(node, "set", node.elt)

    def GeneratorExp(self, node: ast.GeneratorExp) -> ir.Expr:
        return self._comprehension(node, "generator", node.elt)

    def DictComp(self, node: ast.DictComp) -> ir.Expr:
        return self._comprehension(node, "dict", node.key, node.value)

    def _comprehension(self, node: Any, kind: str, item: ast.expr, value: ast.expr | None = None) -> ir.Expr:
        loops = tuple(
            [ir.Loop(self.expr(loop.target), self.expr(loop.iter), self.exprs(loop.ifs)) for loop in node.generators]
        )
        return ir.Comprehension(_at(node), kind, self.expr(item), self.maybe(value), loops)

    def JoinedStr(self, node: ast.JoinedStr) -> ir.Expr:
        values, texts, plain = [], [""], True
        for part in node.values:
            if isinstance(part, ast.Constant):
                texts[-1] += str(part.value)
            elif hasattr(part, "conversion"):  # a formatted value; of a template string (3.14) too
                field: Any = part
                values.append(self.expr(field.value))
                texts.append("")
                plain = plain and field.conversion == -1 and field.format_spec is None
        return ir.Format(_at(node), tuple(values), tuple(texts) if plain else ())

    TemplateStr = JoinedStr

    def Starred(self, node: ast.Starred) -> ir.Expr:
        return ir.Star(_at(node), self.expr(node.value))

    def Await(self, node: ast.Await) -> ir.Expr:
        return ir.Await(_at(node), self.expr(node.value))

    def Yield(self, node: ast.Yield) -> ir.Expr:
        if self.yields:
            self.yields[-1] = True
        return ir.Yield(_at(node), self.maybe(node.value))

    def YieldFrom(self, node: ast.YieldFrom) -> ir.Expr:
        if self.yields:
            self.yields[-1] = True
        return ir.Yield(_at(node), self.expr(node.value), True)

    def NamedExpr(self, node: ast.NamedExpr) -> ir.Expr:
        self._bind(node.target)
        return ir.Walrus(_at(node), self.expr(node.target), self.expr(node.value))

    # -- statements

    def Assign(self, node: ast.Assign) -> ir.Stmt:
        for target in node.targets:
            self._bind(target)
        return ir.Assign(_at(node), self.exprs(node.targets), self.expr(node.value))

    def AnnAssign(self, node: ast.AnnAssign) -> ir.Stmt:
        self._bind(node.target)
        target = (self.expr(node.target),)
        return ir.Assign(_at(node), target, self.maybe(node.value), self.expr(node.annotation))

    def AugAssign(self, node: ast.AugAssign) -> ir.Stmt:
        self._bind(node.target)
        return ir.AugAssign(_at(node), self.expr(node.target), _op(node.op), self.expr(node.value))

    def Expr(self, node: ast.Expr) -> ir.Stmt | None:
        if isinstance(node.value, ast.Constant):
            return None  # a docstring, or `...`
        return ir.Do(_at(node), self.expr(node.value))

    def If(self, node: ast.If) -> ir.Stmt:
        return ir.If(_at(node), self.expr(node.test), self.block(node.body), self.block(node.orelse))

    def While(self, node: ast.While) -> ir.Stmt:
        return ir.While(_at(node), self.expr(node.test), self.block(node.body), self.block(node.orelse))

    def For(self, node: Any) -> ir.Stmt:
        self._bind(node.target)
        target, source = self.expr(node.target), self.expr(node.iter)
        return ir.For(_at(node), target, source, self.block(node.body), self.block(node.orelse))

    AsyncFor = For

    def With(self, node: Any) -> ir.Stmt:
        items = []
        for item in node.items:
            if item.optional_vars is not None:
                self._bind(item.optional_vars)
            items.append(ir.Item(self.expr(item.context_expr), self.maybe(item.optional_vars)))
        return ir.With(_at(node), tuple(items), self.block(node.body))

    AsyncWith = With

    def Return(self, node: ast.Return) -> ir.Stmt:
        return ir.Return(_at(node), self.maybe(node.value))

    def Raise(self, node: ast.Raise) -> ir.Stmt:
        return ir.Raise(_at(node), self.maybe(node.exc))

    def Try(self, node: Any) -> ir.Stmt:
        handlers = []
        for handler in node.handlers:
            if handler.name and self.bound:
                self.bound[-1].add(handler.name)
            handlers.append(ir.Handler(self.maybe(handler.type), handler.name, self.block(handler.body)))
        body, orelse = self.block(node.body), self.block(node.orelse)
        return ir.Try(_at(node), body, tuple(handlers), orelse, self.block(node.finalbody))

    TryStar = Try

    def Assert(self, node: ast.Assert) -> ir.Stmt:
        return ir.Assert(_at(node), self.expr(node.test), self.maybe(node.msg))

    def Delete(self, node: ast.Delete) -> ir.Stmt:
        for target in node.targets:
            self._bind(target)
        return ir.Delete(_at(node), self.exprs(node.targets))

    def Global(self, node: ast.Global) -> ir.Stmt:
        return ir.Scope(_at(node), "global", tuple(node.names))

    def Nonlocal(self, node: ast.Nonlocal) -> ir.Stmt:
        return ir.Scope(_at(node), "nonlocal", tuple(node.names))

    def Import(self, node: ast.Import) -> list[ir.Stmt]:
        made: list[ir.Stmt] = []
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            if self.bound:
                self.bound[-1].add(name)
            made.append(ir.Import(_at(node), alias.name, "", name))
        return made

    def ImportFrom(self, node: ast.ImportFrom) -> list[ir.Stmt]:
        made: list[ir.Stmt] = []
        for alias in node.names:
            name = alias.asname or alias.name
            if self.bound:
                self.bound[-1].add(name)
            made.append(ir.Import(_at(node), node.module or "", alias.name, name, node.level))
        return made

    def Match(self, node: ast.Match) -> ir.Stmt:
        cases = []
        for case in node.cases:
            binds = tuple(_pattern_names(case.pattern))
            if self.bound:
                self.bound[-1].update(binds)
            wild = isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
            cases.append(ir.Case(binds, wild, self.maybe(case.guard), self.block(case.body)))
        return ir.Match(_at(node), self.expr(node.subject), tuple(cases))

    def Pass(self, node: ast.Pass) -> None:
        return None

    def Break(self, node: ast.Break) -> ir.Stmt:
        return ir.Jump(_at(node), "break")

    def Continue(self, node: ast.Continue) -> ir.Stmt:
        return ir.Jump(_at(node), "continue")

    def FunctionDef(self, node: Any) -> ir.Stmt:
        decorators, params, returns = self.exprs(node.decorator_list), self._params(node.args), self.maybe(node.returns)
        if self.bound:
            self.bound[-1].add(node.name)
        self._enter(node.name)
        body = self.block(node.body)
        qualname = ".".join(self.scope)
        bound, yields = self._leave()
        func = ir.Function(
            name=node.name,
            qualname=qualname,
            at=_at(node),
            params=params,
            body=body,
            decorators=decorators,
            returns=returns,
            is_async=isinstance(node, ast.AsyncFunctionDef),
            is_generator=yields,
            bound_names=tuple(sorted(bound)),
        )
        return ir.Define(_at(node), func)

    AsyncFunctionDef = FunctionDef

    def ClassDef(self, node: ast.ClassDef) -> ir.Stmt:
        bases, keywords = self.exprs(node.bases), self._keywords(node.keywords)
        decorators = self.exprs(node.decorator_list)
        if self.bound:
            self.bound[-1].add(node.name)
        self._enter(node.name)
        body = self.block(node.body)
        qualname = ".".join(self.scope)
        self._leave()
        cls = ir.Class(node.name, qualname, _at(node), bases, keywords, body, decorators)
        return ir.DefineClass(_at(node), cls)

    # -- scopes

    def _enter(self, name: str) -> None:
        self.scope.append(name)
        self.bound.append(set())
        self.yields.append(False)

    def _leave(self) -> tuple[set[str], bool]:
        self.scope.pop()
        return self.bound.pop(), self.yields.pop()

    def _params(self, args: ast.arguments) -> tuple[ir.Param, ...]:
        positional = [*args.posonlyargs, *args.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
        made = [self._param(arg, "pos", default) for arg, default in zip(positional, defaults, strict=True)]
        if args.vararg:
            made.append(self._param(args.vararg, "*", None))
        made += [
            self._param(arg, "kw", default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        ]
        if args.kwarg:
            made.append(self._param(args.kwarg, "**", None))
        return tuple(made)

    def _param(self, arg: ast.arg, kind: str, default: ast.expr | None) -> ir.Param:
        return ir.Param(arg.arg, kind, self.maybe(default), self.maybe(arg.annotation))


def _pattern_names(pattern: ast.pattern) -> Iterable[str]:
    for node in ast.walk(pattern):
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        if isinstance(name, str):
            yield name
