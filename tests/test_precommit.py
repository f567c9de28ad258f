"""The hook, with the real pre-commit on a scratch repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kit import project

TOP = Path(__file__).parent.parent
HOOK = yaml.safe_load((TOP / ".pre-commit-hooks.yaml").read_text())[0]

ENGINE = """\
import torch
from model import Decoder

decoder = Decoder()
graph = torch.cuda.CUDAGraph()
x = torch.zeros(8, device="cuda")
with torch.cuda.graph(graph):
    decoder.step(x)
"""
MODEL = """\
class Decoder:
    def step(self, x):
        return x * {factor}
"""


def git(repo: Path, *args: str) -> None:
    """Runs git with a name of its own, whatever the machine has configured."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *args], cwd=repo, check=True, capture_output=True)


def hook(repo: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs the hook on what is staged."""
    env = {**os.environ, "PRE_COMMIT_HOME": str(repo.parent / "pre-commit"), "PRE_COMMIT_COLOR": "never"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env.pop("GRAPHLINT_CACHE_DIR", None)
    return subprocess.run(
        [sys.executable, "-m", "pre_commit", "run", *args],
        cwd=repo,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with a sound program and the hook, run from the environment at hand so that no network is needed."""
    entry = {**HOOK, "language": "system"}
    config = {"repos": [{"repo": "local", "hooks": [entry]}]}
    root = project(
        tmp_path / "repo",
        {"pyproject.toml": "", "engine.py": ENGINE, "model.py": MODEL.format(factor="2"), "old/x.py": "x.item()\n"},
    )
    (root / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "first")
    return root


def test_a_sound_change_passes(repo: Path) -> None:
    project(repo, {"model.py": MODEL.format(factor="3")})
    git(repo, "add", ".")
    done = hook(repo)
    assert done.returncode == 0 and "Passed" in done.stdout, done.stdout


def test_a_fault_in_a_changed_file_is_found_though_its_capture_is_elsewhere(repo: Path) -> None:
    project(repo, {"model.py": MODEL.format(factor="x.max().item()")})
    git(repo, "add", ".")
    done = hook(repo)
    assert done.returncode == 1 and "model.py:3:20: CG101 host-sync" in done.stdout, done.stdout
    assert "engine.py:7" in done.stdout


def test_a_fault_elsewhere_is_not_this_changes_business(repo: Path) -> None:
    project(repo, {"model.py": MODEL.format(factor="x.max().item()")})
    git(repo, "add", ".")
    git(repo, "commit", "-m", "a fault slips in")
    project(repo, {"other.py": "y = 1\n"})
    git(repo, "add", ".")
    assert hook(repo).returncode == 0


def test_a_changed_capture_that_leads_to_an_old_fault_is_found(repo: Path) -> None:
    project(repo, {"model.py": MODEL.format(factor="x.max().item()")})
    git(repo, "add", ".")
    git(repo, "commit", "-m", "a fault slips in")
    project(repo, {"engine.py": ENGINE + "# changed\n"})
    git(repo, "add", ".")
    assert "model.py:3:20: CG101" in hook(repo).stdout


def test_excluded_files_stay_excluded_though_the_hook_names_them(repo: Path) -> None:
    project(repo, {"graphlint.toml": 'exclude = ["model.py"]\n', "model.py": MODEL.format(factor="x.max().item()")})
    git(repo, "add", ".")
    assert hook(repo).returncode == 0


def test_a_change_without_python_is_skipped(repo: Path) -> None:
    project(repo, {"notes.md": "words"})
    git(repo, "add", ".")
    assert "Skipped" in hook(repo).stdout


@pytest.mark.slow
def test_the_hook_as_others_install_it(repo: Path) -> None:
    """From a clone of this repository, in an environment that pre-commit builds."""
    clone = repo.parent / "graphlint"
    subprocess.run(["git", "clone", "-q", str(TOP), str(clone)], check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=clone, check=True, capture_output=True, text=True
    ).stdout.strip()
    config = {"repos": [{"repo": str(clone), "rev": head, "hooks": [{"id": "graphlint"}]}]}
    (repo / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    project(repo, {"model.py": MODEL.format(factor="x.max().item()")})
    git(repo, "add", ".")
    done = hook(repo)
    assert done.returncode == 1 and "model.py:3:20: CG101 host-sync" in done.stdout, done.stdout + done.stderr
