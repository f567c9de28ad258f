"""Cuts a recording into iterations, and hands each its device work."""

from __future__ import annotations

import re
import textwrap
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
    Interval,
    Microseconds,
    RangeKind,
    Timeline,
    length,
    union,
)

_STEP_WORDS = {"step", "iter", "iteration", "batch"}  # last word of a range that is taken for a step
_NO_STEPS = {"optimizer", "optim", "scheduler", "scaler", "forward", "backward", "loss", "data", "load", "next", "sync"}
_FEW = 4  # with fewer steps none is called odd
_LIBRARIES = ("nccl", "MPI_", "cublas", "cudnn", "cusolver", "cusparse")  # that mark their own calls
_NAMED = 6  # ranges that an error proposes


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
    loading: tuple[Interval, ...] = ()  # host time in which a batch was fetched

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
        mark: name of the ranges that mark a step, or its beginning; without it the recorder's marks, those of
            `prof.step()`, ranges that are called like a step, or the ends of `Optimizer.step` are taken, in this order.

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


def alike(iterations: Sequence[Iteration]) -> tuple[list[Iteration], list[str]]:
    """The iterations that launch what most of them do, and a note on the others: the first one makes optimizer state,
    every hundredth one logs. Where no shape is that of most, or too few were recorded to tell, all of them.
    """
    shapes = [frozenset(i.shape().items()) for i in iterations]
    usual, often = Counter(shapes).most_common(1)[0]
    if len(shapes) < _FEW or often == len(shapes) or often <= len(shapes) / 2:
        return list(iterations), []
    kept = [i for i, shape in zip(iterations, shapes, strict=True) if shape == usual]
    others = len(shapes) - often
    return kept, [f"{others} of {len(shapes)} steps launch other kernels than the rest, which is judged"]


def _windows(timeline: Timeline, mark: str | None) -> tuple[list[HostRange], list[str]]:
    if mark:
        return _named(timeline, mark), [f"steps are the ranges named {mark}..."]
    marked = list(timeline.steps)
    own = [r for r in marked if r.name.startswith(STEP_MARK)]
    if marked:
        return _apart(own or marked), []
    name, guessed = _called_like_a_step(timeline)
    if guessed:
        return guessed, [f"no step marks: the ranges named {name} are taken for steps (--step-range names others)"]
    ends = [r.end for r in timeline.ranges if r.kind is RangeKind.OPTIMIZER]
    if len(ends) >= 2:
        pairs = pairwise(ends)
        windows = [HostRange(f"step {i}", a, b, 0, RangeKind.STEP) for i, (a, b) in enumerate(pairs)]
        return windows, ["no step marks: a step is the time between two ends of Optimizer.step"]
    busy = [c for c in timeline.calls if c.kind in (CallKind.LAUNCH, CallKind.GRAPH)]  # setting CUDA up is no step
    spans = [*((c.start, c.end) for c in busy), *((o.start, o.end) for o in timeline.device)]
    whole = HostRange("recording", min(s for s, _ in spans), max(e for _, e in spans), 0, RangeKind.STEP)
    advice = f"; ranges that repeat, for --step-range: {seen}" if (seen := _repeated(timeline)) else ""
    return [whole], [
        f"no step marks: all of it counts as one step; mark steps with prof.step() or an NVTX range{advice}"
    ]


def _named(timeline: Timeline, mark: str) -> list[HostRange]:
    """The ranges of that name, numbered or not; where there is none, those that begin with it."""
    beginning = [r for r in timeline.ranges if r.name.startswith(mark)]
    same = [r for r in beginning if _bare(r.name) == _bare(mark)]
    if not beginning:
        seen = _repeated(timeline) or "none"
        raise ValueError(f"no range of {timeline.source} begins with {mark!r}; those that repeat: {seen}")
    return _apart(same or beginning)


def _called_like_a_step(timeline: Timeline) -> tuple[str, list[HostRange]]:
    """Ranges of the user that repeat and whose name ends like `train_step 12`; of several the longest ones."""
    groups: dict[str, list[HostRange]] = {}
    for r in timeline.ranges:
        words = re.findall(r"[a-z]+", _bare(r.name).lower()) if r.kind is RangeKind.MARK else []
        if words and words[-1] in _STEP_WORDS and not _NO_STEPS & set(words):
            groups.setdefault(_bare(r.name), []).append(r)
    groups = {name: apart for name, found in groups.items() if len(apart := _apart(found)) > 1}
    return max(groups.items(), key=lambda g: sum(r.end - r.start for r in g[1]), default=("", []))


def _apart(ranges: Sequence[HostRange]) -> list[HostRange]:
    """Those that begin after the one before has ended: a step holds no other one."""
    kept: list[HostRange] = []
    for r in sorted(ranges, key=lambda r: (r.start, -r.end)):
        if not kept or r.start >= kept[-1].end:
            kept.append(r)
    return kept


def _repeated(timeline: Timeline) -> str:
    """Names of the user's ranges that repeat, the longest first, with how often."""
    own = (r for r in timeline.ranges if r.kind is RangeKind.MARK and not r.name.startswith(_LIBRARIES))
    counts = Counter(_bare(r.name) for r in own)
    total: Counter[str] = Counter()
    for r in timeline.ranges:
        total[_bare(r.name)] += int(r.end - r.start)
    often = sorted((n for n, count in counts.items() if count > 1), key=lambda n: -total[n])
    return ", ".join(f"{textwrap.shorten(name, 48)} ({counts[name]})" for name in often[:_NAMED])


def _bare(name: str) -> str:
    """`step#12`, `step 13` and `step[14]` are all `step`."""
    return re.sub(r"[\W_]*\d*[\W_]*$", "", name) or name


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
    calls = _of_the_step(timeline.calls[_first(timeline.calls, window.start) : _first(timeline.calls, window.end)])
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
        loading=tuple(union((r.start, r.end) for r in inner if r.kind is RangeKind.DATA)),
    )


def _of_the_step(calls: tuple[HostCall, ...]) -> tuple[HostCall, ...]:
    """Without the waits of threads that launch nothing, such as one that pins memory or watches collectives."""
    launching = {c.thread for c in calls if c.kind in (CallKind.LAUNCH, CallKind.GRAPH)}
    if not launching:
        return calls
    return tuple(c for c in calls if c.thread in launching or c.kind is not CallKind.WAIT)


def _first(events: Sequence[HostCall] | Sequence[HostRange], at: Microseconds) -> int:
    return bisect_left(events, at, key=lambda e: e.start)
