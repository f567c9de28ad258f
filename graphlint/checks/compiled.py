"""Functions compiled with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, cell_name, constant, place
from graphlint.flow import events as ev
from graphlint.flow.values import (
    Storage,
    Tensor,
    Wrapped,
    tensors_in,
)


def overwritten_output(walk: Walk) -> Iterator[Report]:
    """The result of a compiled call is used after the next call of the same function."""
    calls: dict[int, list[ev.CallEvent]] = {}
    reported: set[int] = set()
    for event in walk.events:
        if (
            isinstance(event, ev.CallEvent)
            and event.name == "<compiled>.__call__"
            and isinstance(event.receiver, Wrapped)
            and event.receiver.facts.get("graphs")
        ):
            calls.setdefault(id(event.receiver), []).append(event)
        if event.capture is not None or not isinstance(event, (ev.CallEvent, ev.OpEvent, ev.MutateEvent)):
            continue
        values = (
            list(event.operands)
            if isinstance(event, ev.OpEvent)
            else (
                list(event.values)
                if isinstance(event, ev.MutateEvent)
                else [*event.args, *event.keywords.values(), *([event.receiver] if event.receiver is not None else [])]
            )
        )
        for value in values:
            for one in tensors_in(value):
                yield from _overwritten(one.storage, one, event, calls, reported, walk)


def _overwritten(
    storage: Storage,
    tensor: Tensor,
    event: ev.Event,
    calls: dict[int, list[ev.CallEvent]],
    reported: set[int],
    walk: Walk,
) -> Iterator[Report]:
    if storage.via is None or storage.via.kind != "compile":
        return
    for ident, made in calls.items():
        mine = next((call for call in made if any(one.storage is storage for one in tensors_in(call.result))), None)
        if mine is None or ident in reported:
            continue
        later = next(
            (call for call in made if call.clock > mine.clock and call.clock < event.clock and call is not event), None
        )
        if later is None or _same_call(event, later) or (tensor.grad and _pending(mine, later, walk)):
            continue
        reported.add(ident)
        report = at(
            later,
            "overwritten-output",
            storage.via,
            why=f"its result of {place(mine.frame, mine.at)} is still read at {place(event.frame, event.at)}",
        )
        report.related.append((mine.frame, mine.at, "the earlier result comes from here"))
        report.related.append((event.frame, event.at, "and is read here"))
        yield report


def _same_call(event: ev.Event, call: ev.CallEvent) -> bool:
    """Whether the event belongs to the call itself: where the callee may be compiled or not, both are walked."""
    frame: ev.Frame | None = event.frame
    while frame is not None:
        if frame.call_at == call.at and frame.parent is call.frame:
            return True
        frame = frame.parent
    return False


def _pending(mine: ev.CallEvent, later: ev.CallEvent, walk: Walk) -> bool:
    """Whether both calls belong to one step: in gradient mode, with neither a backward nor a step mark between; then
    the results lie side by side."""
    if constant(mine.keywords.get("<grad>")) is not True:
        return False
    between = (event for event in walk.of(ev.CallEvent) if mine.clock < event.clock < later.clock)
    return not any(
        event.name.endswith((".backward", "cudagraph_mark_step_begin", "autograd.grad")) for event in between
    )


def skipped_cudagraph(walk: Walk) -> Iterator[Report]:
    """A function compiled with CUDA graphs that writes its inputs, or takes CPU tensors."""
    for event in walk.of(ev.CallEvent):
        if (
            event.name != "<compiled>.__call__"
            or not isinstance(event.receiver, Wrapped)
            or not event.receiver.facts.get("graphs")
            or event.capture is not None
        ):
            continue
        capture = event.receiver.facts.get("capture")
        given = {
            one.storage
            for value in (*event.args, *event.keywords.values())
            for one in tensors_in(value)
            if one.storage.owner not in ("param", "buffer")
        }
        for write in walk.of(ev.InplaceEvent):
            if capture is not None and write.capture is capture and write.storage in given:
                yield at(write, "skipped-cudagraph", capture, why="is an input that the function writes", value="")
                return
        hosted = [
            one
            for value in (*event.args, *event.keywords.values())
            for one in tensors_in(value)
            if one.sure and one.device in ("cpu", "pinned")
        ]
        if hosted and capture is not None and _on_device_too(event, capture, walk):
            name = cell_name(hosted[0].storage.cell).lstrip(".") if hosted[0].storage.cell is not None else ""
            yield at(
                event,
                "skipped-cudagraph",
                capture,
                why="is given a CPU tensor" if not name else f"is given `{name}`, a CPU tensor",
            )
            return


def _on_device_too(event: ev.CallEvent, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the call is about the GPU at all: another argument lies there, or something in the region does."""
    values = [*event.args, *event.keywords.values()]
    if any(one.device == "cuda" for value in values for one in tensors_in(value)):
        return True
    return any(
        one.device == "cuda"
        for inner in walk.inside(capture)
        if isinstance(inner, ev.CallEvent)
        for one in tensors_in(inner.result)
    )
