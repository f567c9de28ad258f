"""Static inputs: filled in time, filled whole, every one of them, and alive as long as the graph."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, cell_name, place, replayed_after
from graphlint.checks.memory import captured, inputs_of
from graphlint.flow import events as ev
from graphlint.flow.values import (
    Host,
    Items,
    Mapping,
    Storage,
    Tensor,
    alternatives,
    tensors_in,
)


def late_refill(walk: Walk) -> Iterator[Report]:
    """A static input is filled after the replay that should have read it, and never before one."""
    for capture in captured(walk):
        replays = walk.replays(capture)
        if not replays:
            continue
        storages = {tensor.storage: cell for cell, (_, tensor) in inputs_of(capture, walk).items() if tensor.storage.owner not in ("param", "grad")}
        for storage, cell in storages.items():
            fills = [event for event in walk.of(ev.InplaceEvent) if event.storage is storage and event.name == "copy_" and event.capture is None and event.clock > capture.end]
            for fill in fills:
                same = [event for event in replays if event.frame is fill.frame]
                others = [event for event in fills if event.frame is fill.frame]
                if not same or others[0] is not fill:
                    continue
                if same[0].clock < others[0].clock and same[-1].clock < others[-1].clock and len(same) == len(others):
                    report = at(fill, "late-refill", capture, value=cell_name(cell).lstrip("."), why="after the replay", where=place(same[0].frame, same[0].at))
                    report.related.append((same[0].frame, same[0].at, "the replay that should read it has run already"))
                    yield report
                    break


def partial_refill(walk: Walk) -> Iterator[Report]:
    """Only a part of a static input is refilled, and nothing says where the rest ends."""
    for capture in captured(walk):
        inputs = {tensor.storage: cell for cell, (_, tensor) in inputs_of(capture, walk).items() if tensor.storage.owner not in ("param", "grad", "buffer")}
        replays = walk.replays(capture)
        for fill in walk.of(ev.InplaceEvent):
            if not fill.part or fill.storage not in inputs or fill.capture is not None or fill.clock < capture.end or fill.source is None:
                continue
            if not any(isinstance(one, Tensor) for one in alternatives(fill.source)):
                continue
            beside = [event for event in walk.of(ev.InplaceEvent) if event.frame is fill.frame and event is not fill and event.clock > capture.end]
            if any(event.storage is fill.storage or event.storage in inputs for event in beside):
                continue  # the rest is cleared, or a length or a mask goes with it
            replay = next((event for event in replays if event.clock > fill.clock), None)
            if replay is None or _used_in_part(capture, replay, walk):
                continue
            report = at(fill, "partial-refill", capture, value=cell_name(inputs[fill.storage]).lstrip("."))
            report.related.append((replay.frame, replay.at, "the replay reads all of it"))
            yield report
            break


def _used_in_part(capture: ev.Capture, replay: ev.ReplayEvent, walk: Walk) -> bool:
    """Whether only a part of the output is taken after the replay."""
    return any(
        isinstance(event, ev.IndexEvent) and event.clock > replay.clock and any(isinstance(one, Tensor) and one.storage.pool is capture for one in alternatives(event.obj))
        for event in walk.of(ev.IndexEvent)
    )


def skipped_input(walk: Walk) -> Iterator[Report]:
    """A refill that looks at one level of the arguments passes over tensors nested in them."""
    for capture in captured(walk):
        reads = {tensor.storage for _, tensor in inputs_of(capture, walk).values()}
        filled = {event.storage for event in walk.of(ev.InplaceEvent) if event.clock > capture.end and event.capture is None}
        forgotten = reads - filled
        if not forgotten or not walk.replays(capture):
            continue
        for event in walk.of(ev.CallEvent):
            if event.capture is not None or event.clock < capture.end or not _asks_for_tensor(event):
                continue
            nested = [one for one in alternatives(event.args[0]) if isinstance(one, (Mapping, Items))]
            if not nested or not tensors_in(nested[0]) or (isinstance(event.result, Host) and event.result.value is True):
                continue
            fills_here = [one for one in walk.of(ev.InplaceEvent) if one.frame is event.frame and one.name == "copy_"]
            descends = [one for one in walk.of(ev.CallEvent) if one.frame is not event.frame and one.clock > event.clock and one.frame.parent is event.frame]
            if (not fills_here and not _fills_around(event, walk)) or descends:
                continue
            held = _held_nested(capture, forgotten, walk)
            if held is None:
                continue
            report = at(event, "skipped-input", capture, why="tensors nested in dicts and lists", value=held)
            yield report
            break


def _asks_for_tensor(event: ev.CallEvent) -> bool:
    if event.name == "torch.is_tensor" and event.args:
        return True
    return event.name == "builtins.isinstance" and len(event.args) > 1 and "Tensor" in str(getattr(event.args[1], "name", ""))


def _fills_around(event: ev.CallEvent, walk: Walk) -> bool:
    """The loop that asks fills static inputs of other arguments in the same function."""
    return any(one.frame.func is event.frame.func and one.name == "copy_" for one in walk.of(ev.InplaceEvent))


def _held_nested(capture: ev.Capture, forgotten: set[Storage], walk: Walk) -> str | None:
    for cell, (_, tensor) in inputs_of(capture, walk).items():
        if tensor.storage in forgotten and isinstance(cell.holder, (Mapping, Items)) and tensor.storage.owner == "":
            return str(cell.key)
    return None


def dead_input(walk: Walk) -> Iterator[Report]:
    """The only name of a static input is deleted after the capture."""
    for capture in captured(walk):
        inputs = inputs_of(capture, walk)
        for event in walk.of(ev.WriteEvent):
            if event.how != "del" or event.capture is not None or event.clock < capture.end or event.cell not in inputs:
                continue
            tensor = inputs[event.cell][1]
            others = [cell for cell, (_, one) in inputs.items() if one.storage is tensor.storage and cell != event.cell]
            kept = any(isinstance(one.new, Tensor) and one.new.storage is tensor.storage and one.cell != event.cell for one in walk.of(ev.WriteEvent))
            if not others and not kept and replayed_after(capture, event.clock, walk) and tensor.storage.owner == "":
                yield at(event, "dead-input", capture, value=cell_name(event.cell).lstrip("."))
