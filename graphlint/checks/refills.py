"""Static inputs: filled in time, filled whole, every one of them, and alive as long as the graph."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, cell_name, operands, place, replayed_after
from graphlint.checks.memory import captured, inputs_of, memory_read
from graphlint.flow import events as ev
from graphlint.flow.values import (
    Host,
    Items,
    Mapping,
    Scope,
    Storage,
    Tensor,
    Unknown,
    alternatives,
    tensors_in,
)


def late_refill(walk: Walk) -> Iterator[Report]:
    """A static input is filled after the replay that should have read it, and never before one."""
    for capture in captured(walk):
        replays = walk.replays(capture)
        if not replays:
            continue
        storages = {
            tensor.storage: cell
            for cell, (_, tensor) in inputs_of(capture, walk).items()
            if tensor.storage.owner not in ("param", "grad")
        }
        until = min(
            (one.begin for one in walk.captures if one.at == capture.at and one.begin > capture.end), default=1 << 60
        )
        for storage, cell in storages.items():
            fills = [
                event
                for event in walk.of(ev.InplaceEvent)
                if event.storage is storage
                and event.name == "copy_"
                and event.capture is None
                and event.clock > capture.end
                and event.clock < until
                and not _own_result(event, capture, walk)
            ]
            for fill in fills:
                same = [event for event in replays if event.frame is fill.frame]
                others = [event for event in fills if event.frame is fill.frame]
                if not same or others[0] is not fill:
                    continue
                if until < 1 << 60 and not any(fill.clock < event.clock for event in replays):
                    continue  # what comes next is another capture, which reads it
                if same[0].clock < others[0].clock and same[-1].clock < others[-1].clock and len(same) == len(others):
                    report = at(
                        fill,
                        "late-refill",
                        capture,
                        value=cell_name(cell).lstrip("."),
                        why="after the replay",
                        where=place(same[0].frame, same[0].at),
                    )
                    report.related.append((same[0].frame, same[0].at, "the replay that should read it has run already"))
                    yield report
                    break


def _own_result(fill: ev.InplaceEvent, capture: ev.Capture, walk: Walk) -> bool:
    """State that is fed back: the graph's result becomes its next input."""
    return fill.source is not None and any(_derived(one.storage, capture, walk) for one in tensors_in(fill.source))


def _derived(storage: Storage, capture: ev.Capture, walk: Walk, depth: int = 4) -> bool:
    """Whether the memory is the graph's, or was computed from it."""
    if storage.pool is capture:
        return True
    made = next(
        (
            event
            for event in walk.events
            if isinstance(event, (ev.CallEvent, ev.OpEvent))
            and isinstance(event.result, Tensor)
            and event.result.storage is storage
        ),
        None,
    )
    return (
        made is not None
        and depth > 0
        and any(
            one.storage is not storage and _derived(one.storage, capture, walk, depth - 1)
            for value in operands(made)
            for one in tensors_in(value)
        )
    )


def skipped_input(walk: Walk) -> Iterator[Report]:
    """A refill that looks at one level of the arguments passes over tensors nested in them."""
    for capture in captured(walk):
        reads = {tensor.storage for _, tensor in inputs_of(capture, walk).values()}
        filled = {
            event.storage for event in walk.of(ev.InplaceEvent) if event.clock > capture.end and event.capture is None
        }
        forgotten = reads - filled
        if not forgotten or not walk.replays(capture):
            continue
        touched = memory_read(capture, walk)
        for event in walk.of(ev.CallEvent):
            if event.capture is not None or event.clock < capture.end or not _asks_for_tensor(event):
                continue
            nested = [one for one in alternatives(event.args[0]) if isinstance(one, (Mapping, Items))]
            if (
                not nested
                or not tensors_in(nested[0])
                or (isinstance(event.result, Host) and event.result.value is True)
            ):
                continue
            fills_here = [
                one
                for one in walk.of(ev.InplaceEvent)
                if one.frame is event.frame and one.name == "copy_" and one.storage in touched
            ]
            descends = [
                one
                for one in walk.of(ev.CallEvent)
                if one.frame is not event.frame and one.clock > event.clock and one.frame.parent is event.frame
            ]
            if (not fills_here and not _fills_around(event, touched, walk)) or descends:
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
    return (
        event.name == "builtins.isinstance"
        and len(event.args) > 1
        and "Tensor" in str(getattr(event.args[1], "name", ""))
    )


def _fills_around(event: ev.CallEvent, reads: set[Storage], walk: Walk) -> bool:
    """The loop that asks fills static inputs of other arguments in the same function."""
    return any(
        one.frame.func is event.frame.func and one.name == "copy_" and one.storage in reads
        for one in walk.of(ev.InplaceEvent)
    )


