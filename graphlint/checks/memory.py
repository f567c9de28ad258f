"""Addresses: what a graph reads and writes stays where it was at capture, and what happens to it afterwards in Python."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, cell_name, place, where
from graphlint.checks.steps import stepped
from graphlint.flow import events as ev
from graphlint.flow import modules
from graphlint.flow.values import Cell, External, Host, Instance, Items, Mapping, Scope, Storage, Tensor, Value, Wrapped, alternatives, tensors_in

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


def _replayed_after(capture: ev.Capture, clock: int, walk: Walk) -> ev.ReplayEvent | None:
    return next((event for event in walk.replays(capture) if event.clock > clock), None)


def _stale(capture: ev.Capture, event: ev.Event, walk: Walk) -> bool:
    """Whether the graph runs after the event without being captured anew; in a class seen by itself, whether it may."""
    if _replayed_after(capture, event.clock, walk) is not None:
        return True
    if walk.whole:
        return False
    again = [one for one in walk.captures if one is not capture and one.at == capture.at and one.begin > event.clock]
    return not again and bool(walk.replays(capture)) and walk.kept(capture)


# --- inputs ----------------------------------------------------------------------------------------------------------


def rebound_input(walk: Walk) -> Iterator[Report]:
    """A name or attribute that a capture read a tensor from is bound to another tensor."""
    for capture in captured(walk):
        written = {event.cell for event in walk.of(ev.WriteEvent) if event.capture is capture}
        for cell, (read, tensor) in inputs_of(capture, walk).items():
            if cell in written:
                continue
            for event in walk.of(ev.WriteEvent):
                if event.cell != cell or event.capture is not None or event.clock < capture.end or event.how in ("loop", "zero_grad", "grad", "mode"):
                    continue
                if not event.sure and _in_sequence(event, _replayed_after(capture, event.clock, walk)):
                    continue  # made anew only where it does not fit: whether it fits was not seen
                if not _other_tensor(event, tensor) or not _stale(capture, event, walk) or _refilled(tensor.storage, event, capture, walk):
                    continue
                if isinstance(cell.holder, Scope) and not _local_input(cell, event, walk):
                    continue
                if _restored(cell, tensor, event, capture, walk):
                    continue
                yield _replaced(cell, tensor, read, event, capture)
                break


def _in_sequence(event: ev.Event, replay: ev.ReplayEvent | None) -> bool:
    """Whether both happened in one run of the program, and not in two methods of a class that were tried one after the other."""
    return replay is not None and _root(event.frame) is _root(replay.frame)


def _root(frame: ev.Frame) -> ev.Frame:
    while frame.parent is not None and frame.parent.call_at is not None:
        frame = frame.parent
    return frame


def _other_tensor(event: ev.WriteEvent, tensor: Tensor) -> bool:
    found = [one for one in alternatives(event.new) if isinstance(one, Tensor)]
    return bool(found) and all(one.storage is not tensor.storage for one in found) and len(found) == len(alternatives(event.new))


def _refilled(storage: Storage, change: ev.Event, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the memory that the graph reads is written between the change and the next replay."""
    replay = _replayed_after(capture, change.clock, walk)
    until = replay.clock if replay is not None else 1 << 60
    return any(event.storage is storage and change.clock < event.clock < until for event in walk.of(ev.InplaceEvent))


