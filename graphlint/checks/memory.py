"""Addresses: what a graph reads and writes stays where it was at capture, and what happens to it afterwards in
Python."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, cell_name, replayed_after, within
from graphlint.flow import events as ev
from graphlint.flow import modules, names
from graphlint.flow.values import (
    Cell,
    Choice,
    External,
    Holder,
    Instance,
    Items,
    Mapping,
    Scope,
    Storage,
    Tensor,
    Unknown,
    Value,
    alternatives,
    tensors_in,
)

_PYTHON = ("graph", "manual", "graphed-callable")


def captured(walk: Walk) -> Iterator[ev.Capture]:
    """The captures whose memory Python code manages by hand."""
    for capture in walk.captures:
        if capture.kind in _PYTHON and capture.end:
            yield capture


def inputs_of(capture: ev.Capture, walk: Walk) -> dict[Cell, tuple[ev.ReadEvent, Tensor]]:
    """The cells that a capture read a tensor from, where the tensor lay in memory that existed before."""
    found: dict[Cell, tuple[ev.ReadEvent, Tensor]] = {}
    for event in walk.of(ev.ReadEvent):
        if event.capture is capture:
            for one in alternatives(event.value):
                if isinstance(one, Tensor) and one.storage.pool is not capture and not one.on_host:
                    found.setdefault(event.cell, (event, one))
    return found


def memory_read(capture: ev.Capture, walk: Walk) -> set[Storage]:
    """Every storage from before the capture that work in it touches."""
    found: set[Storage] = {tensor.storage for _, tensor in inputs_of(capture, walk).values()}
    for event in walk.inside(capture):
        values: list[Value] = []
        if isinstance(event, ev.CallEvent):
            values = [*event.args, *event.keywords.values()] + ([event.receiver] if event.receiver is not None else [])
        elif isinstance(event, ev.OpEvent):
            values = list(event.operands)
        elif isinstance(event, ev.InplaceEvent) and event.storage.pool is not capture:
            found.add(event.storage)
        found |= {one.storage for value in values for one in tensors_in(value) if one.storage.pool is not capture}
    return found


def stale(capture: ev.Capture, event: ev.Event, walk: Walk) -> bool:
    """Whether the graph runs after the event without being captured anew; in a class seen by itself, whether it may."""
    if replayed_after(capture, event.clock, walk) is not None:
        return True
    if walk.whole:
        return False
    again = [one for one in walk.captures if one is not capture and one.at == capture.at and one.begin > event.clock]
    return not again and bool(walk.replays(capture)) and walk.kept(capture)


def rebound_input(walk: Walk) -> Iterator[Report]:
    """A name or attribute that a capture read a tensor from is bound to another tensor."""
    for capture in captured(walk):
        written = {event.cell for event in walk.of(ev.WriteEvent) if event.capture is capture}
        for cell, (read, tensor) in inputs_of(capture, walk).items():
            if cell in written:
                continue
            for event in walk.of(ev.WriteEvent):
                if (
                    event.cell != cell
                    or event.capture is not None
                    or event.clock < capture.end
                    or event.how in ("loop", "zero_grad", "grad", "mode")
                ):
                    continue
                if not event.sure and _in_sequence(event, replayed_after(capture, event.clock, walk)):
                    continue  # made anew only where it does not fit: whether it fits was not seen
                if (
                    not _other_tensor(event, tensor, walk)
                    or not stale(capture, event, walk)
                    or _refilled(tensor.storage, event, capture, walk)
                ):
                    continue
                if isinstance(cell.holder, Scope) and not _local_input(cell, event, walk):
                    continue
                if _restored(cell, tensor, event, capture, walk):
                    continue
                yield _replaced(
                    cell, tensor, read, event, capture, not isinstance(cell.holder, Scope) and _made_empty(event, walk)
                )
                break


def rebound_container(walk: Walk) -> Iterator[Report]:
    """An attribute that holds a list, dict or record of a capture's inputs is bound to another one, with other
    tensors."""
    for capture in captured(walk):
        read = inputs_of(capture, walk)
        through = {id(cell.holder): (cell, event, tensor) for cell, (event, tensor) in read.items()}
        for event in walk.of(ev.WriteEvent):
            if (
                event.capture is not None
                or event.clock < capture.end
                or event.how != "assign"
                or not event.sure
                or isinstance(event.cell.holder, Scope)
                or event.old is None
                or isinstance(event.old, Choice)
            ):
                continue
            inner = next((through[id(one)] for one in _containers(event.old) if id(one) in through), None)
            if inner is None or type(event.new) is not type(event.old):
                continue
            _, reading, tensor = inner
            given = {
                one.storage
                for holder in _containers(event.new)
                for value in holder.slots.values()
                for one in alternatives(value)
                if isinstance(one, Tensor)
            }
            if (
                given
                and tensor.storage not in given
                and stale(capture, event, walk)
                and not _refilled(tensor.storage, event, capture, walk)
                and not _restored_container(event, capture, walk)
            ):
                yield _replaced(event.cell, tensor, reading, event, capture, False)
                break


def _containers(value: Value, depth: int = 3) -> Iterator[Holder]:
    """A list, dict or record, and those in it; a module is none."""
    if isinstance(value, (Items, Mapping)) or (isinstance(value, Instance) and not modules.is_module(value)):
        yield value
        for inner in list(value.slots.values()) if depth else ():
            yield from _containers(inner, depth - 1)


def _restored_container(change: ev.WriteEvent, capture: ev.Capture, walk: Walk) -> bool:
    replay = replayed_after(capture, change.clock, walk)
    return replay is not None and any(
        event.cell == change.cell and event.new is change.old and change.clock < event.clock < replay.clock
        for event in walk.of(ev.WriteEvent)
    )


def rebound_state(walk: Walk) -> Iterator[Report]:
    """A region computes new state from old and binds it to the same name: the graph reads the old memory at each
    replay."""
    for capture in captured(walk):
        replays = walk.replays(capture)
        if capture.kind == "graphed-callable" or len(replays) < 2:
            continue
        read = inputs_of(capture, walk)
        for event in walk.inside(capture):
            if (
                not isinstance(event, ev.WriteEvent)
                or not event.sure
                or event.cell not in read
                or event.how not in ("assign", "augment", "update")
            ):
                continue
            old, new = read[event.cell][1], event.new
            if (
                not isinstance(new, Tensor)
                or new.storage.pool is not capture
                or (isinstance(event.cell.holder, Scope) and event.cell.holder.outer is not None)
            ):
                continue
            if read[event.cell][0].clock > event.clock or _carried_over(old.storage, event.cell, capture, walk):
                continue
            report = at(
                event,
                "replaced-buffer",
                capture,
                value=cell_name(event.cell).lstrip("."),
                why="binds new memory inside the region",
            )
            report.related.append(
                (
                    read[event.cell][0].frame,
                    read[event.cell][0].at,
                    "each replay reads the memory of the capture here, not what the last replay left",
                )
            )
            yield report
            break


def _carried_over(old: Storage, cell: Cell, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the state comes back into the old memory, or is bound anew: in the region behind the reading, or
    outside."""
    if any(event.storage is old and event.clock > capture.begin for event in walk.of(ev.InplaceEvent)):
        return True
    inside = {event.at for event in walk.inside(capture) if isinstance(event, ev.WriteEvent) and event.cell == cell}
    writes = [
        event
        for event in walk.of(ev.WriteEvent)
        if event.cell == cell
        and event.clock > capture.begin
        and (walk.whole or event.capture is capture or event.at not in inside)
    ]
    return writes[-1].capture is not capture or any(
        isinstance(one, Tensor) and one.storage is old for event in writes for one in alternatives(event.new)
    )


