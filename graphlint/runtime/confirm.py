"""Lint and run joined: which findings of the linter did a dry run confirm, which lines did it run without a fault,
which did it never reach?

Imports no torch: a report written on one machine is read on another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from graphlint.findings import Finding, Related

Status = Literal["confirmed", "not seen", "not reached"]

_WORDS = {
    "confirmed": "confirmed by the dry run",
    "not seen": "the dry run ran this line and saw no fault",
    "not reached": "the dry run never reached this line",
}


class ConfirmError(ValueError):
    """The report of a dry run can't be read; the message names the file and what to do."""


class Confirmed(msgspec.Struct, frozen=True):
    """A static finding and what the dry run says of it."""

    finding: Finding
    status: Status


class Report(msgspec.Struct, frozen=True):
    """What is needed of a dry run's JSON: the faults by place, and the lines that ran."""

    faults: dict[tuple[str, int], set[str]]
    executed: dict[str, set[int]]

    def status(self, finding: Finding) -> Status:
        """How the dry run saw the finding's lines: a fault of the same family there, or on the way there, confirms
        it."""
        name = _key(finding.at.filename)
        rows = range(finding.at.row, max(finding.at.end_row, finding.at.row) + 1)
        if any(
            finding.family in self.faults.get((name, row), ()) or finding.code in self.faults.get((name, row), ())
            for row in rows
        ):
            return "confirmed"
        lines = self.executed.get(name, set())
        return "not seen" if any(row in lines for row in rows) else "not reached"


def read(path: str | Path) -> Report:
    """Reads what `graphlint dry-run --output-format json` wrote. Raises `ConfirmError`."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfirmError(
            f"{path}: {error}; write the report with `graphlint dry-run ... --output-format json -o {path}`"
        ) from error
    if not isinstance(data, dict) or "executed" not in data or "findings" not in data:
        raise ConfirmError(f"{path}: this is no report of `graphlint dry-run`")
    faults: dict[tuple[str, int], set[str]] = {}
    for finding in data["findings"]:
        for filename, row in _places(finding):
            faults.setdefault((_key(filename), row), set()).update((finding["family"], finding["code"]))
    return Report(faults, {_key(filename): set(rows) for filename, rows in data["executed"].items()})


def _places(finding: dict[str, Any]) -> Iterable[tuple[str, int]]:
    """The fault's own line, and the lines that lead there."""
    yield finding["filename"], finding["location"]["row"]
    for step in finding.get("trace", ()):
        yield step["filename"], step["row"]


def _key(filename: str) -> str:
    """Files are the same when their real paths are."""
    return os.path.realpath(filename)


def confirm(findings: Iterable[Finding], path: str | Path) -> list[Confirmed]:
    """Every finding with its status. Raises `ConfirmError` for a report that can't be read."""
    report = read(path)
    return [Confirmed(finding, report.status(finding)) for finding in findings]


def annotate(findings: Iterable[Finding], path: str | Path) -> tuple[list[Finding], str]:
    """The findings, each with a note of its status, and one line that counts them. Raises `ConfirmError`."""
    judged = confirm(findings, path)
    noted = [
        msgspec.structs.replace(
            item.finding,
            related=(
                *item.finding.related,
                Related(item.finding.at.filename, item.finding.at.row, _WORDS[item.status]),
            ),
        )
        for item in judged
    ]
    counts = {status: sum(item.status == status for item in judged) for status in _WORDS}
    return noted, ", ".join(f"{count} {status}" for status, count in counts.items())