def _restored(cell: Cell, tensor: Tensor, change: ev.Event, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the old tensor is back in its place before the replay."""
    replay = _replayed_after(capture, change.clock, walk)
    if replay is None:
        return False
    last = [event for event in walk.of(ev.WriteEvent) if event.cell == cell and change.clock < event.clock < replay.clock]
    return bool(last) and any(isinstance(one, Tensor) and one.storage is tensor.storage for one in alternatives(last[-1].new))


def _local_input(cell: Cell, event: ev.WriteEvent, walk: Walk) -> bool:
    """A local that is rebound is an input by its name alone; the new tensor must not be used for anything else before the replay."""
    new = next((one for one in alternatives(event.new) if isinstance(one, Tensor)), None)
    if new is None:
        return False
    for later in walk.events:
        if later.clock <= event.clock:
            continue
        if isinstance(later, ev.ReplayEvent):
            return True
        if isinstance(later, (ev.CallEvent, ev.OpEvent)):
            values = [*later.args, *later.keywords.values(), later.receiver] if isinstance(later, ev.CallEvent) else list(later.operands)
            if any(one.storage is new.storage for value in values if value is not None for one in tensors_in(value)):
                return False
    return False


def _replaced(cell: Cell, tensor: Tensor, read: ev.ReadEvent, event: ev.WriteEvent, capture: ev.Capture) -> Report:
    owner = tensor.storage.owner
    if owner == "param":
        rule = "replaced-parameter"
    elif owner == "buffer" or isinstance(cell.holder, Mapping) or _is_cache(cell):
        rule = "replaced-buffer"
    else:
        rule = "rebound-input"
    report = at(event, rule, capture, value=cell_name(cell).lstrip("."), why="replaces the tensor")
    report.related.append((read.frame, read.at, "the graph reads the tensor that stood here at capture"))
    return report


def _is_cache(cell: Cell) -> bool:
    return isinstance(cell.key, str) and any(word in cell.key.lower() for word in ("cache", "table", "buffer", "kv", "state", "mask", "freq"))


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
            if not nested or not tensors_in(nested[0]) or isinstance(event.result, Host) and event.result.value is True:
                continue
            fills_here = [one for one in walk.of(ev.InplaceEvent) if one.frame is event.frame and one.name == "copy_"]
            descends = [one for one in walk.of(ev.CallEvent) if one.frame is not event.frame and one.clock > event.clock and one.frame.parent is event.frame]
            if not fills_here and not _fills_around(event, walk) or descends:
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
            if not others and not kept and _replayed_after(capture, event.clock, walk) and tensor.storage.owner == "":
                yield at(event, "dead-input", capture, value=cell_name(event.cell).lstrip("."))


# --- weights, gradients, state ---------------------------------------------------------------------------------------


def replaced_parameter(walk: Walk) -> Iterator[Report]:
    """Parameters or buffers of a captured module get new memory."""
    for capture in captured(walk):
        touched = memory_read(capture, walk)
        called = {id(event.receiver) for event in walk.inside(capture) if isinstance(event, ev.CallEvent) and event.receiver is not None}
        for event in walk.of(ev.MoveEvent):
            if event.capture is not None or event.clock < capture.end or not _stale(capture, event, walk):
                continue
            parts = {id(part) for part in modules.parts(event.owner)}
            if set(event.storages) & touched or parts & called:
                why = {".data": "puts other memory behind the tensor", "load_state_dict(assign=True)": "puts the loaded tensors in the place of the old ones"}
                yield at(event, "replaced-parameter", capture, why=why.get(event.how, "gives the parameters new memory"))


def replaced_gradient(walk: Walk) -> Iterator[Report]:
    """Gradients that a captured backward writes are dropped in Python, and an eager step looks for them."""
    for capture in captured(walk):
        if capture.kind == "graphed-callable":
            continue
        inside = walk.inside(capture)
        if not any(isinstance(event, ev.CallEvent) and event.name.endswith(".backward") for event in inside):
            continue
        if any(isinstance(event, ev.CallEvent) and (stepped(event) or event.name.endswith(".zero_grad")) for event in inside):
            continue
        for event in walk.of(ev.WriteEvent):
            if event.capture is None and event.clock > capture.end and event.cell.holder is walk.machine.gradients and isinstance(event.new, Host) and event.new.kind == "none":
                replay = _replayed_after(capture, event.clock, walk)
                step = next((one for one in walk.of(ev.CallEvent) if replay is not None and one.clock > replay.clock and stepped(one) and one.capture is None), None)
                again = replay is not None and any(one.clock > event.clock and one.clock < (step.clock if step else 0) and one.name.endswith(".backward") for one in walk.of(ev.CallEvent))
                if step is not None and not again:
                    report = at(event, "replaced-gradient", capture, why="drops the gradients")
                    report.related.append((step.frame, step.at, "the eager step finds no gradients here"))
                    yield report
                    break


def replaced_optimizer_state(walk: Walk) -> Iterator[Report]:
    """`load_state_dict` of an optimizer whose step is captured."""
    for capture in captured(walk):
        inside = [stepped(event) for event in walk.inside(capture) if isinstance(event, ev.CallEvent)]
        optimizers = [one for one in inside if one is not None]
        for event in walk.of(ev.CallEvent):
            if event.capture is None and event.clock > capture.end and event.name.endswith(".load_state_dict") and event.receiver in optimizers and _stale(capture, event, walk):
                yield at(event, "replaced-optimizer-state", capture, why="puts new state tensors in the place of the old ones")


def evicted_cache(walk: Walk) -> Iterator[Report]:
    """A cache drops a tensor that a graph reads."""
    for capture in captured(walk):
        touched = memory_read(capture, walk)
        yield from _bounded(capture, touched, walk)
        holders = {cell.holder: cell for cell, _ in inputs_of(capture, walk).items() if isinstance(cell.holder, (Mapping, Items))}
        for event in walk.of(ev.MutateEvent):
            if event.name in ("pop", "popitem", "clear", "del", "popleft") and event.capture is None and event.clock > capture.end and event.holder in holders:
                if isinstance(event.holder, Mapping) and _stale(capture, event, walk):
                    report = at(event, "evicted-cache", capture, value=str(holders[event.holder].key))
                    yield report
                    break


def _bounded(capture: ev.Capture, touched: set[Storage], walk: Walk) -> Iterator[Report]:
    for storage in touched:
        if storage.owner != "lru":
            continue
        made = next((event for event in walk.of(ev.CallEvent) if isinstance(event.result, Tensor) and event.result.storage is storage), None)
        kept = any(isinstance(event.new, Tensor) and event.new.storage is storage and not isinstance(event.cell.holder, Scope) for event in walk.of(ev.WriteEvent))
        if made is None or kept or not (walk.replays(capture) or not walk.whole):
            continue
        others = {event.result.storage for event in walk.of(ev.CallEvent) if isinstance(event.result, Tensor) and event.result.storage.owner == "lru" and event.at == made.at}
        cleared = any(event.name == "functools.cache_clear" and event.clock > capture.end for event in walk.of(ev.CallEvent))
        if len(others) > 1 or cleared:
            report = Report("evicted-cache", made.frame, made.at, capture, {"where": where(capture)})
            yield report


def graphed_accumulation(walk: Walk) -> Iterator[Report]:
    """Backward runs twice over a graphed callable while `.grad` is the graph's own buffer."""
    for capture in (one for one in walk.captures if one.kind == "graphed-callable" and "transformer_engine" not in one.api):
        own, runs = False, 0
        called = False
        for event in walk.events:
            if event.clock < capture.end or event.capture is not None:
                continue
            if isinstance(event, ev.WriteEvent) and event.cell.holder is walk.machine.gradients:
                own = any(isinstance(one, Tensor) for one in alternatives(event.new))
                runs = 0
            elif isinstance(event, ev.InplaceEvent) and event.storage.owner == "grad" and event.name == "zero_" and not own:
                runs = 0
            elif isinstance(event, ev.CallEvent) and event.name == "<graphed>.__call__" and isinstance(event.receiver, Wrapped) and event.receiver.facts.get("capture") is capture:
                called = True
            elif isinstance(event, ev.CallEvent) and event.name.endswith(".backward") and called:
                called = False
                runs += 1
                if runs == 2 and not own:
                    yield at(event, "graphed-grad-accumulation", capture)
                    break
            elif isinstance(event, ev.CallEvent) and event.name.endswith("zero_grad"):
                runs = 0


# --- outputs ---------------------------------------------------------------------------------------------------------


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


__all__ = ["Instance", "External", "captured", "inputs_of", "memory_read"]
