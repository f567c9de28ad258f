"""The pytest plugin: fixture and marker, failures that read well, and an import that costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest, torch
from torch import nn

def unsafe(x):
    return x.sum().item()

def test_safe(capture_safe):
    net = nn.Linear(4, 4, device="cuda")
    report = capture_safe(net, torch.randn(2, 4, device="cuda"))
    assert report.operators > 0

def test_unsafe(capture_safe):
    capture_safe(unsafe, torch.randn(4, device="cuda"))

def test_ignored(capture_safe):
    capture_safe(unsafe, torch.randn(4, device="cuda"), ignore=["host-sync"])

@pytest.mark.capture_safe
def test_marked_safe():
    assert torch.ones(3, device="cuda").is_cuda

@pytest.mark.capture_safe
def test_marked_unsafe():
    if torch.ones(3, device="cuda").sum() > 0:
        pass

@pytest.mark.capture_safe(ignore=["data-dependent-branch"])
def test_marked_ignored():
    if torch.ones(3, device="cuda").sum() > 0:
        pass

@pytest.mark.capture_safe
def test_marked_own_failure():
    assert torch.ones(3, device="cuda").sum().item() == 4
"""


def pytest_on(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


def test_fixture_and_marker(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(TESTS)
    run = pytest_on(tmp_path, "--strict-markers")
    failed = sorted(line.split("::")[1].split(" ")[0] for line in run.stdout.splitlines() if line.startswith("FAILED"))
    assert failed == ["test_marked_own_failure", "test_marked_unsafe", "test_unsafe"], run.stdout + run.stderr
    assert "4 passed" in run.stdout
    assert "test_user.py:6:12: CG101 host-sync (crash)" in run.stdout
    assert "CG111 data-dependent-branch" in run.stdout
    assert "emulate.py" not in run.stdout  # the report, not graphlint's own frames


def test_the_plugin_loads_no_torch() -> None:
    code = "import sys, graphlint.pytest_plugin; print(sorted({'torch', 'libcst', 'msgspec'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
