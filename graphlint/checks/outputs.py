"""What a graph leaves behind: results that the next replay overwrites, and results read too early."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, operands, place, within
from graphlint.checks.memory import captured
from graphlint.flow import events as ev
from graphlint.flow.values import (
    Holder,
    Host,
    Items,
    Mapping,
    Tensor,
    Value,
    alternatives,
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
        stored = list(_kept_twice(capture, replays, walk))
        yield from stored
        for event in walk.of(ev.MutateEvent) if not stored else ():
            if (
                event.capture is not None
                or event.clock < replays[0].clock
                or event.name not in ("append", "add", "appendleft", "extend", "insert", "collect")
            ):
                continue
            kept = [one for value in event.values for one in _outputs(value, capture)]
            again = (
                len(event.values) > 1
                if event.name == "collect"
                else any(one.clock > event.clock for one in replays)
                and ((walk.whole and event.frame is not capture.frame) or _piles_up(event, capture, replays, walk))
            )
            if kept and again and not _consumed(event, kept, replays, walk) and _wanted_later(event, replays, walk):
                yield at(event, "kept-output", capture, why="is kept here over the next replay")
                break


def _piles_up(event: ev.MutateEvent, capture: ev.Capture, replays: list[ev.ReplayEvent], walk: Walk) -> bool:
    """Whether the container gets another result of the graph after a later replay.

    What the capturing function stores once, or a class seen by itself, is the place to look at after each replay.
    """
    later = [
        one.clock
        for one in walk.of(ev.MutateEvent)
        if one is not event and one.holder is event.holder and any(_outputs(value, capture) for value in one.values)
    ]
    return any(event.clock < replay.clock < clock for replay in replays for clock in later)


def _consumed(event: ev.MutateEvent, kept: list[Tensor], replays: list[ev.ReplayEvent], walk: Walk) -> bool:
    """Whether the container is emptied again before the next replay."""
    following = next((one.clock for one in replays if one.clock > event.clock), 1 << 60)
    return any(
        one.holder is event.holder and one.name in ("clear", "pop", "popleft") and event.clock < one.clock < following
        for one in walk.of(ev.MutateEvent)
    )


def _wanted_later(event: ev.MutateEvent, replays: list[ev.ReplayEvent], walk: Walk) -> bool:
    """Whether something looks at the container behind the next replay; a class seen by itself does not tell."""
    following = next((one.clock for one in replays if one.clock > event.clock), None)
    if following is None or not walk.whole or event.name == "collect":
        return True
    for later in walk.after(following):
        if isinstance(later, (ev.MutateEvent, ev.LoopEvent, ev.IndexEvent, ev.ReturnEvent)):
            seen: list[Value] = [
                later.holder
                if isinstance(later, ev.MutateEvent)
                else (later.obj if isinstance(later, ev.IndexEvent) else later.value)
            ]
        else:
            seen = operands(later)
        if any(_holds(value, event.holder) for value in seen):
            return True
    return False


def _holds(value: Value, holder: Holder, depth: int = 2) -> bool:
    return any(
        one is holder
        or (
            depth > 0
            and isinstance(one, (Items, Mapping))
            and any(_holds(inner, holder, depth - 1) for inner in list(one.slots.values()))
        )
        for one in alternatives(value)
    )


def _kept_twice(capture: ev.Capture, replays: list[ev.ReplayEvent], walk: Walk) -> Iterator[Report]:
    """A result that is put into a dict as it is, and replayed over."""
    for event in walk.of(ev.WriteEvent):
        if (
            event.clock < replays[0].clock
            or event.capture is not None
            or not isinstance(event.new, Tensor)
            or not isinstance(event.cell.holder, Mapping)
        ):
            continue
        if (
            _outputs(event.new, capture)
            and event.cell.holder is not walk.machine.gradients
            and any(one.clock > event.clock for one in replays)
        ):
            yield at(event, "kept-output", capture, why="is kept here over the next replay")
            return


def reread_output(walk: Walk) -> Iterator[Report]:
    """A result is kept under a name over the next replay, and used after it as if it were the old one."""
    for capture in captured(walk):
        replays = [one for one in walk.replays(capture) if not _one_of_several(one, walk)]
        if len(replays) < 2:
            continue
        for write in _kept_names(capture, replays[0], walk):
            read = _stale_read(write, replays, walk)
            if read is not None:
                yield _kept_over(write, read, capture)
                break


def reread_container(walk: Walk) -> Iterator[Report]:
    """A dict or tuple that was made around a result is looked into behind a later replay."""
    for capture in captured(walk):
        replays = [one for one in walk.replays(capture) if not _one_of_several(one, walk)]
        if len(replays) < 2 or not walk.whole:
            continue
        for write in walk.of(ev.WriteEvent):
            made = write.new
            if (
                write.capture is None
                and isinstance(made, (Mapping, Items))
                and made.born > replays[0].clock
                and _outputs(made, capture)
                and not isinstance(write.cell.holder, (Mapping, Items))
            ):
                used = _looked_into(made, write, replays, capture, walk)
                if used is not None:
                    yield _kept_over(write, used, capture)
                    break


def _looked_into(
    made: Mapping | Items, write: ev.WriteEvent, replays: list[ev.ReplayEvent], capture: ev.Capture, walk: Walk
) -> ev.Event | None:
    for event in walk.of(ev.IndexEvent):
        if event.clock > write.clock and event.stored is None and event.sure and event.obj is made:
            key = event.index.value if isinstance(event.index, Host) and event.index.known else None
            value = made.slots.get(key) if isinstance(key, (str, int)) else None
            if value is not None and _outputs(value, capture) and _replay_between(write, event, replays):
                return event
    return None


def _one_of_several(replay: ev.ReplayEvent, walk: Walk) -> bool:
    """Whether it is a replay of one of several graphs, and which was not seen."""
    beside = (
        one
        for one in walk.of(ev.ReplayEvent)
        if one.at == replay.at and one.frame is replay.frame and abs(one.clock - replay.clock) < 4
    )
    return any(one.graph is not replay.graph for one in beside)


def _kept_names(capture: ev.Capture, first: ev.ReplayEvent, walk: Walk) -> Iterator[ev.WriteEvent]:
    """Names and attributes that get the graph's result again and again, behind replays."""
    writes = [
        event
        for event in walk.of(ev.WriteEvent)
        if event.clock > first.clock
        and event.capture is None
        and isinstance(event.new, Tensor)
        and _outputs(event.new, capture)
    ]
    for write in writes:
        if (
            isinstance(write.cell.holder, (Mapping, Items))
            or write.how == "loop"
            or _named_before(write, walk.replays(capture))
        ):
            continue
        beside = [
            one
            for one in writes
            if one is not write
            and isinstance(one.new, Tensor)
            and isinstance(write.new, Tensor)
            and one.new.storage is write.new.storage
        ]
        again = any(one.cell == write.cell for one in beside)
        apart = any(
            one.frame is write.frame
            and one.cell != write.cell
            and one.clock > write.clock
            and _replay_between(write, one, walk.replays(capture))
            for one in beside
        )
        if again or apart or write.looped:
            yield write


