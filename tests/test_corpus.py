"""The whole standard library and everything installed beside us: no crash, no hang, one line for each file that is no
Python. Minutes; run by CI.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from kit import command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["stdlib", "purelib"])
def test_a_whole_installation_is_linted(tmp_path: Path, name: str) -> None:
    folder = sysconfig.get_path(name)
    done = command(folder, "--output-format", "concise", "--cache-dir", tmp_path, cwd=tmp_path, timeout=900)
    assert done.returncode in (0, 1, 2), done.stderr[-2000:]
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr
    assert all(": error: " in line for line in done.stderr.splitlines())
    assert " files" in done.stdout
    again = command(folder, "--output-format", "concise", "--cache-dir", tmp_path, cwd=tmp_path, timeout=900)
    assert (again.returncode, again.stdout, again.stderr) == (done.returncode, done.stdout, done.stderr)


def test_every_file_of_the_standard_library_is_parsed(tmp_path: Path) -> None:
    """One by one, since files that no region reaches are not parsed in a large project."""
    from graphlint import discover, pipeline
    from graphlint.config import Config

    sources, problems = discover.discover([sysconfig.get_path("stdlib")], Config(root=str(tmp_path)))
    refused = [problem for source in sources.linted if (problem := pipeline.syntax_problem(source))]
    assert len(sources.linted) > 500 and not problems
    # what its own tests keep broken on purpose (`bad_coding.py`, lib2to3's Python 2) and nothing else
    assert all("/test" in problem.filename or "lib2to3" in problem.filename for problem in refused), refused
