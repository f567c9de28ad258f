"""Syntax newer than the running Python: the file is still read, and every row and column stays."""

from __future__ import annotations

import ast
import sys

import pytest

from graphlint import newer, summary

NEWER = """import torch
type Pair[T] = tuple[T, T]
class Box[T: int]:
    def get[U](self, x: U) -> U:
        try:
            y = x.item()
        except ValueError, TypeError:
            y = 0
        return f"{self.names["a"]} {y}"
"""


def test_what_stays_keeps_its_rows_and_columns() -> None:
    blanked = newer.blank_newer_syntax(NEWER)
    assert blanked is not None
    assert [len(row) for row in blanked.split("\n")] == [len(row) for row in NEWER.split("\n")]
    assert blanked.split("\n")[5] == NEWER.split("\n")[5]
    ast.parse(blanked, feature_version=(3, 10))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python knows all of it; the blanking is tested above")
def test_a_summary_is_made_of_it() -> None:
    made = summary.read("box.py", "box", NEWER)
    assert [type(stmt).__name__ for stmt in made.body] == ["Import", "Assign", "DefineClass"]


def test_text_that_is_no_python_is_refused() -> None:
    assert newer.blank_newer_syntax("def (:\n") is None
    with pytest.raises(summary.SourceError) as refused:
        summary.read("x.py", "x", "a = 1\ndef (:\n")
    assert refused.value.row == 2


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_what_stands_behind_it_does_not_move(text: str) -> None:
    marked = text + "marker(1)\n"
    older = newer.blank_newer_syntax(marked)
    assert older is not None
    assert ast.get_source_segment(marked, ast.parse(older).body[-1].value) == "marker(1)"  # type: ignore[attr-defined]


def test_what_would_overflow_the_parser_is_not_handed_to_it() -> None:
    assert newer.blank_newer_syntax("x = " + "(" * 5000 + ")" * 5000 + "\n") is None
