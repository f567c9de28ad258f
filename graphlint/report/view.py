"""What a report needs beside the findings: the source lines, the folder that paths count from, and how it may look."""

from __future__ import annotations

import os
import re

from graphlint.files import Source


class View:
    """Source lines by shown file name, read once, and the wishes of the reader.

    `base` is the folder that URIs count from; `given` holds texts that are on no disk (standard input).
    """

    def __init__(
        self, base: str = "", colour: bool = False, verbose: bool = False, given: dict[str, bytes] | None = None
    ) -> None:
        self.base = base or os.getcwd()
        self.colour = colour
        self.verbose = verbose
        self._given = given or {}
        self._lines: dict[str, list[str]] = {}

    def lines(self, filename: str) -> list[str]:
        """All lines of a file; none when it can't be read any more."""
        if filename not in self._lines:
            source = Source(filename, os.path.abspath(filename), "", "", self._given.get(filename))
            self._lines[filename] = source.lines()
        return self._lines[filename]

    def line(self, filename: str, row: int) -> str:
        """One line, without its end; empty when there is none."""
        lines = self.lines(filename)
        return lines[row - 1] if 0 < row <= len(lines) else ""

    def relative(self, filename: str) -> str:
        """The path from `base` with forward slashes; absolute when it lies elsewhere."""
        path = os.path.abspath(filename)
        inner = os.path.relpath(path, self.base)
        return (path if inner.startswith(os.pardir) else inner).replace(os.sep, "/")

    def scope(self, filename: str, row: int) -> str:
        """The dotted names of the functions and classes around a line, told by indentation: `Decoder.step`."""
        names: list[str] = []
        limit = _indent(self.line(filename, row))
        for line in reversed(self.lines(filename)[: row - 1]):
            found = re.match(r"(\s*)(?:async\s+def|def|class)\s+(\w+)", line)
            if found and _indent(line) < limit:
                limit = _indent(line)
                names.insert(0, found.group(2))
            if not limit:
                break
        return ".".join(names)


def _indent(line: str) -> int:
    expanded = line.expandtabs(8)
    return len(expanded) - len(expanded.lstrip())
