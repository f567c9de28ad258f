"""A few lines of source with the fault underlined, aligned in any terminal."""

from __future__ import annotations

import unicodedata

from graphlint.findings import Place
from graphlint.report.view import View

WIDTH = 140  # longer lines are clipped around the fault
MAX_ROWS = 4  # of a fault that spans many lines, so many are shown
_TAB = 4


def frame(at: Place, view: View, label: str = "") -> list[str]:
    """The lines of the frame, without colour: the row above, the fault, carets under it with `label` behind; empty
    without source.
    """
    text = view.line(at.filename, at.row)
    if not text.strip():
        return []
    rows = range(at.row, min(max(at.row, at.end_row), at.row + MAX_ROWS - 1) + 1)
    gutter = len(str(rows[-1]))
    blank = f"{'':{gutter}} |"
    out = [blank]
    above = view.line(at.filename, at.row - 1)
    if above.strip():
        out.append(f"{at.row - 1:>{gutter}} | {_clip(_clean(above), 0)}")
    for row in rows:
        line = view.line(at.filename, row)
        start, end = _span(at, row, line)
        shift = _shift(line, start, end)
        out.append(f"{row:>{gutter}} | {_clip(_clean(line), shift)}")
        carets = "^" * max(1, _width(line[start:end]))
        last = label if row == rows[-1] else ""
        out.append(f"{blank} {' ' * (_width(line[:start]) - shift)}{carets[:WIDTH]} {last}".rstrip())
    return [*out, blank]


def one_line(text: str) -> str:
    """A line of source as part of a sentence: no indentation, no control characters, not too long."""
    text = _clean(text.strip())
    return text if len(text) <= 80 else text[:77] + "..."


def _span(at: Place, row: int, line: str) -> tuple[int, int]:
    """First and last character to underline on one row, from 0."""
    start = at.column - 1 if row == at.row else len(line) - len(line.lstrip())
    end = at.end_column - 1 if row == at.end_row else len(line.rstrip())
    start = min(max(start, 0), len(line))
    return start, max(end, start + 1) if at.end_row else start + 1


def _clean(text: str) -> str:
    """Tabs as blanks; characters that would move the cursor or colour the terminal as their escapes."""
    text = text.replace("\t", " " * _TAB)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _width(text: str) -> int:
    """Columns that a terminal needs for `text`; East Asian wide characters need two."""
    text = _clean(text)
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _shift(line: str, start: int, end: int) -> int:
    """How many columns to leave out at the left so that the fault of a very long line is seen."""
    if _width(line) <= WIDTH or _width(line[:end]) <= WIDTH:
        return 0
    return max(0, _width(line[:start]) - WIDTH // 3)


def _clip(text: str, shift: int) -> str:
    shown = text[shift : shift + WIDTH]
    return shown + "..." if len(text) > shift + WIDTH else shown
