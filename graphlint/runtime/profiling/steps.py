"""Cuts a recording into iterations, and hands each its device work."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from graphlint.runtime.profiling.timeline import (
    STEP_MARK,
    CallKind,
    DeviceOp,
    HostCall,
    HostRange,
    Microseconds,
    RangeKind,
    Timeline,
    length,
)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One step of the recording: a stretch of host time, and the device work that was enqueued in it."""

    name: str
    start: Microseconds
    end: Microseconds  # on the host; for a step without host events, on the device
    calls: tuple[HostCall, ...]
    ranges: tuple[HostRange, ...]
    ops: tuple[DeviceOp, ...]
    device_ready: Microseconds  # when the device had finished all earlier work
    previous_end: Microseconds  # on the host, of the step before; its own start for the first one

    @property
    def span(self) -> Microseconds:
        return self.end - self.start

    @property
    def busy(self) -> Microseconds:
        """Device time, overlapping streams counted once."""
        return length((o.start, o.end) for o in self.ops)

    @property
    def waiting(self) -> Microseconds:
        """Host time spent blocked on the device."""
        return length((c.start, c.end) for c in self.calls if c.kind is CallKind.WAIT)

    def shape(self) -> Counter[tuple[str, tuple[int, ...]]]:
        """What ran, with its launch dimensions: equal for steps that one graph could replace."""
        return Counter((o.name, o.grid) for o in self.ops)


def cut(timeline: Timeline, mark: str | None = None) -> tuple[list[Iteration], list[str]]:
    """The iterations that did device work, and notes on how they were found.

    Args:
        mark: beginning of the name of the ranges that mark a step; without it the recorder's marks, those of
            `prof.step()`, or the ends of `Optimizer.step` are taken, in this order.

    Raises:
        ValueError: no range of the recording has a name that begins with `mark`.
    """
    windows, notes = _windows(timeline, mark)
    owner = _owners(timeline, windows)
    ready, found = _Ready(timeline.device), list[Iteration]()
    for window, ops in zip(windows, owner, strict=True):
        if ops:
            found.append(_iteration(timeline, window, ops, ready(ops[0]), found[-1].end if found else window.start))
    return found, notes


def typical(iterations: Sequence[Iteration]) -> Iteration:
    """The iteration of median length."""
    return sorted(iterations, key=lambda s: s.span)[len(iterations) // 2]


def _windows(timeline: Timeline, mark: str | None) -> tuple[list[HostRange], list[str]]:
    if mark:
        named = [r for r in timeline.ranges if r.name.startswith(mark)]
        if not named:
            raise ValueError(f"no range of {timeline.source} begins with {mark!r}; name one that marks a step")
        return named, [f"steps are the ranges named {mark}..."]
    marked = list(timeline.steps)
    own = [r for r in marked if r.name.startswith(STEP_MARK)]
    if marked:
        return own or marked, []
    ends = [r.end for r in timeline.ranges if r.kind is RangeKind.OPTIMIZER]
    if len(ends) >= 2:
        pairs = pairwise(ends)
        windows = [HostRange(f"step {i}", a, b, 0, RangeKind.STEP) for i, (a, b) in enumerate(pairs)]
        return windows, ["no step marks: a step is the time between two ends of Optimizer.step"]
    spans = [*((c.start, c.end) for c in timeline.calls), *((o.start, o.end) for o in timeline.device)]
    whole = HostRange("recording", min(s for s, _ in spans), max(e for _, e in spans), 0, RangeKind.STEP)
    return [whole], ["no step marks: all of it counts as one step; mark steps with prof.step() or an NVTX range"]


def _owners(timeline: Timeline, windows: Sequence[HostRange]) -> list[list[DeviceOp]]:
    """Device work by the window in which the host enqueued it, or in which it ran where no launch is known."""
    launched = {c.correlation: c.start for c in timeline.calls if c.correlation is not None}
    starts = [w.start for w in windows]
    owned: list[list[DeviceOp]] = [[] for _ in windows]
    for op in timeline.device:
        at = op.start if op.correlation is None else launched.get(op.correlation, op.start)
        i = bisect_right(starts, at) - 1
        if i >= 0 and at <= windows[i].end:
            owned[i].append(op)
    return owned


class _Ready:
    """When the device had finished everything that began before an operation."""

    def __init__(self, device: Sequence[DeviceOp]) -> None:
        self._starts = [(o.start, o.end) for o in device]
        self._reached = list(accumulate((o.end for o in device), max))

    def __call__(self, first: DeviceOp) -> Microseconds:
        before = bisect_left(self._starts, (first.start, first.end))
        return self._reached[before - 1] if before else first.start


def _iteration(
    timeline: Timeline, window: HostRange, ops: Sequence[DeviceOp], ready: float, previous_end: float
) -> Iteration:
    calls = timeline.calls[_first(timeline.calls, window.start) : _first(timeline.calls, window.end)]
    ranges = timeline.ranges[_first(timeline.ranges, window.start) : _first(timeline.ranges, window.end)]
    inner = tuple(r for r in ranges if r.kind is not RangeKind.STEP)
    return Iteration(
        name=window.name,
        start=window.start,
        end=window.end,
        calls=calls,
        ranges=inner,
        ops=tuple(ops),
        device_ready=ready,
        previous_end=min(previous_end, window.start),
    )


def _first(events: Sequence[HostCall] | Sequence[HostRange], at: Microseconds) -> int:
    return bisect_left(events, at, key=lambda e: e.start)
