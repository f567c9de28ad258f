"""Python newer than the running one -> text that the running one parses, with every row and column where it was.

libcst knows the grammar of later releases. What `ast` can't take is overwritten in place: type aliases and type
parameters (3.12), quotes, comments and
backslashes inside f-strings (3.12), template strings and `except` without parentheses (3.14), lazy imports (3.15).
None of them says anything about tensors, so
nothing is lost that a check would want, but for what an overwritten f-string formats.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

import libcst
from libcst.metadata import CodePosition, CodeRange, MetadataWrapper, PositionProvider

from graphlint.files import MAX_BRACKETS, bracket_depth


def blank_newer_syntax(text: str) -> str | None:
    """`text` with newer syntax overwritten; None when it is no Python of any release."""
    if bracket_depth(text) > MAX_BRACKETS:  # libcst's parser would overflow the stack and take the process with it
        return None
    try:
        wrapper = MetadataWrapper(libcst.parse_module(text), unsafe_skip_copy=True)
        places = wrapper.resolve(PositionProvider)
        found = _Finder(places)
        wrapper.module.visit(found)
    except (libcst.ParserSyntaxError, RecursionError, ValueError):
        return None
    page = _Page(text)
    for place, replacement in found.simple:
        page.overwrite(place, replacement)
    for place, inner in found.strings:
        page.mend_string(place, inner)
    return str(page)


class _Finder(libcst.CSTVisitor):
    """Collects what to overwrite, and the outermost f-strings with the string literals inside them."""

    def __init__(self, places: object) -> None:
        super().__init__()
        self._places = places
        self.simple: list[tuple[CodeRange, str]] = []
        self.strings: list[tuple[CodeRange, list[CodeRange]]] = []
        self._depth = 0  # of f-strings around the node at hand

    def _at(self, node: libcst.CSTNode) -> CodeRange:
        place: CodeRange = self._places[node]  # type: ignore[index]
        return place

    def visit_TypeAlias(self, node: libcst.TypeAlias) -> bool:
        place = self._at(node)
        if isinstance(node.semicolon, libcst.Semicolon):  # its own code; it has to stay
            behind = len(libcst.Module([]).code_for_node(node.semicolon))
            place = CodeRange(place.start, CodePosition(place.end.line, place.end.column - behind))
        self.simple.append((place, "pass"))
        return False

    def visit_TypeParameters(self, node: libcst.TypeParameters) -> bool:
        self.simple.append((self._at(node), ""))
        return False

    def visit_ExceptHandler(self, node: libcst.ExceptHandler) -> None:
        if isinstance(node.type, libcst.Tuple) and not node.type.lpar:
            self.simple.append((self._at(node.type), "()"))

    def visit_TemplatedString(self, node: libcst.TemplatedString) -> bool:
        self.simple.append((self._at(node), "''"))
        return False

    def visit_FormattedString(self, node: libcst.FormattedString) -> None:
        self._inside(node)
        if not self._depth:
            self.strings.append((self._at(node), []))
        self._depth += 1

    def leave_FormattedString(self, original_node: libcst.FormattedString) -> None:
        self._depth -= 1

    def visit_SimpleString(self, node: libcst.SimpleString) -> None:
        self._inside(node)

    def _inside(self, node: libcst.CSTNode) -> None:
        if self._depth:
            self.strings[-1][1].append(self._at(node))

    def visit_LazyImport(self, node: libcst.CSTNode) -> None:
        self._lazy(node)

    def visit_LazyImportFrom(self, node: libcst.CSTNode) -> None:
        self._lazy(node)

    def _lazy(self, node: libcst.CSTNode) -> None:
        start = self._at(node).start
        self.simple.append((CodeRange(start, CodePosition(start.line, start.column + len("lazy "))), "pass;"))


class _Page:
    """The lines of a text, overwritten in place."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def overwrite(self, place: CodeRange, replacement: str) -> None:
        """Puts `replacement` at the start of a span and blanks behind it; lines that the span breaks are joined by a
        backslash.
        """
        for row, start, end in self._rows(place):
            line = self._lines[row]
            filled = replacement.ljust(end - start)[: max(end - start, len(replacement))]
            joint = "\\" if row + 1 < place.end.line else ""
            self._lines[row] = line[:start] + filled + joint + ("" if joint else line[end:])
            replacement = ""

    def mend_string(self, place: CodeRange, inner: list[CodeRange]) -> None:
        """Makes an f-string one that this Python takes: without the literals inside it, else without anything."""
        if _parses(self._cut(place)):
            return
        for literal in inner:
            self.overwrite(literal, "0")
        if not _parses(self._cut(place)):
            self.overwrite(place, "''")

    def _rows(self, place: CodeRange) -> Iterator[tuple[int, int, int]]:
        first, last = place.start.line - 1, place.end.line - 1
        for row in range(first, last + 1):
            start = place.start.column if row == first else 0
            end = place.end.column if row == last else len(self._lines[row])
            yield row, start, end

    def _cut(self, place: CodeRange) -> str:
        return "\n".join(self._lines[row][start:end] for row, start, end in self._rows(place))


def _parses(expression: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(f"({expression})")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
