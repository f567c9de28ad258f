"""Lint and run joined: each static finding is confirmed, not seen or not reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphlint.findings import Finding, Place
from graphlint.runtime.confirm import ConfirmError, annotate, confirm


def finding(filename: Path, row: int, code: str = "CG101", family: str = "host-sync") -> Finding:
    return Finding(code, "host-sync", family, "crash", "waits", "keep it", Place(str(filename), row, 1, row, 9))


@pytest.fixture
def report(tmp_path: Path) -> Path:
    step = str(tmp_path / "step.py")
    data = {
        "executed": {step: [3, 4, 5]},
        "findings": [
            {
                "code": "CG101",
                "family": "host-sync",
                "filename": step,
                "location": {"row": 3, "column": 1},
                "trace": [{"filename": step, "row": 9, "name": "main"}],
            }
        ],
    }
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    return path


def test_statuses(tmp_path: Path, report: Path) -> None:
    step = tmp_path / "step.py"
    found = [
        finding(step, 4),
        finding(step, 7),
        finding(step, 3),
        finding(step, 9),
        finding(step, 3, "CG211", "stream"),
    ]
    assert [item.status for item in confirm(found, report)] == [
        "not seen",
        "not reached",
        "confirmed",
        "confirmed",  # a line on the way to the fault
        "not seen",
    ]


def test_annotate_puts_confirmed_first_and_counts(tmp_path: Path, report: Path) -> None:
    step = tmp_path / "step.py"
    noted, counts = annotate([finding(step, 7), finding(step, 3)], report)
    assert [item.at.row for item in noted] == [3, 7]
    assert noted[0].related[-1].message == "confirmed by the dry run"
    assert counts == "1 confirmed, 0 not seen, 1 not reached"


@pytest.mark.parametrize("text", ["", "[]", '{"findings": []}'])
def test_a_bad_report_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfirmError, match=r"bad\.json"):
        confirm([], path)
    with pytest.raises(ConfirmError):
        confirm([], tmp_path / "missing.json")
