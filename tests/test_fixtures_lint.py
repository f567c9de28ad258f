"""The linter on every fixture: each marked fault is reported with its rule, and nothing else is."""

from __future__ import annotations

import pytest
from fixture_marks import Fixture, load

from graphlint import config, pipeline
from graphlint.findings import Finding

FIXTURES = load()


def findings(fixture: Fixture) -> list[Finding]:
    # what the GPU said was said by torch 2.11: verdicts are asked for that release
    settings = config.Config(root=str(fixture.root), target_torch=(2, 11), cache=False)
    return [one for one in pipeline.lint([fixture.root], settings).findings if one.severity != "note"]


def judged(fixture: Fixture) -> tuple[list[str], list[str]]:
    """What is missed and what is raised for nothing, as readable lines."""
    found = findings(fixture)
    spots = {(mark.file, mark.row): mark for mark in fixture.marks}
    wanted = {rule for mark in fixture.marks if mark.main for rule in mark.rules}
    extra, hit = [], set()
    for one in found:
        file = one.at.filename.replace("\\", "/").rpartition("/")[2]
        mark = next((spots[file, row] for row in range(one.at.row, max(one.at.end_row, one.at.row) + 1) if (file, row) in spots), None)
        if mark is None or one.name not in mark.rules:
            extra.append(f"{file}:{one.at.row} {one.name}")
        else:
            hit.add(one.name)
            hit.add((mark.file, mark.row))
    missed = [f"{mark.file}:{mark.row} {mark.rules}" for mark in fixture.marks if mark.main and (mark.file, mark.row) not in hit and not set(mark.rules) & hit]
    return missed, extra


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.name)
def test_fixture_is_reported_as_marked(fixture: Fixture) -> None:
    missed, extra = judged(fixture)
    assert not missed, f"missed: {missed}"
    assert not extra, f"raised for nothing: {extra}"


def test_the_right_programs_are_as_many_as_the_wrong_ones() -> None:
    right = [one for one in FIXTURES if one.outcome == "ok"]
    assert len(FIXTURES) >= 120
    assert len(right) * 2 >= len(FIXTURES) - 4


if __name__ == "__main__":
    for one in FIXTURES:
        missed, extra = judged(one)
        if missed or extra:
            print(f"{one.name:44s} {'MISSED ' + ' '.join(missed) if missed else ''} {'EXTRA ' + ' '.join(extra) if extra else ''}")
