"""`graphlint dry-run`: a step by name, a program by path, exit codes, and mistakes told in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = """
import torch

def unsafe():
    return torch.ones(3, device="cuda").sum().item()

def build(device="cuda"):
    x = torch.ones(3, device=device)
    return (lambda x: x * 2), (x,)

def broken():
    raise ValueError("no data")

number = 3
"""

SCRIPT = """
import torch
x = torch.ones(3, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
graph.replay()
print(y.sum().item())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from graphlint.runtime.cli_dryrun import dry_run_command; dry_run_command()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=240
    )


def test_a_step_with_a_fault(folder: Path) -> None:
    run = command(folder, "steps:unsafe")
    assert run.returncode == 1
    assert "steps.py:5:12: CG101 host-sync (crash)" in run.stdout and "1 violation found" in run.stdout
    assert command(folder, "steps:unsafe", "--exit-zero").returncode == 0


def test_a_builder_and_json(folder: Path) -> None:
    run = command(folder, "steps:build", "--output-format", "json", "-o", "report.json")
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    assert json.loads((folder / "report.json").read_text())["findings"] == []


def test_a_script(folder: Path) -> None:
    run = command(folder, "script.py", "--output-format", "json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout)["regions"] == 1


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing:here", "`nothing` can't be imported"),
        ("steps:here", "`steps` has no `here`"),
        ("steps:number", "is no callable but a int"),
        ("steps", "names no callable"),
        ("steps:broken", "no data"),
        ("missing.py", "names no callable"),
    ],
)
def test_mistakes_are_one_line(folder: Path, target: str, words: str) -> None:
    run = command(folder, target)
    assert run.returncode == 2 and words in run.stderr
    assert "Traceback" not in run.stderr and len(run.stderr.strip().splitlines()) == 1
