"""From a recording to a report: pure functions over plain values, with no torch and no GPU."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from graphlint.runtime.profiling import advice
from graphlint.runtime.profiling.costs import ReplayCosts
from graphlint.runtime.profiling.drawing import draw
from graphlint.runtime.profiling.gaps import SAID, Cause, Gap, gaps
from graphlint.runtime.profiling.launches import Launch, launches
from graphlint.runtime.profiling.model import fit, whole_step
from graphlint.runtime.profiling.modules import changing_paths, modules, together
from graphlint.runtime.profiling.readings import Range, Reading, ratio
from graphlint.runtime.profiling.report import Idle, Report, Whole
from graphlint.runtime.profiling.steps import Iteration, alike, cut, typical
from graphlint.runtime.profiling.timeline import Microseconds, Timeline

_ALLOCATING = ("aten::empty", "aten::new_empty", "aten::resize_")
_STALL = 20.0  # microseconds; an idle device with work in its queue for longer waits for something
_LOOKED_AT = 20  # steps of a long recording that are compared one by one, spread over it


@dataclass(frozen=True, slots=True)
class Clock:
    """Times of the step without a profiler, which slows the host: measured on a live run, or given by the user."""

    wall: Microseconds
    enqueue: Microseconds | None = None
    range: Range | None = None  # eight of ten readings of the wall time lie in it
    fetch: Microseconds = 0.0  # host time to get a batch, outside the step


def analyse(
    timeline: Timeline,
    costs: ReplayCosts | None = None,
    clock: Clock | None = None,
    mark: str | None = None,
    input_shapes: Sequence[tuple[str, ...]] = (),
) -> Report:
    """Judges a recorded step.

    Args:
        timeline: from a reader or from the recorder.
        costs: of graphs on that machine.
        clock: times without the profiler; without it those of the recording are taken, with its slower host.
        mark: beginning of the name of the ranges that mark steps.
        input_shapes: of each step's batch, to see inputs that change.

    Raises:
        ValueError: no range begins with `mark`, or no step did device work.
    """
    costs = costs or ReplayCosts()
    steps, notes = cut(timeline, mark)
    if not steps:
        raise ValueError(f"no step of {timeline.source} did device work; its marks lie around something else")
    count = len(steps)
    steps, odd = alike(steps)
    step = typical(steps)
    sequence, idle = launches(step), gaps(step)
    whole, host_scale = _whole(steps, sequence, costs, clock)
    looked_at = steps[:: -(-len(steps) // _LOOKED_AT)]
    changing = changing_paths(looked_at)
    rows = modules(sequence, step, changing, costs, host_scale)
    facts = advice.Facts(
        whole=whole,
        waits=_waits(sequence),
        changing=sorted(changing),
        kernels_change=len({frozenset(s.shape().items()) for s in looked_at}) > 1,
        input_shapes=tuple(input_shapes),
        modules=rows,
        together=together(sequence, rows, costs, host_scale) if rows else 1.0,
        already=_graphed(sequence),
        stalled=sum(g.length for g in idle if g.cause is Cause.DEVICE and g.length > _STALL),
        collectives=sum(o.duration for o in step.ops if "nccl" in o.name.lower()),
    )
    return Report(
        source=timeline.source,
        card=timeline.card,
        torch=timeline.torch,
        steps=count,
        live=clock is not None and clock.enqueue is not None,
        whole=whole,
        idle=_idle(idle),
        modules=rows,
        advice=advice.advise(facts),
        costs=costs.source,
        notes=(*timeline.notes, *notes, *odd, *_profiler_note(clock), *_noise_note(whole)),
        drawing=draw(step, sequence, idle, costs, whole.wall),
    )


def _whole(
    steps: Sequence[Iteration], sequence: Sequence[Launch], costs: ReplayCosts, clock: Clock | None
) -> tuple[Whole, float]:
    step = typical(steps)
    device, nodes = statistics.median(s.busy for s in steps), len(step.ops)
    on_host = sum(x.before + x.call for x in sequence) or step.span - step.waiting
    outside = 0.0
    if clock is None:
        wall, guess = max(device, _recorded_wall(steps)), 1.0  # work of several steps may overlap
        outside = min(_outside(steps), max(0.0, wall - device))
    else:
        wall = clock.wall
        enqueue = clock.enqueue if clock.enqueue is not None else wall
        guess = min(1.0, enqueue / max(step.span, 1e-3))
    host_scale = fit(sequence, costs, wall - outside, guess)
    share = min(1.0, max(0.0, (wall - device - outside) / wall))
    projected = outside + whole_step(device, nodes, costs)
    whole = Whole(wall, on_host * host_scale, device, nodes, outside, share, projected)
    if clock is not None:
        whole = replace(whole, wall_range=clock.range, fetch=clock.fetch)
    return whole, host_scale


def _recorded_wall(steps: Sequence[Iteration]) -> Microseconds:
    """Time from step to step, on whichever of host and device ends later."""
    if len(steps) == 1:
        return max(steps[0].span, max(o.end for o in steps[0].ops) - steps[0].start)
    ends = [max(max(o.end for o in s.ops), s.end) for s in steps]
    return max(1e-3, statistics.median(b - a for a, b in pairwise(ends)))


def _outside(steps: Sequence[Iteration]) -> Microseconds:
    some = steps[:: -(-len(steps) // _LOOKED_AT)]
    return statistics.median(sum(g.length for g in gaps(s) if g.cause is Cause.OUTSIDE) for s in some)


def _graphed(sequence: Sequence[Launch]) -> float:
    """Part of the device work that graph launches brought: by time, since a recording may keep a replay as one piece."""
    total = sum(launch.device for launch in sequence)
    return sum(launch.device for launch in sequence if launch.graph) / total if total else 0.0


def _waits(sequence: Sequence[Launch]) -> tuple[tuple[str, str], ...]:
    """(operator or call, module) of each wait that a capture forbids, once. The allocator waits for memory that another
    stream still uses, and has no need to in the pool of a graph.
    """
    found = ((x.operator or x.name, x.path) for x in sequence if x.waits)
    return tuple(dict.fromkeys(pair for pair in found if not pair[0].startswith(_ALLOCATING)))


def _idle(found: Sequence[Gap]) -> tuple[Idle, ...]:
    groups: dict[Cause, list[float]] = {}
    for gap in found:
        groups.setdefault(gap.cause, []).append(gap.length)
    rows = [Idle(c.value, SAID[c], sum(v), len(v), max(v)) for c, v in groups.items()]
    return tuple(sorted(rows, key=lambda r: -r.time))


def _profiler_note(clock: Clock | None) -> tuple[str, ...]:
    if clock is not None:
        return ()
    return (
        "wall time comes from the recording, and a profiler slows the host: the true share and gain are smaller; "
        "give the wall time without a profiler (--wall-us) for a true figure",
    )


def _noise_note(whole: Whole) -> tuple[str, ...]:
    if whole.wall_range is None or whole.gain_range is None:
        return ()
    (low, high), (least, most) = whole.wall_range, whole.gain_range
    if high - low <= advice.TRUSTED * whole.wall:
        return ()
    return (
        f"the machine is not quiet: the eager step took {advice.time(low)} to {advice.time(high)}, "
        f"so its gain is {least:.2f} to {most:.2f}; run it again when nothing else runs",
    )


def with_measurement(
    report: Report,
    eager: Reading | None = None,
    graphed: Reading | None = None,
    failed: str = "",
    earlier: Microseconds | None = None,
) -> Report:
    """The report with what a captured graph of the step really took.

    Args:
        eager, graphed: read in the same turns; the report's wall time is the median of `eager`.
        failed: why nothing was measured.
        earlier: wall time of the eager step before the capture.
    """
    whole = replace(report.whole, failed=failed, earlier=earlier)
    if eager is not None and graphed is not None:
        gains = ratio(eager, graphed)
        whole = replace(whole, graphed=graphed.median, graphed_range=graphed.range, measured_range=gains)
    return replace(report, whole=whole, advice=advice.confirmed(report.advice, whole))
