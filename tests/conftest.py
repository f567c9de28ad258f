"""Keeps what tests on a GPU came to: with GRAPHLINT_RESULTS=FOLDER each writes a row to FOLDER/tests.jsonl."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

FOLDER = os.environ.get("GRAPHLINT_RESULTS")
COMMAND = "GRAPHLINT_RESULTS=tests/gpu/results python -m pytest -m gpu tests"


def pytest_sessionstart() -> None:
    """A run begins its own file."""
    if FOLDER:
        (Path(FOLDER) / "tests.jsonl").unlink(missing_ok=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One row a test: its outcome, and why it was skipped or failed."""
    if not FOLDER or "gpu" not in report.keywords or (report.when != "call" and report.passed):
        return
    row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.skipped and isinstance(report.longrepr, tuple):
        row["why"] = report.longrepr[2]
    elif report.failed:
        row["why"] = str(report.longrepr).strip().splitlines()[-1]
    _append(Path(FOLDER) / "tests.jsonl", row)


def _append(path: Path, row: dict[str, object]) -> None:
    """Adds a row; the first one says what it all ran on."""
    if not path.exists():
        import torch

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        head = {"torch": torch.__version__, "device": name, "python": platform.python_version(), "command": COMMAND}
        path.write_text(json.dumps(head) + "\n", encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