def _named_before(write: ev.WriteEvent, replays: list[ev.ReplayEvent]) -> bool:
    """Whether the name is given to the place of the result, and the replay that fills it comes behind: `graph, out =
    graphs[n]; graph.replay()`."""
    last = next((one for one in reversed(replays) if one.clock < write.clock), None)
    following = next((one for one in replays if one.clock > write.clock), None)
    here = _line_in(following, write.frame) if following is not None else None
    before = _line_in(last, write.frame) if last is not None else None
    return here is not None and write.at[:2] < here[:2] and (before is None or before == here)


def _line_in(replay: ev.ReplayEvent, wanted: ev.Frame) -> tuple[int, int, int, int] | None:
    """Where a function replays, itself or through what it calls."""
    frame, span = replay.frame, replay.at
    while frame is not wanted:
        if frame.parent is None or frame.call_at is None:
            return None
        span, frame = frame.call_at, frame.parent
    return span


def _replay_between(first: ev.Event, second: ev.Event, replays: list[ev.ReplayEvent]) -> bool:
    return any(first.clock < one.clock < second.clock for one in replays)


def _stale_read(write: ev.WriteEvent, replays: list[ev.ReplayEvent], walk: Walk) -> ev.Event | None:
    """Where the kept result is used behind a later replay, with nothing put into its place before."""
    later = [
        event.clock
        for event in walk.of(ev.WriteEvent)
        if event.cell == write.cell
        and event.clock > write.clock
        and (event.sure or not _last_sure(replays, event.clock))
    ]
    until = min(later, default=1 << 60)
    for read in walk.of(ev.ReadEvent):
        if read.cell == write.cell and write.clock < read.clock < until and _replay_between(write, read, replays):
            kept = next(
                (
                    one
                    for one in alternatives(read.value)
                    if isinstance(one, Tensor) and one.storage is getattr(write.new, "storage", None)
                ),
                None,
            )
            used = _used_at(read, kept, walk) if kept is not None else None
            if used is not None:
                return used
    return None


