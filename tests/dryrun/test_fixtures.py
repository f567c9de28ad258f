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
from judged import judge
from known import ELSEWHERE, KNOWN

FIXTURES = {fixture.name: fixture for fixture in fixture_marks.load() if fixture.outcome in ("crash", "silent", "ok")}
SAMPLE = (  # a few of every kind, run with every test run; all of them run with `-m slow`
    "crash_grad_hook",
    "crash_stop_token",
    "crash_unjoined_copy",
    "crash_cold_mixer",
    "crash_filter_cond",
    "ok_grad_hook",
    "ok_ring_cache",
    "silent_data_swap",
    "silent_guidance_flag",
    "silent_read_before_replay",
    "right_zero_grad_once",
    "right_prefetch_after_replay",
)


def check(name: str) -> None:
    fixture = FIXTURES[name]
    verdict = judge(fixture.main)
    right = "clean" if fixture.outcome == "ok" else "exact"
    if name in KNOWN:
        assert verdict.verdict(fixture) != right, f"{name} is judged rightly now; take it out of known.py"
    else:
        assert verdict.verdict(fixture) == right, (verdict.findings, fixture.marks, verdict.error)


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FIXTURES) - set(ELSEWHERE)))
def test_all(name: str) -> None:
    check(name)


def test_what_is_known_exists() -> None:
    assert set(KNOWN) <= set(FIXTURES) and set(ELSEWHERE) <= set(FIXTURES)


def table(beginnings: tuple[str, ...]) -> str:
    """The verdicts of all fixtures whose names begin so, counted by outcome; prints those that are not judged rightly."""
    tally: Counter[tuple[str, str]] = Counter()
    wrong = []
    for name, fixture in (item for item in FIXTURES.items() if item[0].startswith(beginnings)):
        verdict = "elsewhere" if name in ELSEWHERE else judge(fixture.main).verdict(fixture)
        tally[fixture.outcome, verdict] += 1
        if verdict not in ("clean", "exact", "elsewhere"):
            wrong.append(f"{verdict:8} {name}")
            print(wrong[-1], flush=True)
    return "\n".join(f"{outcome:8} {verdict:10} {count}" for (outcome, verdict), count in sorted(tally.items()))


if __name__ == "__main__":
    print(table(tuple(sys.argv[1:]) or ("",)))
