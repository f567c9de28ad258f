"""Edits of findings -> new texts of files: all that do not overlap, checked by parsing, written whole or not at all."""

from __future__ import annotations

import ast
import difflib
import os
import warnings
from collections.abc import Iterable

import msgspec

from graphlint.files import Source, encoding_of, printable, reason
from graphlint.findings import Edit, Finding, Problem


class Fixed(msgspec.Struct, frozen=True):
    """One file with fixes applied: the text before and after (line ends are `\\n`), and how many findings that
    cures.
    """

    filename: str
    before: str
    after: str
    cured: int

    def diff(self) -> str:
        """A unified diff that `patch` reads."""
        before, after = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        lines = difflib.unified_diff(before, after, self.filename, self.filename)
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def fixed(findings: Iterable[Finding], unsafe: bool, given: dict[str, bytes] | None = None) -> list[Fixed]:
    """The files that the fixes of `findings` change; unsafe fixes only when asked for. `given` holds texts that are on
    no disk.
    """
    chosen: dict[str, list[list[Edit]]] = {}
    for finding in findings:
        fix = finding.fix
        if fix and fix.edits and (fix.safe or unsafe) and len({edit.at.filename for edit in fix.edits}) == 1:
            chosen.setdefault(fix.edits[0].at.filename, []).append(list(fix.edits))
    files = (_fixed(filename, groups, (given or {}).get(filename)) for filename, groups in sorted(chosen.items()))
    return [file for file in files if file is not None]


def _fixed(filename: str, groups: list[list[Edit]], data: bytes | None) -> Fixed | None:
    source = Source(filename, os.path.abspath(filename), "", "", data)
    before = source.text
    starts = [0]
    for line in before.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    spans: list[tuple[int, int, str]] = []
    cured = 0
    for group in groups:
        new = [_span(edit, starts) for edit in group]
        if any(_overlap(span, taken) for span in new for taken in spans if span != taken):
            continue  # the next run finds it again, on the mended text
        spans += [span for span in new if span not in spans]
        cured += 1
    after = before
    for start, end, text in sorted(spans, reverse=True):
        after = after[:start] + text + after[end:]
    return Fixed(filename, before, after, cured) if after != before and _parses(after) else None


def _span(edit: Edit, starts: list[int]) -> tuple[int, int, str]:
    at = edit.at
    start = starts[at.row - 1] + at.column - 1
    end = starts[at.end_row - 1] + at.end_column - 1 if at.end_row else start
    return start, end, edit.text


def _overlap(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    return (one[0] < other[1] and other[0] < one[1]) or one[:2] == other[:2]


def _parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def write(file: Fixed) -> Problem | None:
    """Puts the new text in place of the old one in one move; keeps encoding, line ends and mode. The problem met, if
    any.
    """
    path = os.path.realpath(file.filename)
    temporary = f"{path}.graphlint-{os.getpid()}"
    try:
        with open(path, "rb") as stream:
            data = stream.read()
        if Source(file.filename, path, "", "", data).text != file.before:
            return Problem(file.filename, 0, "has changed while it was linted and was not fixed; run again")
        text = file.after.replace("\n", "\r\n") if b"\r\n" in data else file.after
        with open(temporary, "xb") as stream:
            stream.write(text.encode(encoding_of(data)))
        os.chmod(temporary, os.stat(path).st_mode & 0o7777)
        os.replace(temporary, path)
    except (OSError, UnicodeEncodeError) as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        why = reason(error) if isinstance(error, OSError) else "the new text does not fit its encoding"
        return Problem(printable(file.filename), 0, f"can't be fixed: {why}")
    return None
