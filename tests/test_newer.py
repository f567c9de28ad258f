"""Syntax newer than the running Python: the file is still read, and every row and column stays."""

from __future__ import annotations

import ast
import sys

import pytest

from graphlint import newer, summary

NEWER = '''import torch
type Pair[T] = tuple[T, T]
class Box[T: int]:
    def get[U](self, x: U) -> U:
        try:
            y = x.item()
        except ValueError, TypeError:
            y = 0
        return f"{self.names["a"]} {y}"
'''


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
