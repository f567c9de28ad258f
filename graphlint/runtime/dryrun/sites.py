"""Which line of the user's code is running, by which way, and what statement a value steers there. Imports no torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType
from typing import Any

from graphlint.runtime.dryrun.records import Site

_MAX_TRACE = 24


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Folders whose frames are never the user's: torch and its friends, this package, the standard library."""
    found = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
    for name in ("torch", "numpy", "pluggy", "_pytest", "click"):
        spec = importlib.util.find_spec(name)
        found.extend(spec.submodule_search_locations or () if spec else ())
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in found)


@functools.cache
def _own_folder() -> str:
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


@functools.cache
def _standard_folder() -> str:
    return os.path.join(os.path.realpath(sysconfig.get_paths()["stdlib"]), "")


@functools.cache
def is_library(filename: str) -> bool:
    """Whether code of that file belongs to torch, to graphlint's runtime or to Python rather than to the user."""
    if filename.startswith("<") and "ipython" not in filename:
        return True
    path = os.path.realpath(filename)
    if path.startswith(_library_folders()):
        return True
    return path.startswith(_standard_folder()) and "site-packages" not in path


@functools.cache
def is_installed(filename: str) -> bool:
    """Whether the file belongs to an installed package rather than to the project at hand."""
    return is_library(filename) or "site-packages" in filename or "dist-packages" in filename


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The values of a frame's names, without the snapshot that Python would keep in the frame, which would keep tensors
    alive that the user has let go. Not for the frame that a trace function is called for: Python writes the snapshot
    back there."""
    found = frame.f_locals
    values = dict(found)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(found) is dict:
        found.clear()
    return values


def forget_locals() -> None:
    """Drops the snapshots of local names that tracing has left in the running frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            locals_of(frame)
        frame = frame.f_back


@functools.cache
def relative(filename: str) -> str:
    """The file as the user would write it: relative to the current folder where it lies below it."""
    path = os.path.abspath(filename)
    here = os.path.join(os.getcwd(), "")
    return path[len(here) :] if path.startswith(here) else path


@functools.cache
def _torch_name(filename: str) -> str:
    """`.../site-packages/torch/optim/adam.py` -> `torch/optim/adam.py`; `.../logging/__init__.py` ->
    `logging/__init__.py`."""
    parts = filename.replace("\\", "/").split("/")
    return "/".join(parts[len(parts) - 1 - parts[::-1].index("torch") :]) if "torch" in parts else "/".join(parts[-2:])


def here(frame: FrameType | None = None, stop: CodeType | None = None) -> Site:
    """The site of the innermost user frame at or above `frame` (default: the caller); the way ends below code
    `stop`."""
    current: FrameType | None = frame or sys._getframe(1)
    inside: list[str] = []
    users: list[FrameType] = []
    while current is not None and current.f_code is not stop:
        filename = current.f_code.co_filename
        if not is_library(filename):
            users.append(current)
        elif (
            not users
            and not filename.endswith(("eval_frame.py", "overrides.py", "_compile.py"))
            and not filename.startswith(_own_folder())
        ):
            inside.append(f"{_torch_name(filename)}:{current.f_code.co_name}")
        current = current.f_back
        if len(users) >= _MAX_TRACE:
            break
    if not users:
        return Site("<unknown>", 0, inside=tuple(reversed(inside)))
    return _site(users, tuple(reversed(inside)))


def _site(users: list[FrameType], inside: tuple[str, ...]) -> Site:
    frame = users[0]
    filename = frame.f_code.co_filename
    row, end_row, column, end_column = position(frame)
    return Site(
        filename=relative(filename),
        row=row,
        function=frame.f_code.co_name,
        column=column,
        end_row=end_row if end_row - row < 3 else row,
        end_column=end_column if end_row - row < 3 else column,
        branch=_steers(filename, row, end_row, column, end_column),
        inside=inside,
        trace=tuple((relative(f.f_code.co_filename), f.f_lineno, f.f_code.co_name) for f in reversed(users[1:])),
    )


def position(frame: FrameType) -> tuple[int, int, int, int]:
    """Row, end row, column, end column (from 1, end behind the last character) of the running expression."""
    row = frame.f_lineno
    if sys.version_info >= (3, 11) and frame.f_lasti >= 0:
        found = _positions(frame.f_code)[frame.f_lasti // 2]
        if None not in found:
            first, last, column, end = found
            return first or row, last or row, _characters(frame, first, column), _characters(frame, last, end)
    text = linecache.getline(frame.f_code.co_filename, row).rstrip()
    return row, row, len(text) - len(text.lstrip()) + 1, len(text) + 1


@functools.lru_cache(maxsize=4096)
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    positions: Any = getattr(code, "co_positions", None)
    return list(positions()) if positions is not None else []


def _characters(frame: FrameType, row: int | None, offset: int | None) -> int:
    """A byte offset of CPython's position table -> a column that counts characters from 1."""
    text = linecache.getline(frame.f_code.co_filename, row or 0)
    return len(text.encode()[: offset or 0].decode(errors="ignore")) + 1


@functools.lru_cache(maxsize=512)
def parsed(filename: str) -> ast.Module | None:
    """The syntax tree of a file, or None where its text can't be had or parsed."""
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=16384)
def _steers(filename: str, row: int, end_row: int, column: int, end_column: int) -> str:
    """The statement that the expression at that span steers: `while`, `assert`, `if`, `range`, `index`, `slice` or
    nothing."""
    tree = parsed(filename)
    kinds: set[str] = set()
    for node in ast.walk(tree) if tree is not None else ():
        if getattr(node, "lineno", row + 1) > row or (getattr(node, "end_lineno", None) or 0) < end_row:
            continue
        for kind, part in _steering_parts(node):
            if _holds(part, row, end_row, column, end_column) or _is_span(node, row, end_row, column, end_column):
                kinds.add(kind)
    return next((kind for kind in ("range", "index", "slice", "while", "assert", "if") if kind in kinds), "")


def _holds(part: ast.expr, row: int, end_row: int, column: int, end_column: int) -> bool:
    """Whether the span lies within the part."""
    last, end = part.end_lineno or part.lineno, part.end_col_offset or 0
    if sys.version_info < (3, 11):
        return part.lineno <= row and end_row <= last
    return (part.lineno, part.col_offset) <= (row, column - 1) and (end_row, end_column - 1) <= (last, end)


def _is_span(node: ast.AST, row: int, end_row: int, column: int, end_column: int) -> bool:
    """Whether the span is that of the whole statement: CPython gives the jump of a test that span."""
    if not isinstance(node, (ast.If, ast.While, ast.Assert, ast.IfExp, ast.BoolOp)):
        return False
    return (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) == (
        row,
        column - 1,
        end_row,
        end_column - 1,
    )


def _steering_parts(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """The expressions of a node whose truth or integer value decides what Python does next."""
    if isinstance(node, (ast.If, ast.IfExp)):
        return [("if", node.test)]
    if isinstance(node, ast.While):
        return [("while", node.test)]
    if isinstance(node, ast.Assert):
        return [("assert", node.test)]
    if isinstance(node, ast.BoolOp):
        return [("if", value) for value in node.values]
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return [("if", node)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [("if", node.operand), ("if", node)]
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return [("if", test) for generator in node.generators for test in generator.ifs]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        return [("range", node)]
    if isinstance(node, ast.Subscript):
        return [("slice" if isinstance(node.slice, ast.Slice) else "index", node)]
    return []
