"""Timed loops and what is made of them."""

from __future__ import annotations

import gc
from itertools import groupby

import pytest

torch = pytest.importorskip("torch")

import graphlint.runtime.profiling.timing as timing  # noqa: E402
from graphlint.runtime.profiling.readings import Reading, quantile, ratio  # noqa: E402


class Clock:
    """Time that passes only when a step takes it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_several_things_are_timed_in_turns(clock: Clock) -> None:
    order: list[str] = []

    def step(name: str, seconds: float) -> timing.Run:
        def run(_: int) -> None:
            order.append(name)
            clock.now += seconds

        return run

    slow, fast = timing.turns(step("slow", 1 / 64), step("fast", 1 / 512))
    assert slow.median == pytest.approx(1e6 / 64) and fast.median == pytest.approx(1e6 / 512)
    blocks = [(name, len(list(same))) for name, same in groupby(order[4:])]  # behind the two cold steps of each
    assert blocks == [("slow", 6), ("fast", 51)] * 7  # a tenth of a second each; steady times need no more turns
    assert ratio(slow, fast) == pytest.approx((8, 8))


def test_noise_is_answered_with_more_turns_and_a_slow_moment_falls_on_both(clock: Clock) -> None:
    began = {"load": 1.0}

    def step(seconds: float) -> timing.Run:
        def run(i: int) -> None:
            began["load"] = 1.0 if int(clock.now * 2) % 2 else 1.5  # the machine is slower every other half second
            clock.now += seconds * began["load"]

        return run

    slow, fast = timing.turns(step(0.01), step(0.001))
    assert len(slow.loops) == len(fast.loops) > 7
    assert slow.range[1] > 1.3 * slow.range[0]
    assert slow.median / fast.median == pytest.approx(10, rel=0.1)


def test_a_step_of_seconds_is_timed_three_times_and_not_more(clock: Clock) -> None:
    steps: list[int] = []

    def run(i: int) -> None:
        steps.append(i)
        clock.now += 7.0

    (reading,) = timing.turns(run)
    assert reading.loops == (7e6,) * 3 and len(steps) == 5


def test_the_profiles_own_objects_are_no_burden_for_the_steps_garbage_collections(clock: Clock) -> None:
    frozen: list[int] = []

    def run(_: int) -> None:
        frozen.append(gc.get_freeze_count())
        clock.now += 0.05

    timing.turns(run)
    assert min(frozen[2:]) > max(frozen[:2])  # the first two steps are not timed
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_a_reading_is_told_by_its_middle() -> None:
    reading = Reading((10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 19.0, 400.0))
    assert reading.median == 15 and reading.range == (11, 19)
    assert reading.uncertainty == pytest.approx(0.93 * 5 / 11**0.5 / 15)
    assert (reading + Reading((1.0,))).loops[-1] == 1.0
    assert quantile([4.0], 0.9) == 4 and quantile([1.0, 2.0], 0.5) == 1.5
