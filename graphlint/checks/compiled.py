"""Functions compiled with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, place
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
        if isinstance(event, ev.CallEvent) and event.name == "<compiled>.__call__" and isinstance(event.receiver, Wrapped) and event.receiver.facts.get("graphs"):
            calls.setdefault(id(event.receiver), []).append(event)
        if event.capture is not None or not isinstance(event, (ev.CallEvent, ev.OpEvent, ev.MutateEvent)):
            continue
        values = list(event.operands) if isinstance(event, ev.OpEvent) else (list(event.values) if isinstance(event, ev.MutateEvent) else [*event.args, *event.keywords.values(), *([event.receiver] if event.receiver is not None else [])])
        for value in values:
            for one in tensors_in(value):
                yield from _overwritten(one.storage, one, event, calls, reported)


def _overwritten(storage: Storage, tensor: Tensor, event: ev.Event, calls: dict[int, list[ev.CallEvent]], reported: set[int]) -> Iterator[Report]:
    if storage.via is None or storage.via.kind != "compile":
        return
    for ident, made in calls.items():
        mine = next((call for call in made if any(one.storage is storage for one in tensors_in(call.result))), None)
        if mine is None or ident in reported:
            continue
        later = next((call for call in made if call.clock > mine.clock and call.clock < event.clock and call is not event), None)
        if later is None or (tensor.grad and _trains(made)):
            continue
        reported.add(ident)
        report = at(later, "overwritten-output", storage.via, why=f"its result of {place(mine.frame, mine.at)} is still read at {place(event.frame, event.at)}")
        report.related.append((mine.frame, mine.at, "the earlier result comes from here"))
        report.related.append((event.frame, event.at, "and is read here"))
        yield report


def _trains(calls: list[ev.CallEvent]) -> bool:
    return False


def skipped_cudagraph(walk: Walk) -> Iterator[Report]:
    """A function compiled with CUDA graphs that writes its inputs, or takes CPU tensors."""
    for event in walk.of(ev.CallEvent):
        if event.name != "<compiled>.__call__" or not isinstance(event.receiver, Wrapped) or not event.receiver.facts.get("graphs") or event.capture is not None:
            continue
        capture = event.receiver.facts.get("capture")
        given = {one.storage for value in (*event.args, *event.keywords.values()) for one in tensors_in(value) if one.storage.owner not in ("param", "buffer")}
        for write in walk.of(ev.InplaceEvent):
            if capture is not None and write.capture is capture and write.storage in given:
                report = at(write, "skipped-cudagraph", capture, why="is an input that the function writes", value="")
                yield report
                return
