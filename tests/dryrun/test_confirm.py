"""Lint and run joined: each static finding is confirmed, not seen or not reached."""

from __future__ import annotations

import json
import subprocess
import sys
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


def test_annotate_notes_and_counts(tmp_path: Path, report: Path) -> None:
    step = tmp_path / "step.py"
    noted, counts = annotate([finding(step, 7), finding(step, 3)], report)
    assert [item.related[-1].message for item in noted] == [
        "the dry run never reached this line",
        "confirmed by the dry run",
    ]
    assert counts == "1 confirmed, 0 not seen, 1 not reached"


@pytest.mark.parametrize("text", ["", "[]", '{"findings": []}'])
def test_a_bad_report_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfirmError, match=r"bad\.json"):
        confirm([], path)
    with pytest.raises(ConfirmError):
        confirm([], tmp_path / "missing.json")


STEP = """
import torch

def step(x):
    total = x.sum().item()
    if False:
        x.cpu()
    return total

def main():
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x)

if __name__ == "__main__":
    main()
"""


def test_check_joins_lint_and_run(tmp_path: Path) -> None:
    """The whole way: a dry run writes its report, the linter marks its findings with it."""
    (tmp_path / "step.py").write_text(STEP)
    graphlint = [sys.executable, "-m", "graphlint"]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 240}
    ran = subprocess.run([*graphlint, "dry-run", "step.py", "--output-format", "json", "-o", "run.json"], **options)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    checked = subprocess.run([*graphlint, "check", "step.py", "--confirm", "run.json", "--no-cache"], **options)
    assert checked.returncode == 1 and "confirmed by the dry run" in checked.stdout, checked.stdout + checked.stderr
    assert "1 confirmed" in checked.stderr
    bad = subprocess.run([*graphlint, "check", "step.py", "--confirm", "step.py", "--no-cache"], **options)
    assert bad.returncode == 2 and "step.py" in bad.stderr and "Traceback" not in bad.stderr
