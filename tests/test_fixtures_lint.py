"""The linter on every fixture: each marked fault is reported with its rule, and nothing else is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fixture_marks import Fixture, load

from graphlint import config, pipeline
from graphlint.findings import Finding

FIXTURES = load()


def findings(fixture: Fixture, folder: Path) -> list[Finding]:
    """Lints a copy that stands by itself, as a project of its own, for the release that the GPU ran (torch 2.11)."""
    home = folder / fixture.name
    if fixture.root.is_dir():
        shutil.copytree(fixture.root, home, dirs_exist_ok=True)
    else:
        home.mkdir(exist_ok=True)
        shutil.copy(fixture.root, home)
    (home / "graphlint.toml").write_text('target-torch = "2.11"\n')
    settings = config.Config(root=str(home), target_torch=(2, 11), cache=False)
    return [one for one in pipeline.lint([home], settings).findings if one.severity != "note"]


def judged(fixture: Fixture, folder: Path) -> tuple[list[str], list[str]]:
    """What is missed and what is raised for nothing, as readable lines."""
    found = findings(fixture, folder)
    spots = {(mark.file, mark.row): mark for mark in fixture.marks}
    extra, hit = [], set()
    for one in found:
        file = one.at.filename.replace("\\", "/").rpartition("/")[2]
        mark = next(
            (
                spots[file, row]
                for row in range(one.at.row, max(one.at.end_row, one.at.row) + 1)
                if (file, row) in spots
            ),
            None,
        )
        if mark is None or one.name not in mark.rules:
            extra.append(f"{file}:{one.at.row} {one.name}")
        else:
            hit.add(one.name)
            hit.add((mark.file, mark.row))
    missed = [
        f"{mark.file}:{mark.row} {mark.rules}"
        for mark in fixture.marks
        if mark.main and (mark.file, mark.row) not in hit and not set(mark.rules) & hit
    ]
    return missed, extra


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.name)
def test_fixture_is_reported_as_marked(fixture: Fixture, tmp_path: Path) -> None:
    missed, extra = judged(fixture, tmp_path)
    assert not missed, f"missed: {missed}"
    assert not extra, f"raised for nothing: {extra}"


def test_the_right_programs_are_as_many_as_the_wrong_ones() -> None:
    right = [one for one in FIXTURES if one.outcome == "ok"]
    assert len(FIXTURES) >= 120
    assert len(right) * 2 >= len(FIXTURES) - 4
