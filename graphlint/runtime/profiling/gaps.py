"""When the device had nothing to do, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from graphlint.runtime.profiling.launches import Attribution
from graphlint.runtime.profiling.steps import Iteration
from graphlint.runtime.profiling.timeline import CallKind, HostCall, Microseconds, overlap


class Cause(str, Enum):
    """Why the device was idle."""

    LAUNCH = "launch"  # the host had not enqueued the next kernel yet
    WAIT = "wait"  # the host had waited for the device, so nothing was enqueued behind it
    ALLOC = "allocation"  # the host was asking the driver for memory
    OUTSIDE = "between steps"  # data loading, logging, whatever runs around the step; data loading within it too
    DEVICE = "device"  # enqueued in time: the device's own turnaround, or another stream's work


SAID = {
    Cause.LAUNCH: "the host was still launching",
    Cause.WAIT: "the host had waited for the device",
    Cause.ALLOC: "the host was allocating device memory",
    Cause.OUTSIDE: "the host was between two steps or loading data",
    Cause.DEVICE: "the device was switching kernels or waiting for another stream",
}


@dataclass(frozen=True, slots=True)
class Gap:
    """One stretch of idle device time."""

    start: Microseconds
    end: Microseconds
    cause: Cause
    then: str  # the device work that ended it
    path: str = ""  # module whose launch ended it
    operator: str = ""
    call: str = ""  # the runtime call that caused it, for a wait or an allocation

    @property
    def length(self) -> Microseconds:
        return self.end - self.start


def gaps(step: Iteration) -> list[Gap]:
    """The step's idle stretches, from the end of the work before it to its last kernel, in order."""
    launched = {c.correlation: c for c in step.calls if c.correlation is not None}
    blockers = [c for c in step.calls if c.kind in (CallKind.WAIT, CallKind.ALLOC)]
    where = Attribution(step)
    found: list[Gap] = []
    reached = step.device_ready
    previous_call = step.start
    for op in sorted(step.ops, key=lambda o: (o.start, o.end)):
        call = launched.get(op.correlation) if op.correlation is not None else None
        if op.start > reached:
            cause, blocker = _cause(step, reached, call, previous_call, blockers)
            path, _, operator = where(call) if call else ("", False, "")
            found.append(Gap(reached, op.start, cause, op.name, path, operator, blocker))
        reached = max(reached, op.end)
        if call:
            previous_call = max(previous_call, call.start)
    return found


def _cause(
    step: Iteration, idle_from: float, call: HostCall | None, previous: float, blockers: Sequence[HostCall]
) -> tuple[Cause, str]:
    """Looks at what the host did between the last launch and the one that ended the gap."""
    if call is None or call.end <= idle_from:
        return Cause.DEVICE, ""
    for blocker in blockers:
        if previous <= blocker.end and blocker.start < call.start and blocker.end >= idle_from:
            return (Cause.WAIT if blocker.kind is CallKind.WAIT else Cause.ALLOC), blocker.name
    away = [(step.previous_end, step.start), *step.loading]
    between = sum(overlap((idle_from, call.start), span) for span in away)
    if between > max(0.0, call.start - idle_from) / 2:
        return Cause.OUTSIDE, ""
    return Cause.LAUNCH, ""


def by_cause(found: Sequence[Gap]) -> dict[Cause, Microseconds]:
    """Idle time for each cause, longest first."""
    total: dict[Cause, Microseconds] = {}
    for gap in found:
        total[gap.cause] = total.get(gap.cause, 0.0) + gap.length
    return dict(sorted(total.items(), key=lambda item: -item[1]))