def _in_sequence(event: ev.Event, replay: ev.ReplayEvent | None) -> bool:
    """Whether both happened in one run of the program, and not in two methods of a class that were tried one after the
    other."""
    return replay is not None and _root(event.frame) is _root(replay.frame)


def _root(frame: ev.Frame) -> ev.Frame:
    while frame.parent is not None and frame.parent.call_at is not None:
        frame = frame.parent
    return frame


def _moved_in(event: ev.WriteEvent, walk: Walk) -> bool:
    """Whether what is bound comes from `.to()` or `.cuda()` of something: where a tensor stood, that is another
    tensor."""
    calls = (one for one in walk.of(ev.CallEvent) if one.frame is event.frame and one.name in ("?.to", "?.cuda"))
    return any(within(one.at, event.at) and event.at[0] == one.at[0] for one in calls)


def _other_tensor(event: ev.WriteEvent, tensor: Tensor, walk: Walk) -> bool:
    if isinstance(event.new, Unknown):
        return event.how == "assign" and _moved_in(event, walk)
    found = [one for one in alternatives(event.new) if isinstance(one, Tensor)]
    return (
        bool(found)
        and all(one.storage is not tensor.storage for one in found)
        and len(found) == len(alternatives(event.new))
    )


def _refilled(storage: Storage, change: ev.Event, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the memory that the graph reads is written between the change and the next replay."""
    replay = replayed_after(capture, change.clock, walk)
    until = replay.clock if replay is not None else 1 << 60
    return any(event.storage is storage and change.clock < event.clock < until for event in walk.of(ev.InplaceEvent))


def _restored(cell: Cell, tensor: Tensor, change: ev.Event, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the old tensor is back in its place before the replay."""
    replay = replayed_after(capture, change.clock, walk)
    if replay is None:
        return False
    last = [
        event for event in walk.of(ev.WriteEvent) if event.cell == cell and change.clock < event.clock < replay.clock
    ]
    return bool(last) and any(
        isinstance(one, Tensor) and one.storage is tensor.storage for one in alternatives(last[-1].new)
    )


def _replays_next(event: ev.WriteEvent, walk: Walk) -> bool:
    """Whether a replay is the next thing that happens, as behind a refill."""
    for later in walk.after(event.clock):
        if isinstance(later, ev.ReplayEvent):
            return True
        if isinstance(later, ev.OpEvent) or (isinstance(later, ev.CallEvent) and not later.name.endswith(".replay")):
            return False
    return False


def _local_input(cell: Cell, event: ev.WriteEvent, walk: Walk) -> bool:
    """A local that is rebound is an input by its name alone; the new tensor must not be used for anything else before
    the replay."""
    new = next((one for one in alternatives(event.new) if isinstance(one, Tensor)), None)
    if new is None:
        return isinstance(event.new, Unknown) and _replays_next(event, walk)
    for later in walk.events:
        if later.clock <= event.clock:
            continue
        if isinstance(later, ev.ReplayEvent):
            return True
        if isinstance(later, (ev.CallEvent, ev.OpEvent)):
            values = (
                [*later.args, *later.keywords.values(), later.receiver]
                if isinstance(later, ev.CallEvent)
                else list(later.operands)
            )
            if any(one.storage is new.storage for value in values if value is not None for one in tensors_in(value)):
                return False
    return False


def _replaced(
    cell: Cell, tensor: Tensor, read: ev.ReadEvent, event: ev.WriteEvent, capture: ev.Capture, made_new: bool
) -> Report:
    owner = tensor.storage.owner
    if owner == "param":
        rule = "replaced-parameter"
    elif owner == "buffer" or isinstance(cell.holder, Mapping) or _is_cache(cell) or made_new:
        rule = "replaced-buffer"
    else:
        rule = "rebound-input"
    report = at(event, rule, capture, value=cell_name(cell).lstrip("."), why="replaces the tensor")
    report.related.append((read.frame, read.at, "the graph reads the tensor that stood here at capture"))
    return report


def _made_empty(event: ev.WriteEvent, walk: Walk) -> bool:
    """Whether what is bound is a fresh tensor of zeros and the like: state that starts anew, and no data that came
    in."""
    return any(
        one.result is event.new
        and one.name.rpartition(".")[2] in names.FACTORIES | names.LIKE
        and within(one.at, event.at)
        for one in walk.of(ev.CallEvent)
    )


def _is_cache(cell: Cell) -> bool:
    return isinstance(cell.key, str) and any(
        word in cell.key.lower() for word in ("cache", "table", "buffer", "kv", "state", "mask", "freq")
    )


def replaced_parameter(walk: Walk) -> Iterator[Report]:
    """Parameters or buffers of a captured module get new memory."""
    for capture in captured(walk):
        touched = memory_read(capture, walk)
        called = {
            id(event.receiver)
            for event in walk.inside(capture)
            if isinstance(event, ev.CallEvent) and event.receiver is not None
        }
        for event in walk.of(ev.MoveEvent):
            if event.capture is not None or event.clock < capture.end or not stale(capture, event, walk):
                continue
            parts = {id(part) for part in modules.parts(event.owner)}
            if set(event.storages) & touched or parts & called:
                why = {
                    "vector_to_parameters": "puts slices of the vector behind the parameters",
                    ".data": "puts other memory behind the tensor",
                    "load_state_dict(assign=True)": "puts the loaded tensors in the place of the old ones",
                }
                yield at(
                    event, "replaced-parameter", capture, why=why.get(event.how, "gives the parameters new memory")
                )


__all__ = ["External", "Instance", "captured", "inputs_of", "memory_read"]
