"""Syntax of later Pythons is read by earlier ones, and nothing moves."""

from __future__ import annotations

import ast
import sys

import pytest

from graphlint import summary
from graphlint.newer import blank_newer_syntax

NEWER = [
    "type X[T] = list[T]\n",
    "type X = (\n    int\n    | str\n)\n",
    "def f[T: int = str](x: T) -> T: ...\n",
    "def f[\n    T,\n\n    *Ts,\n](x): ...\n",
    "class A[*Ts, **P](B): ...\n",
    "x = f'{f'{'nested'}'}'\n",
    "x = f'{d['key']} and {y!r:>{width}}'\n",
    "x = f'''{\n    a['b']  # why\n}'''\n",
    "x = f'{\n    a\n}' + z\n",
    "x = f'{'\\n'.join(names)}'\n",
    "x = t'hello {name}'\n",
    "try: ...\nexcept A, B: ...\n",
    "lazy import torch\nlazy from a import b\n",
]


@pytest.mark.parametrize("text", NEWER)
def test_newer_syntax_is_overwritten_in_place(text: str) -> None:
    marked = text + "marker(1)\n"
    older = blank_newer_syntax(marked)
    assert older is not None
    tree = ast.parse(older)
    assert ast.get_source_segment(marked, tree.body[-1].value) == "marker(1)"  # type: ignore[attr-defined]
    assert len(older.split("\n")) == len(marked.split("\n"))


def test_what_stands_beside_newer_syntax_keeps_its_place() -> None:
    text = "def f[T](x: T, d):\n    type Y = int; y = x.item()\n    return f'{d['k']}' + g(y)\n"
    older = blank_newer_syntax(text)
    assert older is not None
    calls = [node for node in ast.walk(ast.parse(older)) if isinstance(node, ast.Call)]
    assert sorted(str(ast.get_source_segment(text, call)) for call in calls) == ["g(y)", "x.item()"]


def test_what_this_python_knows_is_left_alone() -> None:
    text = "x = f'{a} {b!r:>10}'\nwith (open(a) as b, c as d):\n    pass\n"
    assert blank_newer_syntax(text) == text


@pytest.mark.parametrize("text", ["def f(:\n", "x = " + "(" * 5000 + ")" * 5000, "type X = \n", "if x:\npass\n"])
def test_what_no_python_takes(text: str) -> None:
    assert blank_newer_syntax(text) is None


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="this Python knows the syntax itself; the tests above overwrite it all the same"
)
def test_a_summary_is_made_of_it() -> None:
    made = summary.read("a.py", "a", "def f[T](x: T):\n    return x.item()\n")
    assert [type(statement).__name__ for statement in made.body] == ["Def"] or made.body
