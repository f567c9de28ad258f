"""The nouns of a program as graphlint sees it: statements, expressions, functions, classes, one `Summary` per file.

No syntax tree lives beyond `summary.py`. Everything here is a frozen msgspec struct of strings, numbers and tuples with
a
position on each, so a summary compares, pickles and travels through the cache for free. A `Span` counts rows from 1 and
columns from 0 in UTF-8 bytes, as Python's own parser does; `findings.py` has the columns that people see.

The statements keep their order and nesting on purpose: what is refilled before a replay, rebound after a capture or
kept
across two replays is a question of order, and what the backward pass runs is a question of who registered what.
"""

from __future__ import annotations

from typing import Union

import msgspec

Span = tuple[int, int, int, int]  # first row, first column, last row, column behind the end


class Node(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Base of all expressions and statements."""

    at: Span


# --- expressions -----------------------------------------------------------------------------------------------------


class Name(Node, frozen=True, array_like=True, tag="n"):
    id: str


class Const(Node, frozen=True, array_like=True, tag="c"):
    """A literal; bytes, complex numbers, big integers and Ellipsis are kept as their text with `kind` saying so."""

    value: bool | int | float | str | None
    kind: str = ""


class Attr(Node, frozen=True, array_like=True, tag="a"):
    obj: Expr
    name: str


class Keyword(msgspec.Struct, frozen=True, array_like=True):
    """One `name=value` of a call; `name` is None for `**value`."""

    name: str | None
    value: Expr


class Call(Node, frozen=True, array_like=True, tag="k"):
    func: Expr
    args: tuple[Expr, ...]
    keywords: tuple[Keyword, ...] = ()


class Subscript(Node, frozen=True, array_like=True, tag="s"):
    obj: Expr
    index: Expr


class Slice(Node, frozen=True, array_like=True, tag="sl"):
    low: Expr | None = None
    high: Expr | None = None
    step: Expr | None = None


class Binary(Node, frozen=True, array_like=True, tag="b"):
    op: str
    left: Expr
    right: Expr


class Unary(Node, frozen=True, array_like=True, tag="u"):
    op: str
    operand: Expr


class Bool(Node, frozen=True, array_like=True, tag="bo"):
    op: str
    values: tuple[Expr, ...]


class Compare(Node, frozen=True, array_like=True, tag="cm"):
    left: Expr
    ops: tuple[str, ...]
    rights: tuple[Expr, ...]


class IfElse(Node, frozen=True, array_like=True, tag="ie"):
    test: Expr
    body: Expr
    orelse: Expr


class Lambda(Node, frozen=True, array_like=True, tag="l"):
    func: Function


class Sequence(Node, frozen=True, array_like=True, tag="q"):
    """A tuple, list or set display; `kind` says which."""

    kind: str
    items: tuple[Expr, ...]


class DictDisplay(Node, frozen=True, array_like=True, tag="d"):
    """A dict display; a key of None spreads its value (`**value`)."""

    keys: tuple[Expr | None, ...]
    values: tuple[Expr, ...]


class Loop(msgspec.Struct, frozen=True, array_like=True):
    """One `for target in source if conditions` of a comprehension."""

    target: Expr
    source: Expr
    conditions: tuple[Expr, ...]


class Comprehension(Node, frozen=True, array_like=True, tag="co"):
    kind: str  # list, set, dict, generator
    item: Expr
    value: Expr | None
    loops: tuple[Loop, ...]


class Format(Node, frozen=True, array_like=True, tag="f"):
    """An f-string: the values that are formatted, and the texts around them (none where a value is formatted otherwise
    than by `str`)."""

    values: tuple[Expr, ...]
    texts: tuple[str, ...] = ()


class Star(Node, frozen=True, array_like=True, tag="st"):
    value: Expr


class Await(Node, frozen=True, array_like=True, tag="aw"):
    value: Expr


class Yield(Node, frozen=True, array_like=True, tag="y"):
    value: Expr | None
    spread: bool = False  # `yield from`


class Walrus(Node, frozen=True, array_like=True, tag="w"):
    target: Expr
    value: Expr


Expr = Union[
    Name,
    Const,
    Attr,
    Call,
    Subscript,
    Slice,
    Binary,
    Unary,
    Bool,
    Compare,
    IfElse,
    Lambda,
    Sequence,
    DictDisplay,
    Comprehension,
    Format,
    Star,
    Await,
    Yield,
    Walrus,
]

# --- statements ------------------------------------------------------------------------------------------------------


class Assign(Node, frozen=True, array_like=True, tag="A"):
    """`targets = value`; an annotated name without a value has `value` None."""

    targets: tuple[Expr, ...]
    value: Expr | None
    annotation: Expr | None = None


class AugAssign(Node, frozen=True, array_like=True, tag="G"):
    target: Expr
    op: str
    value: Expr


class Do(Node, frozen=True, array_like=True, tag="D"):
    """An expression for its effect."""

    value: Expr


class If(Node, frozen=True, array_like=True, tag="I"):
    test: Expr
    body: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()


class While(Node, frozen=True, array_like=True, tag="W"):
    test: Expr
    body: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()


class For(Node, frozen=True, array_like=True, tag="F"):
    target: Expr
    source: Expr
    body: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One context manager of a `with`, and the name it is bound to."""

    context: Expr
    target: Expr | None = None


class With(Node, frozen=True, array_like=True, tag="H"):
    items: tuple[Item, ...]
    body: tuple[Stmt, ...]


class Return(Node, frozen=True, array_like=True, tag="R"):
    value: Expr | None = None


class Raise(Node, frozen=True, array_like=True, tag="X"):
    value: Expr | None = None


class Handler(msgspec.Struct, frozen=True, array_like=True):
    type: Expr | None
    name: str | None
    body: tuple[Stmt, ...]


class Try(Node, frozen=True, array_like=True, tag="T"):
    body: tuple[Stmt, ...]
    handlers: tuple[Handler, ...]
    orelse: tuple[Stmt, ...] = ()
    final: tuple[Stmt, ...] = ()


class Assert(Node, frozen=True, array_like=True, tag="S"):
    test: Expr
    message: Expr | None = None


class Delete(Node, frozen=True, array_like=True, tag="E"):
    targets: tuple[Expr, ...]


class Scope(Node, frozen=True, array_like=True, tag="O"):
    """`global` or `nonlocal` names."""

    kind: str
    names: tuple[str, ...]


class Import(Node, frozen=True, array_like=True, tag="M"):
    """`import module as name` (`symbol` empty) or `from module import symbol as name`.

    `level` counts the leading dots; a symbol of `*` imports everything. For `import a.b` without alias, `name` is `a`.
    """

    module: str
    symbol: str
    name: str
    level: int = 0


class Case(msgspec.Struct, frozen=True, array_like=True):
    """One `case`: the names it binds, the literal or class patterns it compares with, its guard and body."""

    binds: tuple[str, ...]
    wild: bool
    guard: Expr | None
    body: tuple[Stmt, ...]


class Match(Node, frozen=True, array_like=True, tag="V"):
    subject: Expr
    cases: tuple[Case, ...]


class Jump(Node, frozen=True, array_like=True, tag="J"):
    """`break` or `continue`."""

    kind: str


class Define(Node, frozen=True, array_like=True, tag="U"):
    func: Function


class DefineClass(Node, frozen=True, array_like=True, tag="C"):
    cls: Class


Stmt = Union[
    Assign,
    AugAssign,
    Do,
    If,
    While,
    For,
    With,
    Return,
    Raise,
    Try,
    Assert,
    Delete,
    Scope,
    Import,
    Match,
    Jump,
    Define,
    DefineClass,
]

# --- functions, classes, files ---------------------------------------------------------------------------------------


class Param(msgspec.Struct, frozen=True, array_like=True):
    """A parameter; `kind` is `pos`, `kw`, `*` or `**`."""

    name: str
    kind: str = "pos"
    default: Expr | None = None
    annotation: Expr | None = None


class Function(msgspec.Struct, frozen=True, array_like=True):
    """A function, method or lambda. `qualname` is dotted inside the file (`Class.method`, `outer.inner`)."""

    name: str
    qualname: str
    at: Span
    params: tuple[Param, ...]
    body: tuple[Stmt, ...]
    decorators: tuple[Expr, ...] = ()
    returns: Expr | None = None
    is_async: bool = False
    is_generator: bool = False
    bound_names: tuple[str, ...] = ()  # names the body binds: locals, unless declared global or nonlocal
    doc: str = ""


class Class(msgspec.Struct, frozen=True, array_like=True):
    name: str
    qualname: str
    at: Span
    bases: tuple[Expr, ...]
    keywords: tuple[Keyword, ...]
    body: tuple[Stmt, ...]
    decorators: tuple[Expr, ...] = ()


class Comment(msgspec.Struct, frozen=True, array_like=True):
    row: int
    text: str


class Summary(msgspec.Struct, frozen=True, array_like=True):
    """One file, read. `module` is its dotted import name, `is_package` whether it is an `__init__.py`."""

    path: str
    module: str
    is_package: bool
    body: tuple[Stmt, ...]
