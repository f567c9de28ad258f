"""Comments that say "this is meant": which findings they silence, and which of them silence nothing.

    # graphlint: ignore[host-sync] -- reason      these rules (names, families or codes)
    # graphlint: ignore -- reason                 every rule
    # noqa: CG101                                 these codes; a bare `# noqa` means other linters
    # gpu-sync-ok: reason                         vLLM's word for a synchronisation that is meant

A comment holds for the line it ends, for the whole statement when it ends one, and for the next line when it stands
alone. It silences a fault on that line
and every finding whose way from the region leads through a call on that line.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator

import msgspec

from graphlint import rulebook
from graphlint.config import Config
from graphlint.files import Source, Sources
from graphlint.findings import Edit, Finding, Fix, LintResult, Place, Suppressed

UNUSED, NO_REASON = "unused-suppression", "suppression-without-reason"
SYNC_FAMILIES = ("host-sync", "data-control-flow", "dynamic-shape", "dynamic-alloc", "varlen-attention")
_NOQA = re.compile(rb"noqa\s*:[^\n]*CG\d", re.IGNORECASE)
_COMMENT = re.compile(
    r"#\s*(?:graphlint:\s*ignore\b\s*(?P<rules>\[[^\]]*\])?(?:\s*--\s*(?P<reason>[^#]*[^#\s]))?"
    r"|noqa\s*:\s*(?P<codes>[A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*)(?:\s*--\s*(?P<noqa_reason>[^#]*[^#\s]))?"
    r"|gpu-sync-ok\b\s*:?\s*(?P<sync>[^#]*[^#\s])?)",
    re.IGNORECASE,
)


class Suppression(msgspec.Struct, frozen=True):
    """One such comment: the rows it holds for, what it names (nothing: every rule), and its reason."""

    at: Place
    cut: Place  # what to remove when the comment goes: with the blanks before it
    first_row: int
    last_row: int
    rules: tuple[str, ...]
    reason: str
    foreign: bool = False  # another tool's word, so not ours to call unused or without reason

    def silences(self, finding: Finding) -> bool:
        """Whether it speaks of this kind of finding."""
        return not self.rules or any(rule in (finding.code, finding.name, finding.family) for rule in self.rules)


def apply(result: LintResult, sources: Sources, config: Config) -> LintResult:
    """Takes the silenced findings out (they move to `suppressed`) and reports suppressions that are unused or lack a
    reason.
    """
    book = _Book(sources, config)
    kept, silenced = [], []
    for finding in result.findings:
        by = book.silencer(finding)
        if by:
            silenced.append(Suppressed(finding, by.reason, by.at.filename, by.at.row))
        else:
            kept.append(finding)
    complete = not result.problems and all(region.resolved for region in result.regions)
    kept += book.complaints(complete)
    return msgspec.structs.replace(result, findings=tuple(kept), suppressed=tuple(silenced))


class _Book:
    """All suppressions of a run, by file and row; remembers which were used."""

    def __init__(self, sources: Sources, config: Config) -> None:
        self._sources = sources
        self._config = config
        self._used: set[Suppression] = set()
        self._by_row: dict[str, dict[int, list[Suppression]]] = {}

    def silencer(self, finding: Finding) -> Suppression | None:
        """The suppression that silences a finding, at the fault first, then along the way that leads there."""
        places = [
            (finding.at.filename, row) for row in range(finding.at.row, max(finding.at.row, finding.at.end_row) + 1)
        ]
        places += [(step.filename, step.row) for step in reversed(finding.trace)]
        for filename, row in places:
            for suppression in self._of(filename).get(row, ()):
                if suppression.silences(finding) and self._takes_effect(suppression):
                    self._used.add(suppression)
                    return suppression
        return None

    def complaints(self, complete: bool) -> Iterator[Finding]:
        """Suppressions of linted files that say nothing: unknown rules, missing reasons, and, where all was seen,
        unused ones.
        """
        for source in self._sources.linted:
            for suppression in _distinct(self._of(source.path).values()):
                if suppression.foreign:
                    continue
                if not self._takes_effect(suppression):
                    yield _complaint(NO_REASON, suppression, ", ".join(suppression.rules) or "every rule")
                elif unknown := [rule for rule in suppression.rules if not _known(rule)]:
                    yield _complaint(UNUSED, suppression, f"{unknown[0]}, which is no rule")
                elif complete and suppression not in self._used:
                    yield _complaint(UNUSED, suppression, ", ".join(suppression.rules) or "anything")

    def _takes_effect(self, suppression: Suppression) -> bool:
        return bool(suppression.reason) or suppression.foreign or not self._config.require_reason

    def _of(self, filename: str) -> dict[int, list[Suppression]]:
        if filename not in self._by_row:
            source = self._sources.by_path(filename)
            rows: dict[int, list[Suppression]] = {}
            for suppression in read(source) if source else ():
                for row in range(suppression.first_row, suppression.last_row + 1):
                    rows.setdefault(row, []).append(suppression)
            self._by_row[filename] = rows
        return self._by_row[filename]


def _distinct(rows: Iterable[list[Suppression]]) -> list[Suppression]:
    return list(dict.fromkeys(suppression for row in rows for suppression in row))


def _known(rule: str) -> bool:
    return rule in rulebook.FAMILIES or rulebook.load().get(rule) is not None


def _complaint(name: str, suppression: Suppression, what: str) -> Finding:
    rule = rulebook.load().by_name[name]
    fix = Fix("remove the comment", (Edit(suppression.cut, ""),), safe=True) if name == UNUSED else None
    return Finding(
        rule.code, name, rule.family, rule.severity, rule.message.format(value=what), rule.help, suppression.at, fix=fix
    )


def read(source: Source) -> list[Suppression]:
    """The suppressions in one file; strings that look like comments are none. A file that can't be split into tokens
    has none.
    """
    if not _may_speak(source.data):
        return []
    found: list[Suppression] = []
    try:
        _scan(source, found)
    except (tokenize.TokenError, SyntaxError, ValueError):  # what was found before the fault still holds
        pass
    return found


class _Comment(msgspec.Struct, frozen=True):
    """A comment before it is known which rows it holds for."""

    row: int
    column: int
    text: str
    code: int  # where the code before it ends; 0 when it stands alone


def _may_speak(data: bytes) -> bool:
    """Whether a file needs to be split into tokens at all; plain substrings first, for a project has thousands of
    files.
    """
    return b"graphlint:" in data or b"gpu-sync-ok" in data or (b"CG" in data and _NOQA.search(data) is not None)


def _scan(source: Source, found: list[Suppression]) -> None:
    begun = 0  # the row where the statement at hand begins
    inside: list[_Comment] = []  # comments of that statement
    above: list[_Comment] = []  # comments between statements, which hold for the next line of code
    for kind, text, (row, column), _, line in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if kind == tokenize.COMMENT:
            comment = _Comment(row, column, text, len(line[:column].rstrip()))
            (inside if begun else above).append(comment)
        elif kind == tokenize.NEWLINE:
            for comment in inside:
                found += _parse(
                    source, comment, begun if comment.row == row else comment.row, comment.row + (not comment.code)
                )
            begun, inside = 0, []
        elif kind not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER) and not begun:
            begun = row
            for comment in above:
                found += _parse(source, comment, row, row)
            above = []


def _parse(source: Source, comment: _Comment, first: int, last: int) -> Iterator[Suppression]:
    for match in _COMMENT.finditer(comment.text):
        start = comment.column + match.start() + 1
        end = comment.column + match.end() + 1
        at = Place(source.path, comment.row, start, comment.row, end)
        cut = Place(source.path, comment.row, comment.code + 1 if match.start() == 0 else start, comment.row, end)
        if match["codes"]:
            codes = tuple(re.findall(r"CG\d+", match["codes"].upper()))
            if codes:
                yield Suppression(at, cut, first, last, codes, match["noqa_reason"] or "")
        elif "gpu-sync-ok" in match[0].lower():
            yield Suppression(at, cut, first, last, SYNC_FAMILIES, match["sync"] or "", foreign=True)
        else:
            names = re.split(r"[\s,]+", (match["rules"] or "").strip("[] "))
            yield Suppression(at, cut, first, last, tuple(name for name in names if name), match["reason"] or "")
