"""Files whose syntax is newer than the running Python.

libcst reads them; what this Python's own parser does not know is blanked in place, so that every row and column stays,
and the file goes the common way. Blanked are type
parameters (3.12), `type` statements (3.12), lazy imports (3.15), f-strings with reused quotes (3.12), template strings
(3.14) and unparenthesised `except A, B` (3.14): none of them matters to a capture, except
what stands inside such a string, which is lost for that file.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from graphlint.files import MAX_BRACKETS, bracket_depth

if TYPE_CHECKING:
    import libcst

_DEFINITION = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+\w+[ \t]*(?=\[)", re.M)
_ALIAS = re.compile(r"^([ \t]*)type([ \t]+)(\w+)(?=[ \t]*[\[=])", re.M)
_LAZY = re.compile(r"^([ \t]*)lazy ([ \t]*)(?=(?:import|from)\b)", re.M)
_EXCEPT = re.compile(r"^([ \t]*except[ \t]*\*?)[ \t]+([\w.]+(?:[ \t]*,[ \t]*[\w.]+)+)[ \t]*:", re.M)


def blank_newer_syntax(text: str) -> str | None:
    """The text with newer syntax blanked, rows and columns kept; None when it is no Python for libcst either."""
    if bracket_depth(text) > MAX_BRACKETS:  # libcst's parser would overflow the stack and take the process with it
        return None
    import libcst  # 0.3 s, for the few files that need it

    try:
        module = libcst.parse_module(text)
    except (libcst.ParserSyntaxError, RecursionError, ValueError):
        return None
    text = _blank_strings(text, module)
    text = _blank_parameters(text)
    text = _ALIAS.sub(
        lambda found: f"{found[1]}type{'_' * len(found[2])}{found[3]}", text
    )  # another name, the same extent
    text = _LAZY.sub(r"\1pass;\2", text)  # as long as before
    return _EXCEPT.sub(_first_exception, text)


def _first_exception(found: re.Match[str]) -> str:
    """`except A, B:` -> `except A   :`, as long as before."""
    first = found[2].split(",")[0].rstrip()
    kept = f"{found[1]} {first}"
    return kept + " " * (len(found[0]) - 1 - len(kept)) + ":"


def _blank_parameters(text: str) -> str:
    """`def f[T: int](x)` -> `def f        (x)`; rows in a long list of parameters become a continued line."""
    pieces, last = [], 0
    for found in _DEFINITION.finditer(text):
        end = _closing(text, found.end())
        pieces += [text[last : found.end()], _spaces(text[found.end() : end])]
        last = end
    return "".join([*pieces, text[last:]])


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        depth += {"[": 1, "]": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    return start


def _spaces(text: str) -> str:
    return "\\\n".join(" " * len(row) for row in text.split("\n"))


def _blank_strings(text: str, module: libcst.Module) -> str:
    """Formatted strings that this Python refuses become plain strings of the same extent."""
    import libcst

    refused: set[str] = set()

    class Finder(libcst.CSTVisitor):
        def on_visit(self, node: libcst.CSTNode) -> bool:
            if type(node).__name__ in ("FormattedString", "TemplatedString"):
                code = module.code_for_node(node)
                if not _understood(code):
                    refused.add(code)
                return False
            return True

    module.visit(Finder())
    for code in sorted(refused, key=len, reverse=True):
        text = text.replace(code, _plain(code))
    return text


def _understood(code: str) -> bool:
    try:
        ast.parse(code, mode="eval")
    except (SyntaxError, ValueError):
        return False
    return True


def _plain(code: str) -> str:
    """A plain string as long as `code`, over as many rows."""
    if "\n" not in code:
        return '"' + "x" * (len(code) - 2) + '"'
    rows = code.split("\n")
    first = '"""' + "x" * max(len(rows[0]) - 3, 0)
    last = "x" * max(len(rows[-1]) - 3, 0) + '"""'
    return "\n".join([first, *("x" * len(row) for row in rows[1:-1]), last])
