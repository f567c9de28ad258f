"""The nouns of a report: what a check found, where, by which way, and what to write instead.

Plain frozen values: they compare, print, pickle and serialise for free. Rows and columns count from 1; columns count
characters (code points), as editors show them. `end_column` points behind the last character.
"""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True, order=True):
    """A span of source text in one file; `filename` is as the user gave it (or relative to the current folder)."""

    filename: str
    row: int
    column: int = 1
    end_row: int = 0
    end_column: int = 0


class Step(msgspec.Struct, frozen=True):
    """One step of the way from the region to the fault: the call at `filename:row` entered `name`."""

    filename: str
    row: int
    name: str


class Related(msgspec.Struct, frozen=True):
    """A second place that the finding rests on, and why: where the value changes, where the buffer was captured."""

    filename: str
    row: int
    message: str


class RegionRef(msgspec.Struct, frozen=True):
    """The capture region a finding belongs to."""

    filename: str
    row: int
    kind: str


class Edit(msgspec.Struct, frozen=True):
    """Replace the text of `at` by `text`; an empty span inserts."""

    at: Place
    text: str


class Fix(msgspec.Struct, frozen=True):
    """Disjoint edits that cure one finding; `safe` when the meaning of the program is kept otherwise."""

    title: str
    edits: tuple[Edit, ...]
    safe: bool = False


class Finding(msgspec.Struct, frozen=True):
    """One problem: rule, place, words, the region it belongs to and the way that leads from there to the fault."""

    code: str
    name: str
    family: str
    severity: str
    message: str
    help: str
    at: Place
    region: RegionRef | None = None
    trace: tuple[Step, ...] = ()
    related: tuple[Related, ...] = ()
    fix: Fix | None = None


class Problem(msgspec.Struct, frozen=True):
    """Something graphlint could not do (a file it could not read); makes the exit code 2. `message` is one clear
    line."""

    filename: str
    row: int
    message: str


class RegionInfo(msgspec.Struct, frozen=True):
    """One capture region for `graphlint regions`.

    `kind` is what captures (`graph`, `manual`, `graphed-callable`, `compile`, `wrapper`, ...), `api` the spelling
    (`torch.cuda.graph`), `captured` what is
    captured as a short text, `resolved` whether everything that the region calls was found.
    """

    filename: str
    row: int
    end_row: int
    kind: str
    api: str
    captured: str
    resolved: bool


class Suppressed(msgspec.Struct, frozen=True):
    """A finding that a comment in the source silences, with the reason given there."""

    finding: Finding
    reason: str
    filename: str
    row: int


class LintResult(msgspec.Struct, frozen=True):
    """What `pipeline.lint` hands to the reports: sorted findings, problems, regions, and how much stayed unresolved."""

    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...] = ()
    regions: tuple[RegionInfo, ...] = ()
    files: int = 0
    unresolved: tuple[Problem, ...] = ()
    suppressed: tuple[Suppressed, ...] = ()
