"""Steps recorded on a GPU, judged here: the advice differs as it should, and the projection holds against the measurement.

The traces are those of `benchmarks/profile_gain.py` on an NVIDIA H200 with torch 2.11.0+cu130; the measured times stand in
`benchmarks/results/profile_gain.json`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from graphlint.runtime.profiling import read
from graphlint.runtime.profiling.analyse import Clock, analyse
from graphlint.runtime.profiling.report import Choice, Report, Verdict

DATA = Path(__file__).parent / "data"
RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "profile_gain.json").read_text())
MEASURED: dict[str, Any] = RESULTS["workloads"]


def judge(name: str, eager: float | None = None) -> Report:
    wall = MEASURED[name]["eager"] if eager is None else eager
    return analyse(read(DATA / f"{name}.json.gz"), clock=Clock(wall, wall))


def test_where_the_results_come_from() -> None:
    assert RESULTS["where"]["card"] == "NVIDIA H200" and RESULTS["where"]["torch"].startswith("2.11.0")
    assert read(DATA / "small_gpt.json.gz").torch == RESULTS["where"]["torch"]


def test_a_small_model_is_launch_bound_and_a_large_one_is_not() -> None:
    small, large = judge("small_gpt"), judge("large_gpt")
    assert small.advice.verdict is Verdict.FIRST and small.whole.share > 0.8
    assert large.advice.verdict is Verdict.NOT_WORTH and large.whole.share < 0.03


@pytest.mark.parametrize("name", ["small_gpt", "large_gpt", "mixed", "detection"])
def test_the_projection_lies_within_15_percent_of_the_measured_gain(name: str) -> None:
    measured = MEASURED[name]["eager"] / MEASURED[name]["measured_graph"]
    assert judge(name).whole.gain == pytest.approx(measured, rel=0.15)


def test_every_projection_that_was_measured_holds() -> None:
    errors = {name: row["error"] for name, row in MEASURED.items() if row.get("measured_graph")}
    assert len(errors) >= 6 and all(abs(e) < 0.15 for e in errors.values()), errors


def test_the_launch_bound_part_is_captured_and_the_compute_bound_one_left_out() -> None:
    rows = {m.path: m.choice for m in judge("mixed").modules}
    assert rows["model.head"] is Choice.CAPTURE and rows["model.trunk"] is Choice.LEAVE
    measured = MEASURED["mixed"]["modules"]
    assert measured["model.head"]["measured_alone"] > 5 > 1.1 > measured["model.trunk"]["measured_alone"]


def test_backward_kernels_find_their_module() -> None:
    (root,) = (m for m in judge("small_gpt").modules if m.path == "model")
    blocks = [m for m in judge("small_gpt").modules if m.path.startswith("model.blocks.") and m.path.count(".") == 2]
    assert (
        len(blocks) == 6 and len({m.nodes for m in blocks}) <= 2
    )  # equal blocks launch equally much, first and last apart
    forward_only = 14 + 6  # fewer than any block has with its backward
    assert all(m.nodes > 2 * forward_only for m in blocks)
    assert sum(m.nodes for m in blocks) < root.nodes


def test_detection_without_input_shapes_still_names_the_changing_operators() -> None:
    report = judge("detection")
    assert report.advice.blocked
    assert "aten::sub" in report.advice.points[0] and "torch.compile" in report.advice.points[0]
    assert {m.path: m.choice for m in report.modules}["model"] is Choice.CAPTURE


def test_without_the_true_wall_time_the_profilers_delay_is_owned_up_to() -> None:
    report = analyse(read(DATA / "small_gpt.json.gz"))
    assert report.whole.gain > judge("small_gpt").whole.gain
    assert any("--wall-us" in note for note in report.notes)


def test_the_page_shows_the_results() -> None:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    table = importlib.import_module("profile_table")
    page = table.PAGE.read_text()
    assert table.filled(page, RESULTS) == page, "run python benchmarks/profile_table.py"
    row = MEASURED["small_gpt"]
    assert f"{row['projected']:.2f} | {row['measured']:.2f}" in page