def _last_sure(replays: list[ev.ReplayEvent], clock: int) -> bool:
    """Whether the last replay before happens in any case: a write that may not happen leaves the old result behind
    it."""
    before = [one for one in replays if one.clock < clock]
    return bool(before) and before[-1].sure


def _used_at(read: ev.ReadEvent, tensor: Tensor, walk: Walk) -> ev.Event | None:
    """What takes the tensor that is read here: a call, an operator, a return; asking whether it is None takes
    nothing."""
    for event in walk.after(read.clock):
        if event.frame is read.frame and within(read.at, event.at):
            values = [event.value] if isinstance(event, ev.ReturnEvent) else operands(event)
            if any(one.storage is tensor.storage for value in values for one in tensors_in(value)):
                return event
        if event.clock > read.clock + 40:
            break
    return None


def _kept_over(write: ev.WriteEvent, used: ev.Event, capture: ev.Capture) -> Report:
    report = at(
        write,
        "kept-output",
        capture,
        why=f"is kept here and used behind a later replay at {place(used.frame, used.at)}",
    )
    report.related.append((used.frame, used.at, "by now the memory holds the result of a later replay"))
    return report


_READERS = ("clone", "item", "tolist", "cpu", "numpy")  # nobody calls these for anything but the value


def early_output_read(walk: Walk) -> Iterator[Report]:
    """A static output is read after the capture and before any replay."""
    for capture in captured(walk):
        if capture.kind == "graphed-callable" or capture.graph is None:
            continue
        first = next((event.clock for event in walk.replays(capture)), None)
        unseen = any(event.graph is None for event in walk.of(ev.ReplayEvent))
        for event in walk.events:
            if (
                event.clock <= capture.end
                or event.capture is not None
                or not isinstance(event, (ev.CallEvent, ev.OpEvent))
            ):
                continue
            if first is not None and event.clock > first:
                break
            values = (
                list(event.operands)
                if isinstance(event, ev.OpEvent)
                else [*event.args, *([event.receiver] if event.receiver is not None else [])]
            )
            if isinstance(event, ev.CallEvent) and (
                event.name.startswith(("builtins.", "?", "weakref"))
                or event.name.rpartition(".")[2]
                in ("data_ptr", "size", "numel", "dim", "detach", "view", "zero_", "fill_", "untyped_storage")
            ):
                continue
            computed = first is not None or (
                isinstance(event, ev.CallEvent) and event.name.rpartition(".")[2] in _READERS and not unseen
            )
            if (
                computed
                and (walk.whole or event.frame is capture.frame)
                and any(_outputs(value, capture) for value in values)
            ):
                yield at(event, "early-output-read", capture)
                break
