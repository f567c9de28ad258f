"""After a change only what read the changed file is analysed again, and the answer is the one of a fresh run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from kit import project

from graphlint import engine, pipeline
from graphlint.config import Config
from graphlint.findings import LintResult

ENGINE = """\
import torch
from {module} import helper

graph = torch.cuda.CUDAGraph()
x = torch.zeros(8, device="cuda")
helper(x)
with torch.cuda.graph(graph):
    helper(x)
"""
SOUND = "def helper(x):\n    return x + 1\n"
FAULTY = "def helper(x):\n    return x.item()\n"


class Walks:
    """Counts the walks that were really made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        real = engine._Lint._walk_anew

        def counted(lint: engine._Lint, path: str, *rest: object) -> object:
            self.made.append(os.path.basename(path))
            return real(lint, path, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(engine._Lint, "_walk_anew", counted)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test keeps its cache in its own folder, whatever the caller has set."""
    monkeypatch.delenv("GRAPHLINT_CACHE_DIR", raising=False)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Walks:
    return Walks(monkeypatch)


def lint(root: Path) -> LintResult:
    """A run with the cache; it must say what a run without says."""
    result = pipeline.lint(root, Config(root=str(root)))
    assert result == pipeline.lint(root, Config(root=str(root), cache=False))
    return result


def made(root: Path, walks: Walks) -> set[str]:
    """The files that walks began in, in a run with the cache."""
    walks.made.clear()
    pipeline.lint(root, Config(root=str(root)))
    return set(walks.made)


def two(root: Path) -> None:
    """Two programs of their own, long untouched."""
    project(root, {"a.py": ENGINE.format(module="h"), "h.py": SOUND, "b.py": ENGINE.format(module="k"), "k.py": FAULTY})
    for path in root.glob("*.py"):
        os.utime(path, (time.time() - 100, time.time() - 100))


def test_only_what_read_the_changed_file_is_walked_again(tmp_path: Path, walks: Walks) -> None:
    two(tmp_path)
    assert made(tmp_path, walks) == {"a.py", "b.py"}
    assert made(tmp_path, walks) == set()
    project(tmp_path, {"h.py": SOUND + "# changed\n"})
    assert made(tmp_path, walks) == {"a.py"}
    project(tmp_path, {"new.py": "x = 1\n"})
    assert made(tmp_path, walks) == set()


def test_the_answer_is_that_of_a_fresh_run(tmp_path: Path) -> None:
    two(tmp_path)
    assert [finding.at.filename[-4:] for finding in lint(tmp_path).findings] == ["k.py"]
    project(tmp_path, {"h.py": FAULTY})
    assert [finding.at.filename[-4:] for finding in lint(tmp_path).findings] == ["h.py", "k.py"]
    project(tmp_path, {"k.py": SOUND})
    assert [finding.at.filename[-4:] for finding in lint(tmp_path).findings] == ["h.py"]


def test_a_module_that_appears_is_seen(tmp_path: Path) -> None:
    project(tmp_path, {"a.py": ENGINE.format(module="later")})
    assert not lint(tmp_path).findings
    project(tmp_path, {"later.py": FAULTY})
    assert len(lint(tmp_path).findings) == 1
    project(tmp_path, {"later/__init__.py": SOUND})  # a package wins over the module beside it
    assert not lint(tmp_path).findings


def test_a_broken_file_is_complained_about_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SMALL", 0)  # as in a large project, where only what regions reach is parsed
    two(tmp_path)
    project(tmp_path, {"h.py": "def helper(x:\n"})
    assert [problem.filename[-4:] for problem in lint(tmp_path).problems] == ["h.py"]
    project(tmp_path, {"k.py": SOUND + "# changed\n"})
    assert [problem.filename[-4:] for problem in lint(tmp_path).problems] == ["h.py"]


def test_settings_that_change_verdicts_are_part_of_the_key(tmp_path: Path, walks: Walks) -> None:
    two(tmp_path)
    made(tmp_path, walks)
    walks.made.clear()
    pipeline.lint(tmp_path, Config(root=str(tmp_path), target_torch=(2, 9)))
    assert set(walks.made) == {"a.py", "b.py"}
    walks.made.clear()
    pipeline.lint(tmp_path, Config(root=str(tmp_path), ignore=("CG1",)))
    assert not walks.made
