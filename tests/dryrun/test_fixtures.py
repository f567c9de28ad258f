"""Every fixture as a whole program on a played device: crash and silent ones are judged at their lines, ok ones are clean.

`python tests/dryrun/test_fixtures.py [BEGINNING ...]` prints the table of `docs/dry-run.md`.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fixture_marks
from judged import Judging
from known import ELSEWHERE, KNOWN

FIXTURES = {fixture.name: fixture for fixture in fixture_marks.load() if fixture.outcome in ("crash", "silent", "ok")}
ON_CPU = sorted(set(FIXTURES) - set(ELSEWHERE))


@pytest.fixture(scope="module")
def judging(request: pytest.FixtureRequest) -> Judging:
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return Judging([FIXTURES[item.callspec.params["name"]].main for item in here])


@pytest.mark.parametrize("name", ON_CPU)
def test_fixture(name: str, judging: Judging) -> None:
    fixture = FIXTURES[name]
    judged = judging.judged(fixture.main)
    right = "clean" if fixture.outcome == "ok" else "exact"
    if name in KNOWN:
        assert judged.verdict(fixture) != right, f"{name} is judged rightly now; take it out of known.py"
    else:
        assert judged.verdict(fixture) == right, (judged.findings, fixture.marks, judged.error)


def test_what_is_known_exists() -> None:
    assert set(KNOWN) <= set(FIXTURES) and set(ELSEWHERE) <= set(FIXTURES)


def table(beginnings: tuple[str, ...]) -> str:
    """The verdicts of all fixtures whose names begin so, counted by outcome; prints those that are not judged rightly."""
    tally: Counter[tuple[str, str]] = Counter()
    chosen = {name: fixture for name, fixture in FIXTURES.items() if name.startswith(beginnings)}
    judging = Judging([chosen[name].main for name in chosen if name not in ELSEWHERE])
    for name, fixture in chosen.items():
        verdict = "elsewhere" if name in ELSEWHERE else judging.judged(fixture.main).verdict(fixture)
        tally[fixture.outcome, verdict] += 1
        if verdict not in ("clean", "exact", "elsewhere"):
            print(f"{verdict:8} {name}", flush=True)
    return "\n".join(f"{outcome:8} {verdict:10} {count}" for (outcome, verdict), count in sorted(tally.items()))


if __name__ == "__main__":
    print(table(tuple(sys.argv[1:]) or ("",)))
