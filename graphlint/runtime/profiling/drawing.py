"""The typical step as a drawing: its events on the clock of an undisturbed step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from graphlint.runtime.profiling.costs import ReplayCosts
from graphlint.runtime.profiling.gaps import Gap
from graphlint.runtime.profiling.launches import Launch
from graphlint.runtime.profiling.report import Drawing
from graphlint.runtime.profiling.steps import Iteration
from graphlint.runtime.profiling.timeline import CallKind, Microseconds, RangeKind, module_name, union

MOST_DRAWN = 20_000  # events that a browser draws without trouble
_LEVELS = 4  # of the module tree that are drawn for the backward pass
_SHOWN = (CallKind.LAUNCH, CallKind.GRAPH, CallKind.WAIT, CallKind.ALLOC)


class Clock:
    """Maps recorded time to the time of a step without a profiler.

    The profiler slows the host and not the device, so device work keeps its length and the idle time between shrinks
    until the step has its true length. The order of events stays. A device that lags behind still works for earlier
    steps when this one begins; that time keeps its length too.
    """

    def __init__(self, step: Iteration, wall: Microseconds) -> None:
        busy = union((o.start, o.end) for o in step.ops)
        work = sum(b - a for a, b in busy)
        self.behind = max(0.0, min(step.device_ready, busy[0][0]) - step.start)
        if self.behind:
            busy = union([(step.start, step.start + self.behind), *busy])
        self.start = min(step.start, busy[0][0])
        self.end = max(step.end, busy[-1][1])
        idle = max(self.end - self.start - work - self.behind, 1e-9)
        self.shrink = min(1.0, max(0.0, wall - work) / idle)
        edges = [self.start, *(edge for span in busy for edge in span), self.end]
        paces = [self.shrink if i % 2 == 0 else 1.0 for i in range(len(edges) - 1)]
        lengths = [(b - a) * pace for a, b, pace in zip(edges, edges[1:], paces, strict=False)]
        self._edges, self._paces, self._at = edges, paces, [0.0, *accumulate(lengths)]

    def __call__(self, recorded: Microseconds) -> Microseconds:
        i = min(max(bisect_right(self._edges, recorded) - 1, 0), len(self._paces) - 1)
        return self._at[i] + (recorded - self._edges[i]) * self._paces[i]

    def span(self, start: Microseconds, end: Microseconds) -> tuple[Microseconds, Microseconds]:
        """Start and length of a recorded stretch, cut at the step's ends."""
        begin, finish = max(start, self.start), min(end, self.end)
        at = self(begin)
        return round(at, 3), round(max(0.0, self(finish) - at), 3)


def draw(
    step: Iteration, sequence: Sequence[Launch], idle: Sequence[Gap], costs: ReplayCosts, wall: Microseconds
) -> Drawing:
    """The step's device work, gaps, host calls and modules.

    Args:
        wall: true length of the step in microseconds.
    """
    clock = Clock(step, wall)
    ranges = [r for r in step.ranges if r.kind in (RangeKind.MODULE, RangeKind.OPTIMIZER)][:MOST_DRAWN]
    depths = _depths([(r.start, r.end, r.thread) for r in ranges])
    return Drawing(
        length=round(clock(clock.end), 3),
        ops=tuple((o.name, *clock.span(o.start, o.end), o.stream, o.kind) for o in step.ops[:MOST_DRAWN]),
        gaps=tuple(
            (*clock.span(g.start, g.end), g.cause.value, g.path, g.operator)
            for g in idle[:MOST_DRAWN]
            if g.end > clock.start
        ),
        calls=tuple((*clock.span(c.start, c.end), c.kind.value, c.name) for c in step.calls if c.kind in _SHOWN)[
            :MOST_DRAWN
        ],
        modules=tuple(
            (*_label(r.name, r.kind), *clock.span(r.start, r.end), depth)
            for r, depth in zip(ranges, depths, strict=True)
        )
        + tuple((path, "backward", *clock.span(start, end), depth) for path, start, end, depth in _backward(sequence)),
        behind=round(clock(clock.start + clock.behind), 3),
        node_gap=costs.node_gap,
        shrink=clock.shrink,
    )


def _backward(sequence: Sequence[Launch]) -> Iterator[tuple[str, Microseconds, Microseconds, int]]:
    """Path, start, end and depth of each unbroken run of a module's backward launches, at every level of the tree."""
    placed = [x for x in sequence if x.backward and not x.path.startswith("(")]
    for depth in range(_LEVELS):
        for path, run in groupby(placed, lambda x, depth=depth: ".".join(x.path.split(".")[: depth + 1])):  # type: ignore[misc]
            launches = list(run)
            if path.count(".") == depth:
                yield path, launches[0].at, launches[-1].at + launches[-1].call, depth


def _label(name: str, kind: RangeKind) -> tuple[str, str]:
    if kind is RangeKind.OPTIMIZER:
        return "optimizer step", name.removeprefix("Optimizer.step#").removesuffix(".step")
    return module_name(name)


def _depths(spans: Sequence[tuple[float, float, int]]) -> list[int]:
    """How deep each range is nested in the earlier ones of its thread."""
    depths: list[int] = []
    open_ends: dict[int, list[float]] = {}
    for start, end, thread in spans:
        stack = open_ends.setdefault(thread, [])
        while stack and stack[-1] <= start:
            stack.pop()
        depths.append(len(stack))
        stack.append(end)
    return depths
