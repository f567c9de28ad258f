"""The recorded outcomes of the fixtures, read without a GPU: complete, current, and in agreement with the programs."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("fixtures_run", ROOT / "fixtures" / "run.py")
assert _spec is not None and _spec.loader is not None
run = importlib.util.module_from_spec(_spec)
sys.modules["fixtures_run"] = run
_spec.loader.exec_module(run)

FIXTURES = run.discover()
SEEN = run.read_outcomes()
UNRECORDED = set(run.UNRECORDED.read_text().split())  # changed or written since the last run on a GPU
PREFIX = {"crash": ("crash",), "silent": ("silent",), "leak": ("leak",), "slow": ("slow",), "ok": ("ok", "right")}
# Reported only when the capture ends, by what comes after (a join, a read of the output), from another thread, or by the
# backward that a global switch slows down: their tracebacks pass an `# or` line.
LATE_RULES = {
    "cleared-workspace",
    "default-stream",
    "default-stream-warmup",
    "nested-capture",
    "overwritten-output",
    "short-warmup",
    "thread-in-capture",
    "unforked-stream",
    "unjoined-stream",
}
OF_A_CAPTURE = re.compile(r"(?i)captur|graphed|CUDA ?Graph|CUBLAS|NCCL|illegal memory access")
LATE_FIXTURES = {"crash_nan_hunt"}


def each(outcome: str = "") -> pytest.MarkDecorator:
    chosen = [f for f in FIXTURES if not outcome or f.outcome == outcome]
    return pytest.mark.parametrize("fixture", chosen, ids=lambda f: f.name)


@each()
def test_recorded_outcome_is_the_declared_one(fixture: run.Fixture) -> None:
    current = run.is_current(fixture, SEEN)
    assert current != (fixture.name in UNRECORDED), "python fixtures/run.py --changed, or --table where there is no GPU"
    if current:
        assert SEEN[fixture.name]["gpu"] and SEEN[fixture.name]["torch"]


@each("crash")
def test_recorded_traceback_passes_the_fault(fixture: run.Fixture) -> None:
    if fixture.name in UNRECORDED:
        return
    row = SEEN[fixture.name]
    late = fixture.name in LATE_FIXTURES or set(fixture.rules) & LATE_RULES
    kinds = {"error", "or"} if late else {"error"}
    places = {m.place for m in fixture.marks if m.kind in kinds}
    assert places & set(row["lines"]), f"marked {sorted(places)}, the traceback went through {row['lines']}"
    assert OF_A_CAPTURE.search(row["error"] + row["raised"]), row["error"]


@each()
def test_header_is_well_formed(fixture: run.Fixture) -> None:
    assert fixture.name.split("_")[0] in PREFIX[fixture.outcome]
    assert len(fixture.about) > 20 and fixture.about.endswith(".")
    tree = ast.parse(fixture.main.read_text())
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert {"build", "main"} <= functions.keys()
    build = functions["build"].args
    assert [a.arg for a in build.args] == ["device"] and ast.literal_eval(build.defaults[0]) == "cuda"


@each()
def test_marks_agree_with_the_outcome(fixture: run.Fixture) -> None:
    wrong = [m for m in fixture.marks if m.kind == "error"]
    assert bool(wrong) == (fixture.outcome != "ok")
    for path in fixture.files:
        hints = [line for line in path.read_text().splitlines() if re.search(r"#\s*(error|or)\b", line)]
        assert all(run.MARKS.search(line) for line in hints), hints


@each()
def test_marks_name_rules_of_the_book(fixture: run.Fixture) -> None:
    known = {p.stem for p in (ROOT / "rules").glob("*.md")}
    assert {m.rule for m in fixture.marks} <= known


def test_no_record_without_a_program() -> None:
    assert SEEN.keys() <= {f.name for f in FIXTURES}


def test_records_name_no_path_of_a_machine() -> None:
    assert not re.search(r"/(root|home|tmp|opt|usr|work)/", run.OUTCOMES.read_text())


def test_readme_lists_every_fixture() -> None:
    listed = run.README.read_text().split(run.TABLE_START)[1].split(run.TABLE_END)[0].strip()
    assert listed == run.table(), "python fixtures/run.py --table"


def test_enough_of_each_kind() -> None:
    crashes = [f for f in FIXTURES if f.outcome == "crash"]
    right = [f for f in FIXTURES if f.outcome == "ok"]
    assert len(crashes) >= 40 and len(right) >= 40
    assert len([f for f in FIXTURES if f.name not in UNRECORDED]) >= 200
    assert sum(len(f.files) > 1 for f in FIXTURES) >= 6
