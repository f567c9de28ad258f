"""The words: thresholds, blockers, shapes, modules."""

from __future__ import annotations

import pytest
from build import AUTOGRAD, Recorder, steady

from graphlint.runtime.profiling.advice import Facts, advise, time
from graphlint.runtime.profiling.analyse import Clock, analyse, with_measurement
from graphlint.runtime.profiling.readings import Reading
from graphlint.runtime.profiling.report import Choice, Report, Verdict, Whole
from graphlint.runtime.profiling.timeline import RangeKind


def facts(share: float) -> Facts:
    wall = 1000.0
    whole = Whole(wall, wall, wall * (1 - share), 100, 0.0, share, wall * (1 - share) + 10)
    return Facts(whole, (), (), False, (), (), 1.0, 0.0, 0)


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (0.0, Verdict.NOT_WORTH),
        (0.099, Verdict.NOT_WORTH),
        (0.10, Verdict.EASY),
        (0.25, Verdict.EASY),
        (0.251, Verdict.FIRST),
        (0.95, Verdict.FIRST),
    ],
)
def test_below_a_tenth_is_not_worth_it_and_above_a_quarter_comes_first(share: float, verdict: Verdict) -> None:
    assert advise(facts(share)).verdict is verdict


def test_launch_bound_and_compute_bound_steps_get_opposite_advice() -> None:
    small = analyse(steady(kernels=200, device=3, host=10))
    large = analyse(steady(kernels=200, device=300, host=10))
    assert small.advice.headline.startswith("Do this first.")
    assert large.advice.headline.startswith("Not worth a CUDA graph.")
    assert "Capture the whole step" in " ".join(small.advice.points)
    assert "apture" not in " ".join(large.advice.points)


def _detection(input_shapes: bool) -> Report:
    """A step whose loss launches as many blocks as the batch has targets."""
    recorder, targets = Recorder(), (5, 17, 9, 31)
    for number, count in enumerate(targets):
        begin = recorder.host
        for _ in range(40):
            recorder.launch(3, host=20)
        recorder.module("model", "Detector", begin)
        recorder.mark("aten::sub", recorder.host, RangeKind.OP)
        start = recorder.host
        recorder.launch(3, host=20, grid=(count, 1, 1))
        recorder.mark("aten::sub", start, RangeKind.OP)
        recorder.step(number, begin)
    shapes = [("4x3x128x128", f"{n}x4") for n in targets] if input_shapes else []
    return analyse(recorder.timeline(), input_shapes=shapes)


def test_a_changing_number_of_targets_is_told_to_pad_to_bucket_or_to_compile() -> None:
    report = _detection(input_shapes=True)
    first = report.advice.points[0]
    assert "5x4, 17x4, 9x4, 31x4" in first
    assert "Pad" in first and "bucket" in first and "torch.compile" in first
    assert "(8, 16, 32 cover what was seen)" in first
    assert report.advice.blocked and "can't be captured yet" in report.advice.headline


def test_kernels_that_change_are_seen_without_the_inputs() -> None:
    report = _detection(input_shapes=False)
    assert "aten::sub" in report.advice.points[0] and "torch.compile" in report.advice.points[0]


def test_the_fixed_part_of_a_detector_can_still_be_captured() -> None:
    (model,) = _detection(input_shapes=True).modules
    assert model.choice is Choice.CAPTURE


def test_equal_shapes_block_nothing() -> None:
    report = analyse(steady(200, 3, 10), input_shapes=[("8x128",)] * 4)
    assert not report.advice.blocked


def test_a_wait_is_named_with_its_operator_and_module() -> None:
    recorder = Recorder()
    for number in range(3):
        begin = recorder.host
        for _ in range(50):
            recorder.launch(2, host=10)
        start = recorder.host
        recorder.wait()
        recorder.mark("aten::item", start, RangeKind.OP)
        recorder.module("model.router", "Router", begin)
        recorder.step(number, begin)
    report = analyse(recorder.timeline())
    assert "aten::item in model.router" in report.advice.points[0]
    assert report.advice.blocked
    assert {m.path: m.choice for m in report.modules}["model.router"] is Choice.LEAVE


def test_equal_modules_are_named_once() -> None:
    recorder = Recorder()
    for number in range(3):
        begin = recorder.host
        for block in range(6):
            start = recorder.host
            for _ in range(20):
                recorder.launch(2, host=10)
            recorder.module(f"model.blocks.{block}", "Block", start)
        recorder.thread = AUTOGRAD
        recorder.launch(2, host=10)
        recorder.step(number, begin)
    assert "model.blocks.0 to model.blocks.5 (6 x Block)" in " ".join(analyse(recorder.timeline()).advice.points)


def test_a_measurement_stands_beside_the_projection() -> None:
    report = analyse(steady(200, 3, 10), clock=Clock(2000.0, 2000.0))
    eager, as_graph = Reading((2000.0, 2000.0)), report.whole.projected
    near = with_measurement(report, eager, Reading((as_graph * 1.1,) * 2))
    assert near.whole.prediction_error == pytest.approx(0.1)
    assert near.advice == report.advice and "measured" in near.to_text()
    far = with_measurement(report, eager, Reading((as_graph * 2,) * 2))
    assert "trust the measurement" in far.advice.points[0]
    failed = with_measurement(report, failed="optimizer (Adam) was built without capturable=True")
    assert "capturable=True" in failed.advice.points[-1]


@pytest.mark.parametrize(("us", "said"), [(3.4, "3.4 µs"), (34.4, "34 µs"), (1500, "1.50 ms"), (250_000, "250 ms")])
def test_times_as_people_say_them(us: float, said: str) -> None:
    assert time(us) == said