def _held_nested(capture: ev.Capture, forgotten: set[Storage], walk: Walk) -> str | None:
    for cell, (_, tensor) in inputs_of(capture, walk).items():
        if tensor.storage in forgotten and isinstance(cell.holder, (Mapping, Items)) and tensor.storage.owner == "":
            return str(cell.key)
    return None


def unmentioned_input(walk: Walk) -> Iterator[Report]:
    """A caller hands a tensor to the function that refills and replays, and the function never looks at it, though the
    graph reads one of that name."""
    for capture in captured(walk):
        inputs = inputs_of(capture, walk)
        filled = {
            event.storage for event in walk.of(ev.InplaceEvent) if event.clock > capture.end and event.capture is None
        }
        stale = {
            str(cell.key): read
            for cell, (read, tensor) in inputs.items()
            if tensor.storage not in filled and tensor.storage.owner == ""
        }
        for replay in walk.replays(capture):
            report = _forgotten(replay.frame, capture, stale, walk)
            if report is not None:
                yield report
                break


def _forgotten(
    frame: ev.Frame | None, capture: ev.Capture, stale: dict[str, ev.ReadEvent], walk: Walk
) -> Report | None:
    while frame is not None and frame.func is not None:
        for param in frame.func.params:
            value = frame.scope.slots.get(param.name)
            given = value is not None and (
                tensors_in(value) or (isinstance(value, Unknown) and param.default is None and param.kind == "pos")
            )
            if value is None or param.name in ("self", "cls") or not given or param.name in walk.names_in(frame.func):
                continue
            wanted = [str(key) for key in value.slots] if isinstance(value, Mapping) else [param.name]
            name = next(
                (
                    key
                    for word in wanted
                    for key in stale
                    if word and (key == word or key.endswith(f"_{word}") or key.startswith(f"{word}_"))
                ),
                None,
            )
            fill = next(
                (
                    event
                    for event in walk.of(ev.InplaceEvent)
                    if event.frame is frame and event.name == "copy_" and event.clock > capture.end
                ),
                None,
            )
            if name is not None and fill is not None:
                report = at(fill, "skipped-input", capture, why=f"`{param.name}`", value=name)
                report.related.append(
                    (stale[name].frame, stale[name].at, "the graph reads the tensor of the capture here")
                )
                return report
        frame = frame.parent
    return None


def passed_over_argument(walk: Walk) -> Iterator[Report]:
    """A function captures at its first call; at later ones it refills some of its arguments, and never touches another
    that the graph reads."""
    for capture in captured(walk):
        read = {tensor.storage: event for event, tensor in inputs_of(capture, walk).values()}
        for replay in walk.replays(capture) if walk.whole and read else ():
            found = _never_touched(replay, capture, read, walk)
            if found is not None:
                fill, name, reading = found
                report = at(fill, "skipped-input", capture, why=f"`{name}`", value=name)
                report.related.append((reading.frame, reading.at, "the graph reads the tensor of the capture here"))
                yield report
                break


def _never_touched(
    replay: ev.ReplayEvent, capture: ev.Capture, read: dict[Storage, ev.ReadEvent], walk: Walk
) -> tuple[ev.InplaceEvent, str, ev.ReadEvent] | None:
    """In a later call of the function that captured: a refill, and an argument that nothing takes."""
    for then, _, _ in capture.stack:
        now = _call_of(then.func, replay.frame)
        if now is None or now is then or then.func is None:
            continue
        events = [event for event in walk.after(now.scope.born) if _under(event.frame, now)]
        fill = next(
            (
                event
                for event in events
                if isinstance(event, ev.InplaceEvent) and event.name == "copy_" and event.storage in read
            ),
            None,
        )
        for param in then.func.params if fill is not None else ():
            old, new = then.scope.slots.get(param.name), now.scope.slots.get(param.name)
            if not isinstance(old, Tensor) or not isinstance(new, Tensor) or new.storage is old.storage:
                continue
            kept = next((one for one in _copies(old, then, walk) if one in read), None)
            touched = {one.storage for event in events for value in operands(event) for one in tensors_in(value)}
            filled = any(isinstance(event, ev.InplaceEvent) and event.storage is kept for event in events)
            if kept is not None and new.storage not in touched and not filled and fill is not None:
                return fill, param.name, read[kept]
    return None


def _copies(tensor: Tensor, frame: ev.Frame, walk: Walk) -> list[Storage]:
    """The memory of an argument, and of what its function copied it to."""
    made = [
        event.result.storage
        for event in walk.of(ev.CallEvent)
        if isinstance(event.receiver, Tensor)
        and event.receiver.storage is tensor.storage
        and isinstance(event.result, Tensor)
        and event.name.rpartition(".")[2] in ("clone", "to", "cuda", "contiguous", "detach")
        and _under(event.frame, frame)
    ]
    return [tensor.storage, *made]


