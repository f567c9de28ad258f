"""The source of a captured region as something that can be run again: the body of its `with`, the statements between
begin and end, a callable.

Needed to ask, at a replay, what eager would do now. Values of local names are held weakly where they can be, so that
asking keeps nothing alive.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
import types
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from graphlint.runtime.dryrun import callers, sites

_GONE = object()


class Body:
    """A region's statements and the local names that they read."""

    def __init__(self, frame: FrameType, statements: list[ast.stmt], row: int, end_row: int) -> None:
        self.row, self.end_row = row, end_row
        self.filename = frame.f_code.co_filename
        self._globals = frame.f_globals
        self._code = frame.f_code
        at_module = frame.f_code.co_name == "<module>"
        here = sites.locals_of(frame)
        self._statements = statements
        stored, loaded = _names(statements)
        self._looped = _stored_in_loops(self.filename, row, end_row)  # every graph of a loop has its own of them
        local = stored | loaded & self._looped if at_module else {name for name in here if name.isidentifier()}
        self._parameters = sorted(name for name in local if name in here)
        self._kept = {name: _weak(here[name]) for name in self._parameters}
        self._needed = loaded & set(self._parameters)
        self._shared = sorted(loaded - set(self._parameters) - set(dir(builtins)))
        self._later = _stored_after(frame.f_code, end_row)
        self._callers = callers.Callers(frame)
        self._compiled: Callable[..., Any] | None = None
        #: names whose plain values are others now than at capture; filled by `bind`
        self.otherwise: list[str] = []

    def bind(self) -> Callable[[], Any] | None:
        """The region as a call without arguments, with the values that its names have now; None when a value that it
        needs is gone."""
        values = {name: _strong(kept) for name, kept in self._kept.items()}
        frame = self._calling_frame()
        values.update(self._namesakes())
        handed = self._callers.values(sys._getframe(1)) if frame is None else {}
        values.update({name: part for name, part in handed.items() if isinstance(self._kept.get(name), callers.PLAIN)})
        if frame is not None:
            here = sites.locals_of(frame)
            values.update({name: here[name] for name in self._later if name in here and name in values})
            values.update(self._plain_now(here))
        if any(values[name] is _GONE or _holds_gone(values[name]) for name in self._needed):
            return None
        function = self._function()
        if function is None:
            return None
        plain = (bool, int, float, str, type(None))
        self.otherwise = [
            name
            for name, kept in self._kept.items()
            if isinstance(kept, plain) and name in self._needed and values[name] != kept
        ]
        arguments = {name: None if value is _GONE else value for name, value in values.items()}
        cells = self._cells(arguments, handed)
        bound = lambda: _with_cells(cells, function, arguments)  # noqa: E731
        bound.roots = self._shared_now() | {k: v for k, v in arguments.items() if k in self._needed}  # type: ignore[attr-defined]
        return bound

    def _cells(self, arguments: dict[str, Any], handed: dict[str, Any]) -> list[tuple[types.CellType, Any]]:
        """Cells of the functions that the region calls by a local name, whose variable a caller would give another
        plain value now."""
        found: list[tuple[types.CellType, Any]] = []
        for name in sorted(self._needed):
            function = arguments.get(name)
            if isinstance(function, types.FunctionType) and function.__code__ in self._code.co_consts:
                for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                    if free in handed and _is_other(cell, handed[free]):
                        found.append((cell, handed[free]))
                        self.otherwise.append(free)
        return found

    def _shared_now(self) -> dict[str, Any]:
        """The globals that the region's own statements name, modules and classes apart."""
        found = {name: self._globals[name] for name in self._shared if name in self._globals}
        return {name: value for name, value in found.items() if not isinstance(value, (types.ModuleType, type))}

    def names(self) -> dict[str, Callable[[], Any]]:
        """How to look up again the names that lead to tensors and may lead to others later: globals, and locals that
        the function assigns again."""
        shared = [name for name, value in self._shared_now().items() if isinstance(value, torch.Tensor)]
        again = sorted(self._later & self._needed - self._looped)
        found: dict[str, Callable[[], Any]] = {name: functools.partial(self._globals.get, name) for name in shared}
        return found | {name: functools.partial(self._local_now, name) for name in again}

    def _local_now(self, name: str) -> Any:
        """What a local name leads to, in the call that runs; what it led to at capture, where none runs."""
        frame = self._calling_frame()
        kept = _strong(self._kept[name])
        return kept if frame is None else frame.f_locals.get(name, kept)  # a trace function must not clear them

    def _calling_frame(self) -> FrameType | None:
        """The running call of the function that opened the region: the same call still, or a later one that only
        replays."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        return frame

    def _plain_now(self, here: dict[str, Any]) -> dict[str, Any]:
        """Plain values that a later call of the function has; a loop around the capture gives every graph its own,
        which are kept."""
        plain = (bool, int, float, str, type(None))
        if self._code.co_name == "<module>":
            return {}
        return {
            name: here[name]
            for name, kept in self._kept.items()
            if name not in self._looped and isinstance(kept, plain) and isinstance(here.get(name, _GONE), plain)
        }

    def _namesakes(self) -> dict[str, Any]:
        """Plain values that callers of the replay, in the same file, hold under the names of the region."""
        plain = (bool, int, float, str, type(None))
        wanted = {name for name, kept in self._kept.items() if isinstance(kept, plain) and name in self._needed}
        found: dict[str, Any] = {}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and wanted:
            if frame.f_code.co_filename == self.filename and frame.f_code is not self._code:
                here = sites.locals_of(frame)
                found.update(
                    {
                        name: here[name]
                        for name in wanted
                        if isinstance(here.get(name, _GONE), plain) and name not in found
                    }
                )
            frame = frame.f_back
        return {} if self._code.co_name == "<module>" else found

    def key_row(self) -> int:
        """The row where the key of the graph is made, or 0 where graphs are not kept by key."""
        return callers.key_row(self.filename, [self._code, *self._callers.codes])

    def appends(self, name: str) -> bool:
        """Whether the region's own statements put something into a container of that name (its outputs, most often)."""
        return any(name in ast.unparse(statement) for statement in self._statements)

    def _function(self) -> Callable[..., Any] | None:
        if self._compiled is None:
            arguments = ast.arguments([], [ast.arg(name) for name in self._parameters], None, [], [], None, [])
            span = {"lineno": self.row, "col_offset": 0, "end_lineno": self.end_row, "end_col_offset": 0}
            node = ast.FunctionDef("__region__", arguments, self._statements, [], None)
            for name, value in span.items():
                setattr(node, name, value)
            if sys.version_info >= (3, 12):
                node.type_params = []
            tree = ast.fix_missing_locations(ast.Module([node], []))
            namespace: dict[str, Any] = {}
            try:
                exec(compile(tree, self.filename, "exec"), self._globals, namespace)
            except SyntaxError:
                return None
            self._compiled = namespace["__region__"]
        return self._compiled


