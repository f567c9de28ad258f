"""Graphs that share a memory pool: whose results another graph of the pool overwrites, and what keeps the pool from
being shared."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, cell_name, operands, place, where
from graphlint.checks.memory import captured
from graphlint.flow import events as ev
from graphlint.flow.values import Items, Mapping, Tensor, Value, tensors_in


def pools(walk: Walk) -> list[list[ev.Capture]]:
    """The captures that share a pool, in the order in which they were made."""
    found: dict[int, list[ev.Capture]] = {}
    for capture in captured(walk):
        if capture.memory is not None and capture.kind != "graphed-callable" and capture.graph is not None:
            found.setdefault(id(capture.memory), []).append(capture)
    return [one for one in found.values() if len(one) > 1]


def shared_pool_output(walk: Walk) -> Iterator[Report]:
    """A result is read behind a replay of an earlier graph of its pool, whose scratch memory lies where the result
    is."""
    for group in pools(walk):
        replays = sorted(
            ((replay, capture) for capture in group for replay in walk.replays(capture)), key=lambda pair: pair[0].clock
        )
        if len({id(capture) for _, capture in replays}) < 2:
            continue
        found = _overwritten(group, replays, walk) or _side_by_side(replays, walk)
        if found is not None:
            yield found


def _overwritten(
    group: list[ev.Capture], replays: list[tuple[ev.ReplayEvent, ev.Capture]], walk: Walk
) -> Report | None:
    order = {id(capture): index for index, capture in enumerate(group)}
    for event in walk.events:
        if (
            event.capture is not None
            or not isinstance(event, (ev.CallEvent, ev.OpEvent))
            or (isinstance(event, ev.CallEvent) and event.name.startswith("builtins."))
        ):
            continue
        before = [pair for pair in replays if pair[0].clock < event.clock]
        for value in operands(event):
            for one in tensors_in(value):
                owner = one.storage.pool
                if owner is None or id(owner) not in order or not before:
                    continue
                mine = [replay for replay, capture in before if capture is owner]
                spoiler = next(
                    (
                        (replay, capture)
                        for replay, capture in before
                        if mine and replay.clock > mine[-1].clock and order[id(capture)] < order[id(owner)]
                    ),
                    None,
                )
                if spoiler is not None:
                    report = at(event, "shared-pool-output", owner, value=_name(one), where=where(spoiler[1]))
                    report.related.append(
                        (spoiler[0].frame, spoiler[0].at, "this replay comes behind the one that made the result")
                    )
                    return report
    return None


def _name(tensor: Tensor) -> str:
    return cell_name(tensor.storage.cell).lstrip(".") if tensor.storage.cell is not None else ""


def _side_by_side(replays: list[tuple[ev.ReplayEvent, ev.Capture]], walk: Walk) -> Report | None:
    """Two graphs of the pool replay on two side streams with nothing between them that waits."""
    for index, (second, later) in enumerate(replays):
        for first, earlier in replays[:index]:
            if earlier is later or first.stream is None or second.stream is None or first.stream is second.stream:
                continue
            waits = any(
                first.clock < event.clock < second.clock and _waits(event, first, second)
                for event in walk.of(ev.CallEvent)
            )
            if not waits:
                report = at(
                    second, "shared-pool-output", later, value="the scratch memory of the graph", where=where(earlier)
                )
                report.related.append(
                    (
                        first.frame,
                        first.at,
                        f"the other graph runs at the same time, on another stream: {place(first.frame, first.at)}",
                    )
                )
                return report
    return None


def _waits(event: ev.CallEvent, first: ev.ReplayEvent, second: ev.ReplayEvent) -> bool:
    """Whether the second stream, or the host, waits for the first here."""
    if event.name.endswith(".synchronize") or event.name.startswith("?"):
        return True
    if event.name.endswith("Stream.wait_stream"):
        return event.receiver is second.stream and bool(event.args) and event.args[0] is first.stream
    return event.name.endswith((".wait_event", "Event.wait"))


def pinned_outputs(walk: Walk) -> Iterator[Report]:
    """One loop captures a graph per size into one pool, and each result is kept: no capture can use the memory of
    another."""
    for group in pools(walk):
        same = [capture for capture in group if capture.at == group[0].at and capture.frame.func is group[0].frame.func]
        if len(same) < 2 or _few(same, walk):
            continue
        kept = [_kept(capture, walk) for capture in same]
        first = next((one for one in kept if one is not None), None)
        if first is None or any(one is None for one in kept[:2]):
            continue
        yield at(first, "pinned-outputs", same[0], value=_holder_name(first, walk))


def _few(captures: list[ev.Capture], walk: Walk) -> bool:
    """Whether they come from no loop, or from one over a handful of sizes that are written out."""
    frame = next((frame for frame, _, loops in captures[1].stack if loops), None)
    if frame is None:
        return True
    loops = [event for event in walk.of(ev.LoopEvent) if event.frame is frame and event.clock < captures[0].begin]
    return (
        bool(loops) and isinstance(loops[-1].value, Items) and loops[-1].value.exact and len(loops[-1].value.slots) < 5
    )


def _kept(capture: ev.Capture, walk: Walk) -> ev.Event | None:
    """Where a result of the graph is put into a dict or list that lasts, as it is."""
    for event in walk.after(capture.begin):
        values: list[Value] = []
        if (
            isinstance(event, ev.WriteEvent)
            and isinstance(event.cell.holder, (Mapping, Items))
            and event.cell.holder.born < capture.begin
        ):
            values = [event.new]
        elif (
            isinstance(event, ev.MutateEvent) and event.name in ("append", "add") and event.holder.born < capture.begin
        ):
            values = list(event.values)
        if any(one.storage.pool is capture for value in values for one in tensors_in(value)):
            return event
    return None


def _holder_name(event: ev.Event, walk: Walk) -> str:
    holder = event.cell.holder if isinstance(event, ev.WriteEvent) else getattr(event, "holder", None)
    cell = next((one.cell for one in walk.of(ev.WriteEvent) if one.new is holder), None)
    return cell_name(cell).lstrip(".") if cell is not None else "outputs"
