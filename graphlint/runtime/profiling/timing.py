"""Timed loops of steps: several things in turns, so that a slow moment of the machine falls on all of them.

The wall time of a launch-bound step is the host's, and a host is not steady: its clock changes, and on a virtual
machine so does its share of the processor, by 10% and more within seconds. What is compared is therefore read in
turns, and read again until the median is known.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphlint.runtime.profiling.readings import Reading

Run = Callable[[int], Any]

_LOOP = 0.1  # seconds of one timed loop, about
_LEAST, _MOST = 3, 200  # steps of a loop; a step that is longer than a few loops is timed alone
_TURNS = 7, 25  # fewest and most
_SECONDS = 4.0  # after which no further turn begins
_FROZEN = 1000  # objects; more of them the user has put aside, fewer Python 3.12 itself at its start
_KNOWN = 0.01  # the median's standard error, as a part of it, that is good enough


def turns(*runs: Run) -> tuple[Reading, ...]:
    """Wall time per step of each run, host and device running freely.

    Args:
        runs: each does step `i` of one way of doing it. All of them are timed once in each turn.
    """
    counts = [_count(run) for run in runs]
    found: list[list[float]] = [[] for _ in runs]
    began = time.perf_counter()
    with _own_objects_aside():
        while True:
            for loops, run, count in zip(found, runs, counts, strict=True):
                loops.append(_loop(run, count))
            readings = tuple(Reading(tuple(loops)) for loops in found)
            if _enough(readings, time.perf_counter() - began):
                return readings


def _enough(readings: Sequence[Reading], seconds: float) -> bool:
    done = len(readings[0].loops)
    if done < _TURNS[0]:
        return done >= 3 and seconds > 2 * _SECONDS  # a step that takes seconds
    return done >= _TURNS[1] or seconds > _SECONDS or all(r.uncertainty < _KNOWN for r in readings)


def _count(run: Run) -> int:
    """Steps of a loop. What the two steps find cold (caches, the allocator, lazily loaded kernels) is not timed."""
    run(0)
    torch.cuda.synchronize()
    began = time.perf_counter()
    run(1)
    torch.cuda.synchronize()
    took = max(time.perf_counter() - began, 1e-6)
    return max(_LEAST if took < 5 * _LOOP else 1, min(_MOST, int(_LOOP / took)))


def _loop(run: Run, count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for i in range(count):
        run(i)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e6


def enqueue_time(run: Run, count: int = 10) -> float:
    """Microseconds that the host needs for one step when the device never makes it wait: median."""
    times = []
    for i in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run(i)
        times.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


@contextmanager
def _own_objects_aside() -> Iterator[None]:
    """A recording is many objects, and the step's garbage collections must not search them."""
    mine = gc.isenabled() and gc.get_freeze_count() < _FROZEN
    if mine:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()