def _call_of(func: object, frame: ev.Frame | None) -> ev.Frame | None:
    while frame is not None and frame.func is not func:
        frame = frame.parent
    return frame


def _under(frame: ev.Frame | None, above: ev.Frame) -> bool:
    while frame is not None and frame is not above:
        frame = frame.parent
    return frame is above


def dead_input(walk: Walk) -> Iterator[Report]:
    """Nothing holds a tensor that the graph reads when it is replayed: its only name was a local, or is deleted."""
    for capture in captured(walk):
        replay = next((event for event in walk.replays(capture) if event.alive is not None), None)
        if replay is None or replay.alive is None or not _result_wanted(capture, replay, walk):
            continue
        for cell, (read, tensor) in inputs_of(capture, walk).items():
            storage = tensor.storage
            if (
                storage.owner
                or storage in replay.alive
                or storage.pool is not None
                or not isinstance(cell.holder, Scope)
                or cell.holder.outer is None
            ):
                continue
            if not walk.whole and storage.born < capture.frame.scope.born:
                continue  # the caller's: whether it keeps the tensor is not seen
            if not _made_for_sure(storage, walk):
                continue
            report = at(read, "dead-input", capture, value=cell_name(cell).lstrip("."))
            report.related.append((replay.frame, replay.at, "the replay here reads memory that nobody holds"))
            yield report
            break
    yield from dead_staging(walk)
    yield from deleted_input(walk)


def dead_staging(walk: Walk) -> Iterator[Report]:
    """The graph holds a copy from pinned memory that only a local of the capturing function named."""
    for capture in captured(walk):
        replay = next((event for event in walk.replays(capture) if event.alive is not None), None)
        if replay is None or replay.alive is None or not walk.whole:
            continue
        for event in walk.inside(capture):
            for one in _staged(event):
                made = one.storage.pool is None and _made_for_sure(one.storage, walk)
                if made and not one.storage.owner and one.storage not in replay.alive:
                    report = at(event, "dead-input", capture, value="the pinned tensor")
                    report.related.append(
                        (replay.frame, replay.at, "the replay here copies from memory that nobody holds")
                    )
                    yield report
                    return


def _staged(event: ev.Event) -> list[Tensor]:
    """The pinned memory that this piece of work copies to the device."""
    source = event.source if isinstance(event, ev.InplaceEvent) and event.name == "copy_" else None
    if isinstance(event, ev.CallEvent) and event.name in ("torch.Tensor.to", "torch.Tensor.cuda"):
        source = event.receiver
    return [one for one in tensors_in(source) if one.device == "pinned"] if source is not None else []


def _result_wanted(capture: ev.Capture, replay: ev.ReplayEvent, walk: Walk) -> bool:
    """Whether anything is done with a result of the graph behind the replay."""
    for event in walk.events:
        if (
            event.clock > replay.clock
            and event.capture is None
            and isinstance(event, (ev.CallEvent, ev.OpEvent, ev.ReturnEvent))
        ):
            values = [event.value] if isinstance(event, ev.ReturnEvent) else operands(event)
            if any(one.storage.pool is capture for value in values for one in tensors_in(value)):
                return True
    return False


def _made_for_sure(storage: Storage, walk: Walk) -> bool:
    """Whether the tensor was made by a call that always makes one, and not by a `.to()` that may have given its
    receiver back."""
    made = next(
        (
            event
            for event in walk.of(ev.CallEvent)
            if isinstance(event.result, Tensor) and event.result.storage is storage
        ),
        None,
    )
    if made is None or made.name.rpartition(".")[2] not in (
        "to",
        "cuda",
        "contiguous",
        "float",
        "half",
        "bfloat16",
        "type",
    ):
        return made is not None
    if not isinstance(made.receiver, Tensor):
        return False
    return made.receiver.on_host or (
        made.receiver.storage.born > made.frame.scope.born and _made_for_sure(made.receiver.storage, walk)
    )


def deleted_input(walk: Walk) -> Iterator[Report]:
    """The only name of a static input is deleted after the capture."""
    for capture in captured(walk):
        inputs = inputs_of(capture, walk)
        for event in walk.of(ev.WriteEvent):
            if event.how != "del" or event.capture is not None or event.clock < capture.end or event.cell not in inputs:
                continue
            tensor = inputs[event.cell][1]
            others = [cell for cell, (_, one) in inputs.items() if one.storage is tensor.storage and cell != event.cell]
            kept = any(
                isinstance(one.new, Tensor) and one.new.storage is tensor.storage and one.cell != event.cell
                for one in walk.of(ev.WriteEvent)
            )
            if not others and not kept and replayed_after(capture, event.clock, walk) and tensor.storage.owner == "":
                yield at(event, "dead-input", capture, value=cell_name(event.cell).lstrip("."))
