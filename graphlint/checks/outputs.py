"""What a graph leaves behind: results that the next replay overwrites, and results read too early."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, place
from graphlint.checks.memory import captured
from graphlint.flow import events as ev
from graphlint.flow.values import (
    Mapping,
    Scope,
    Storage,
    Tensor,
    Value,
    tensors_in,
)


def _outputs(value: Value, capture: ev.Capture) -> list[Tensor]:
    return [one for one in tensors_in(value) if one.storage.pool is capture or one.storage.via is capture]


def kept_output(walk: Walk) -> Iterator[Report]:
    """A static output is kept in a container over the next replay of its graph."""
    for capture in captured(walk):
        replays = walk.replays(capture)
        if len(replays) < 2:
            continue
        for event in walk.of(ev.MutateEvent):
            if event.capture is not None or event.clock < replays[0].clock or event.name not in ("append", "add", "appendleft", "extend", "insert", "collect"):
                continue
            kept = [one for value in event.values for one in _outputs(value, capture)]
            again = len(event.values) > 1 if event.name == "collect" else any(one.clock > event.clock for one in replays)
            if kept and again and not _consumed(event, kept, replays, walk):
                yield at(event, "kept-output", capture, why="is kept here over the next replay")
                break
        yield from _kept_twice(capture, replays, walk)


def _consumed(event: ev.MutateEvent, kept: list[Tensor], replays: list[ev.ReplayEvent], walk: Walk) -> bool:
    """Whether the container is emptied again before the next replay."""
    following = next((one.clock for one in replays if one.clock > event.clock), 1 << 60)
    return any(one.holder is event.holder and one.name in ("clear", "pop", "popleft") and event.clock < one.clock < following for one in walk.of(ev.MutateEvent))


def _kept_twice(capture: ev.Capture, replays: list[ev.ReplayEvent], walk: Walk) -> Iterator[Report]:
    """Two names of results from different replays that are one memory, used together or after the second replay."""
    held: dict[Storage, ev.WriteEvent] = {}
    for event in walk.events:
        if event.clock < replays[0].clock or event.capture is not None:
            continue
        if isinstance(event, ev.WriteEvent) and isinstance(event.new, Tensor) and _outputs(event.new, capture):
            first = held.get(event.new.storage)
            between = first is not None and any(first.clock < one.clock < event.clock for one in replays)
            if first is not None and between and first.cell != event.cell and first.frame is event.frame and isinstance(event.cell.holder, Scope):
                if _used_together(event, first, walk):
                    yield at(first, "kept-output", capture, why=f"is kept over the replay before {place(event.frame, event.at)}")
                    return
            if first is None or first.cell == event.cell or not between:
                held[event.new.storage] = event
        elif isinstance(event, ev.WriteEvent) and isinstance(event.new, Tensor) and isinstance(event.cell.holder, Mapping) and _outputs(event.new, capture):
            if any(one.clock > event.clock for one in replays):
                yield at(event, "kept-output", capture, why="is kept here over the next replay")
                return


def _used_together(second: ev.WriteEvent, first: ev.WriteEvent, walk: Walk) -> bool:
    """An operation after both names takes the memory twice."""
    assert isinstance(second.new, Tensor)
    storage = second.new.storage
    for event in walk.events:
        if event.clock < second.clock:
            continue
        if isinstance(event, ev.OpEvent):
            count = sum(one.storage is storage for value in event.operands for one in tensors_in(value))
        elif isinstance(event, ev.CallEvent):
            values = [*event.args, *event.keywords.values()] + ([event.receiver] if event.receiver is not None else [])
            count = sum(one.storage is storage for value in values for one in tensors_in(value))
        else:
            continue
        if count > 1:
            return True
    return False


def early_output_read(walk: Walk) -> Iterator[Report]:
    """A static output is read after the capture and before any replay."""
    for capture in captured(walk):
        if capture.kind == "graphed-callable" or capture.graph is None or not walk.whole:
            continue
        first = next((event.clock for event in walk.replays(capture)), None)
        for event in walk.events:
            if event.clock <= capture.end or event.capture is not None or not isinstance(event, (ev.CallEvent, ev.OpEvent)):
                continue
            if first is not None and event.clock > first:
                break
            values = list(event.operands) if isinstance(event, ev.OpEvent) else [*event.args, *([event.receiver] if event.receiver is not None else [])]
            if isinstance(event, ev.CallEvent) and (event.name.startswith(("builtins.", "?", "weakref")) or event.name.rpartition(".")[2] in ("data_ptr", "size", "numel", "dim", "detach", "view", "zero_", "fill_", "untyped_storage")):
                continue
            if first is not None and any(_outputs(value, capture) for value in values):
                yield at(event, "early-output-read", capture)
                break
