"""The host's side of a step as a list of launches, each with the module that it serves.

Forward launches lie in the module's range. Backward ones run on autograd's thread; the number that autograd gave the
forward operator leads back to the module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from graphlint.runtime.profiling.steps import Iteration
from graphlint.runtime.profiling.timeline import (
    CallKind,
    DeviceOp,
    HostCall,
    HostRange,
    Microseconds,
    RangeKind,
    module_name,
    net_durations,
    overlap,
)

OPTIMIZER = "(optimizer step)"
OUTSIDE = "(outside modules)"
_NEAR = 0.5  # microseconds that host and device clocks may disagree by
_QUEUE_FULL = 20.0  # a launch call this many times the median was blocked by a full queue, not by its own work


@dataclass(frozen=True, slots=True)
class Launch:
    """One call that enqueues device work, or that waits for it."""

    at: Microseconds
    before: Microseconds  # host time since the last call returned: Python, dispatch, allocation
    call: Microseconds  # host time inside the call
    device: Microseconds  # device time that it adds
    nodes: int  # kernels, copies and fills
    path: str = OUTSIDE  # module, or one of the names above
    backward: bool = False
    waits: bool = False
    operator: str = ""  # outermost operator around it
    graph: bool = False  # already a graph launch
    name: str = ""


def launches(step: Iteration) -> list[Launch]:
    """The step's calls in the order of the host. Threads take turns in a step, so one order holds for all of them."""
    work = _work(step)
    where = Attribution(step)
    usual = _median([c.end - c.start for c in step.calls if c.kind is CallKind.LAUNCH])
    cap = _QUEUE_FULL * usual if usual else float("inf")
    found: list[Launch] = []
    last = step.start
    for call in step.calls:
        ops = work.get(call.correlation, []) if call.correlation is not None else []
        if call.kind not in (CallKind.LAUNCH, CallKind.GRAPH, CallKind.WAIT) or (call.start < last and not ops):
            continue
        path, backward, operator = where(call)
        waits = call.kind is CallKind.WAIT or _returns_late(call, [op for op, _ in ops])
        found.append(
            Launch(
                at=call.start,
                before=_own_time(last, call.start, step),
                call=0.0 if waits else min(call.end - call.start, cap),
                device=sum(net for _, net in ops),
                nodes=len(ops),
                path=path,
                backward=backward,
                waits=waits,
                operator=operator,
                graph=call.kind is CallKind.GRAPH,
                name=call.name,
            )
        )
        last = max(last, call.end)
    if step.end > last:  # what the host does behind its last launch takes its time too
        found.append(Launch(at=step.end, before=_own_time(last, step.end, step), call=0.0, device=0.0, nodes=0))
    return found


def _own_time(start: float, end: float, step: Iteration) -> float:
    """Host time between two moments, without what it spent on fetching a batch."""
    return max(0.0, end - start - sum(overlap((start, end), span) for span in step.loading))


def _work(step: Iteration) -> dict[int, list[tuple[DeviceOp, Microseconds]]]:
    work: dict[int, list[tuple[DeviceOp, Microseconds]]] = {}
    for op, net in net_durations(step.ops):
        if op.correlation is not None:
            work.setdefault(op.correlation, []).append((op, net))
    return work


def _returns_late(call: HostCall, ops: Sequence[DeviceOp]) -> bool:
    """A copy to or from pageable memory returns when it is done, though its name says asynchronous."""
    return any(op.kind == "memcpy" and "DtoD" not in op.name and call.end >= op.end - _NEAR for op in ops)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


class Attribution:
    """Which module, phase and operator a moment on a host thread belongs to."""

    def __init__(self, step: Iteration) -> None:
        owners = [r for r in step.ranges if r.kind in (RangeKind.MODULE, RangeKind.OPTIMIZER)]
        self._owner = _by_thread(owners, innermost=True)
        self._backward = _by_thread((r for r in step.ranges if r.backward and r.sequence is not None), innermost=True)
        self._operator = _by_thread((r for r in step.ranges if r.kind is RangeKind.OP), innermost=False)
        self._born: dict[int, str] = {}
        for r in step.ranges:
            if r.kind is RangeKind.OP and not r.backward and r.sequence is not None:
                owner = self._at(self._owner, r.thread, r.start)
                if owner is not None and owner.kind is RangeKind.MODULE:
                    self._born[r.sequence] = module_name(owner.name)[0]

    def __call__(self, call: HostCall) -> tuple[str, bool, str]:
        operator = self._at(self._operator, call.thread, call.start)
        name = operator.name.removeprefix("autograd::engine::evaluate_function: ") if operator else ""
        back = self._at(self._backward, call.thread, call.start)
        owner = self._at(self._owner, call.thread, call.start)
        if owner is not None and owner.kind is RangeKind.OPTIMIZER:
            return OPTIMIZER, False, name
        if owner is not None:  # recomputation under checkpointing also lands here, on autograd's thread
            return module_name(owner.name)[0], back is not None, name
        if back is not None and back.sequence is not None:
            return self._born.get(back.sequence, OUTSIDE), True, name
        return OUTSIDE, False, name

    @staticmethod
    def _at(index: dict[int, Callable[[float], HostRange | None]], thread: int, at: float) -> HostRange | None:
        lookup = index.get(thread)
        return lookup(at) if lookup else None


def _by_thread(ranges: Iterable[HostRange], innermost: bool) -> dict[int, Callable[[float], HostRange | None]]:
    threads: dict[int, list[HostRange]] = {}
    for r in ranges:
        threads.setdefault(r.thread, []).append(r)
    return {thread: _lookup(nested, innermost) for thread, nested in threads.items()}


def _lookup(nested: list[HostRange], innermost: bool) -> Callable[[float], HostRange | None]:
    """Which of the properly nested ranges is on top at a time: a sweep now, a bisection later."""
    moments = [(r.start, 1, -r.end, r) for r in nested] + [(r.end, 0, -r.start, r) for r in nested]
    times: list[float] = []
    tops: list[HostRange | None] = []
    stack: list[HostRange] = []
    for at, opens, _, r in sorted(moments, key=lambda m: m[:3]):
        if opens:
            stack.append(r)
        elif r in stack:
            stack.remove(r)
        times.append(at)
        tops.append((stack[-1] if innermost else stack[0]) if stack else None)

    def at_time(at: float) -> HostRange | None:
        i = bisect_right(times, at) - 1
        return tops[i] if i >= 0 else None

    return at_time