def _is_other(cell: types.CellType, value: Any) -> bool:
    """Whether a cell holds another plain value."""
    try:
        content = cell.cell_contents
    except ValueError:  # nothing yet
        return False
    return isinstance(content, callers.PLAIN) and content != value


def _with_cells(cells: list[tuple[types.CellType, Any]], function: Callable[..., Any], arguments: Any) -> Any:
    """One call of the region while some variables of its functions have other values."""
    before = [cell.cell_contents for cell, _ in cells]
    try:
        for cell, value in cells:
            cell.cell_contents = value
        return function(**arguments)
    finally:
        for (cell, _), value in zip(cells, before, strict=True):
            cell.cell_contents = value


def of(frame: FrameType) -> Body | None:
    """The body of the region that is being opened somewhere above `frame`; None where its source can't be had."""
    current: FrameType | None = frame
    while current is not None:
        if not sites.is_library(current.f_code.co_filename):
            found = _with_body(current) or _between(current)
            if found is not None and not _only_yields(found[0]):
                statements, row, end_row = found
                return Body(current, statements, row, end_row)
        current = current.f_back
    return None


def _with_body(frame: FrameType) -> tuple[list[ast.stmt], int, int] | None:
    """The body of the `with` whose context expression is running in the frame."""
    row = frame.f_lineno
    tree = sites.parsed(frame.f_code.co_filename)
    best: ast.With | None = None
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.With) and any(_covers(item.context_expr, row) for item in node.items):
            best = node if best is None or node.lineno >= best.lineno else best
    return (best.body, best.lineno, best.end_lineno or best.lineno) if best is not None else None


def _covers(node: ast.expr, row: int) -> bool:
    return node.lineno <= row <= (node.end_lineno or node.lineno)


def _between(frame: FrameType) -> tuple[list[ast.stmt], int, int] | None:
    """The statements from behind `capture_begin` (or `enter_context`) up to `capture_end` or the end of the block."""
    row = frame.f_lineno
    tree = sites.parsed(frame.f_code.co_filename)
    for node in ast.walk(tree) if tree else ():
        for block in (getattr(node, part, None) for part in ("body", "orelse", "finalbody")):
            statements: list[Any] = block if isinstance(block, list) else []
            for index, statement in enumerate(statements):
                if not isinstance(statement, ast.Expr) or not statement.lineno <= row <= (statement.end_lineno or row):
                    continue
                text = ast.unparse(statement)
                if "enter_context" in text:
                    return _until_end(statements[index + 1 :])
                if "capture_begin" in text and any("capture_end" in ast.unparse(x) for x in statements[index + 1 :]):
                    return _until_end(statements[index + 1 :])
    return None


def _until_end(statements: list[ast.stmt]) -> tuple[list[ast.stmt], int, int] | None:
    body: list[ast.stmt] = []
    for statement in statements:
        if "capture_end" in ast.unparse(statement) and not isinstance(statement, (ast.With, ast.If, ast.For, ast.Try)):
            break
        body.append(statement)
    return (body, body[0].lineno, body[-1].end_lineno or body[-1].lineno) if body else None


def _only_yields(statements: list[ast.stmt]) -> bool:
    """Whether the body belongs to a context manager written as a generator: the region is at its caller's."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Yield, ast.YieldFrom)):
                return True
    return False


def _names(statements: list[ast.stmt]) -> tuple[set[str], set[str]]:
    """Names stored and names used in the statements."""
    nodes = [node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return {node.id for node in nodes if isinstance(node.ctx, ast.Store)}, {node.id for node in nodes}


def _stored_after(code: CodeType, end_row: int) -> set[str]:
    """Local names that the function assigns again below the region: their value at a replay may be another."""
    tree = sites.parsed(code.co_filename)
    found: set[str] = set()
    for node in ast.walk(tree) if tree else ():
        is_scope = (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.name == code.co_name
            and node.lineno <= end_row <= (node.end_lineno or 0)
        )
        if is_scope or (code.co_name == "<module>" and isinstance(node, ast.Module)):
            found |= {
                x.id
                for x in ast.walk(node)
                if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.lineno > end_row
            }
    return found


def _stored_in_loops(filename: str, row: int, end_row: int) -> set[str]:
    """Names that a loop around the region assigns."""
    tree = sites.parsed(filename)
    found: set[str] = set()
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, (ast.For, ast.While)) and node.lineno < row and (node.end_lineno or 0) >= end_row:
            found |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return found


def _weak(value: Any) -> Any:
    """A holder that does not keep the value alive, where Python allows it."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_weak(x) for x in value)
    if type(value) is dict:
        return {key: _weak(x) for key, x in value.items()}
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, weakref.ref)):
        return value
    try:
        if isinstance(value, types.MethodType):
            return weakref.WeakMethod(value) if not isinstance(value.__self__, type) else value
        return weakref.ref(value)
    except TypeError:  # an object with slots of its own takes no weak reference
        return value


def _strong(kept: Any) -> Any:
    """The value behind a holder, or a mark that it is gone."""
    if isinstance(kept, weakref.ref):
        value = kept()
        return _GONE if value is None else value
    if type(kept) in (list, tuple):
        return type(kept)(_strong(x) for x in kept)
    if type(kept) is dict:
        return {key: _strong(x) for key, x in kept.items()}
    return kept


def _holds_gone(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(x is _GONE or _holds_gone(x) for x in value)
    if type(value) is dict:
        return any(x is _GONE or _holds_gone(x) for x in value.values())
    return False
