"""Host values that a capture freezes, and that change afterwards: both places are named, or nothing is said."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint import ir
from graphlint.checks.base import Report, Walk, at, cell_name, inplace_after, is_none, place, unknown
from graphlint.checks.keys import kept_under_key, left_out
from graphlint.flow import events as ev
from graphlint.flow import modules
from graphlint.flow.values import (
    Cell,
    Choice,
    External,
    Host,
    Instance,
    Items,
    Mapping,
    Scope,
    Storage,
    Tensor,
    Value,
    alternatives,
    hosts_in,
)

MODES = "training"
LENGTHS = ("max_seqlen", "max_seq_len", "max_q", "max_k", "max_s")
# calls that look at host values without putting them into a kernel
_HARMLESS = ("builtins.", "logging.", "torch.cuda.nvtx", "torch.profiler", "torch._assert", "warnings.", "?")


def frozen_value(walk: Walk) -> Iterator[Report]:
    """A number or flag read in a capture is written later, and the graph is replayed without being captured anew."""
    changes = _changes(walk)
    if not changes:
        return
    seen: set[tuple[int, int, int]] = set()
    for event in walk.events:
        capture = event.capture
        if capture is None or capture.kind in ("compile", "warp") or "guarded" in capture.tags:
            continue
        for host, rule in uses(event):
            for cell in host.origins:
                change = _later(cell, host, capture, changes, walk)
                key = (id(event.frame.module), event.at[0], event.at[1])
                if change is None or key in seen:
                    continue
                seen.add(key)
                yield _frozen(event, rule, cell, change)


def _frozen(event: ev.Event, rule: str, cell: Cell, change: ev.WriteEvent) -> Report:
    if cell.key == MODES and modules.is_module(cell.holder):
        rule = "frozen-flag" if isinstance(event, ev.TestEvent) else "frozen-mode"
    report = at(event, rule, where=place(change.frame, change.at), value=cell_name(cell).lstrip("."))
    report.related.append((change.frame, change.at, "the value changes here; the graph keeps the old one"))
    return report


def frozen_argument(walk: Walk) -> Iterator[Report]:
    """A number is handed to the function that captures on its first call; later calls hand in another, and replay."""
    seen: set[tuple[str, ir.Span]] = set()
    for capture in walk.captures:
        if capture.kind not in ("graph", "manual") or not walk.whole or kept_under_key(capture, walk) is not None:
            continue
        for then, _, _ in capture.stack:
            found = left_out(then, capture, walk) if then.func is not None else None
            if found is None:
                continue
            name, read, other = found
            for event in walk.inside(capture):
                rule = next((rule for host, rule in uses(event) if read.cell in host.origins), None)
                if rule is not None and (event.frame.module.path, event.at) not in seen:
                    seen.add((event.frame.module.path, event.at))
                    report = at(event, rule, value=name, where=place(other, other.call_at or capture.at))
                    report.related.append((other, other.call_at or capture.at, "a later call hands in another value"))
                    yield report
                    break
            break


def _changes(walk: Walk) -> dict[Cell, list[ev.WriteEvent]]:
    """Writes outside captures, after the first capture."""
    if not walk.captures:
        return {}
    first = min(capture.end or capture.begin for capture in walk.captures)
    found: dict[Cell, list[ev.WriteEvent]] = {}
    for event in walk.of(ev.WriteEvent):
        counts = event.how == "loop" and isinstance(event.cell.holder, Scope)
        if event.capture is None and event.clock > first and event.how not in ("register", "del") and not counts:
            found.setdefault(event.cell, []).append(event)
    return found


def uses(event: ev.Event) -> Iterator[tuple[Host, str]]:
    """The host values that this event puts into the graph, and the rule that speaks of such a use."""
    if isinstance(event, ev.TestEvent):
        for one in alternatives(event.value):
            if isinstance(one, Host) and event.differs:
                yield one, "frozen-flag"
    elif isinstance(event, ev.OpEvent):
        for operand in event.operands:
            for one in alternatives(operand):
                if isinstance(one, Host):
                    yield one, "frozen-scalar"
    elif isinstance(event, ev.IndexEvent):
        if any(isinstance(one, Tensor) for one in alternatives(event.obj)):
            yield from ((one, "frozen-scalar") for one in _in_index(event.index))
        elif event.stored is None and any(_chooses(one) for one in alternatives(event.obj)):
            yield from ((one, "frozen-flag") for one in alternatives(event.index) if isinstance(one, Host))
    elif (
        isinstance(event, ev.CallEvent)
        and event.name.startswith(("torch.", "flash_attn", "xformers", "transformer_engine"))
        and ".optim." not in event.name
    ):
        lengths = {5: "max_seqlen_q", 6: "max_seqlen_k"} if "varlen" in event.name else {}
        for name, value in (
            *((lengths.get(index, ""), one) for index, one in enumerate(event.args)),
            *event.keywords.items(),
        ):
            rule = "frozen-max-seqlen" if name.startswith(LENGTHS) else "frozen-scalar"
            yield from ((one, rule) for one in hosts_in(value) if one.kind not in ("device", "dtype", "str", "none"))
    elif isinstance(event, ev.LoopEvent) and isinstance(event.value, External) and event.value.name == "range":
        yield from ((one, "frozen-scalar") for one in event.value.args if isinstance(one, Host))


def _chooses(container: Value) -> bool:
    """Whether it holds modules: which of them is called is decided in Python."""
    return isinstance(container, (Items, Mapping, External, Instance)) and any(
        modules.is_module(one) for one in container.slots.values()
    )


def _in_index(index: Value) -> list[Host]:
    found: list[Host] = []
    for part in index.values if isinstance(index, Items) else [index]:
        if isinstance(part, External) and part.name == "slice":
            found.extend(one for arg in part.args for one in hosts_in(arg))
        elif isinstance(part, Host):
            found.append(part)
    return found


def _later(
    cell: Cell, host: Host, capture: ev.Capture, changes: dict[Cell, list[ev.WriteEvent]], walk: Walk
) -> ev.WriteEvent | None:
    """The first write after the capture that gives the cell another value, with a replay behind it."""
    if _written_inside(cell, capture, walk):
        return None  # the region sets the value itself
    for change in changes.get(cell, ()):
        if (
            change.clock < capture.end
            or not _differs(change, "none" in host.marks)
            or _set_again(change, capture, walk)
            or _undone(change, host, capture, walk)
        ):
            continue
        if (
            isinstance(cell.holder, Scope)
            and cell.holder.outer is not None
            and change.frame.scope is not cell.holder
            and change.how == "assign"
        ):
            continue
        if _stale_after(change, capture, walk):
            return change
    return None


def _written_inside(cell: Cell, capture: ev.Capture, walk: Walk) -> bool:
    return any(event.capture is capture and event.cell == cell for event in walk.of(ev.WriteEvent))


def _differs(change: ev.WriteEvent, asked_for_none: bool = False) -> bool:
    old, new = change.old, change.new
    if asked_for_none and (is_none(old) or is_none(new)):
        return is_none(old) != is_none(new) and not any(
            is_none(one) for value in (old, new) if isinstance(value, Choice) for one in value.values
        )
    if asked_for_none and not (isinstance(old, Host) and isinstance(new, Host) and old.kind == new.kind == "bool"):
        return False
    from_caller = unknown(new) and isinstance(old, Host)  # `self.scale = scale` in a method: whatever the caller says
    if old is new or (not from_caller and not any(isinstance(one, Host) for one in alternatives(new))):
        return False
    if isinstance(old, Host) and isinstance(new, Host) and old.known and new.known:
        return bool(old.value != new.value or type(old.value) is not type(new.value))
    return True


def _set_again(change: ev.WriteEvent, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the statement that set the value before the capture merely runs again, with a value that is not known.

    That is a `plan()` called anew, as often with the same arguments as not.
    """
    before = next(
        (
            event
            for event in reversed(walk.of(ev.WriteEvent))
            if event.cell == change.cell and event.clock < capture.end
        ),
        None,
    )
    return (
        before is not None
        and before.at == change.at
        and before.frame.func is change.frame.func
        and not (isinstance(change.new, Host) and change.new.known)
    )


def _undone(change: ev.WriteEvent, host: Host, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the value of the capture is back before the next replay."""
    replay = next((event for event in walk.replays(capture) if event.clock > change.clock), None)
    later = [
        event
        for event in walk.of(ev.WriteEvent)
        if event.cell == change.cell and change.clock < event.clock and (replay is None or event.clock < replay.clock)
    ]
    return (
        replay is not None
        and bool(later)
        and isinstance(later[-1].new, Host)
        and later[-1].new.known
        and later[-1].new.value == host.value
    )


def _stale_after(change: ev.WriteEvent, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the graph of this capture still runs after the change."""
    anew = min(
        (one.begin for one in walk.captures if one.at == capture.at and one.begin > change.clock), default=1 << 60
    )
    if any(change.clock < event.clock < anew for event in walk.replays(capture)):
        return True  # and not on purpose, beside another graph that was captured for the new value
    if walk.whole:
        return False
    # a class seen by itself: its methods are called in any order, unless the change comes with a new capture or drops
    # the graph
    again = [
        one
        for one in walk.captures
        if one is not capture
        and one.at == capture.at
        and one.frame.module is capture.frame.module
        and one.begin > change.clock
    ]
    dropped = any(
        isinstance(event, ev.WriteEvent)
        and event.frame is change.frame
        and event.old is capture.graph
        and capture.graph is not None
        for event in walk.of(ev.WriteEvent)
    )
    return (
        not again
        and not dropped
        and bool(walk.replays(capture))
        and walk.kept(capture)
        and change.frame.name.rpartition(".")[2] not in ("__init__", "reset", "setup", "initialize")
    )


def cpu_scalar(walk: Walk) -> Iterator[Report]:
    """A 0-dim CPU tensor used with device tensors in a capture, and written later."""
    seen: set[int] = set()
    for event in walk.events:
        capture = event.capture
        if (
            capture is None
            or capture.kind == "compile"
            or "guarded" in capture.tags
            or not isinstance(event, (ev.OpEvent, ev.CallEvent))
        ):
            continue
        values = (
            event.operands
            if isinstance(event, ev.OpEvent)
            else ((*event.args, *event.keywords.values()) if event.name.startswith("torch.") else ())
        )
        mixed = any(isinstance(one, Tensor) and not one.on_host for value in values for one in alternatives(value)) or (
            isinstance(event, ev.CallEvent) and isinstance(event.receiver, Tensor)
        )
        for value in values:
            for one in alternatives(value):
                if (
                    not (isinstance(one, Tensor) and one.on_host and one.rank == 0 and mixed)
                    or id(one.storage) in seen
                    or one.storage.born > capture.begin
                ):
                    continue
                change = inplace_after(one.storage, capture, walk) or _rebound_after(one.storage, capture, walk)
                if change is not None:
                    seen.add(id(one.storage))
                    report = at(event, "cpu-scalar-tensor", where=place(change.frame, change.at))
                    report.words["value"] = _name_of(one.storage)
                    report.related.append((change.frame, change.at, "the value changes here"))
                    yield report


def _name_of(storage: Storage) -> str:
    return cell_name(storage.cell).lstrip(".") if storage.cell is not None else ""


def _rebound_after(storage: Storage, capture: ev.Capture, walk: Walk) -> ev.Event | None:
    last = max((event.clock for event in walk.replays(capture)), default=0)
    for event in walk.of(ev.WriteEvent):
        if (
            event.capture is None
            and capture.end < event.clock < last
            and isinstance(event.old, Tensor)
            and event.old.storage is storage
        ):
            if not (isinstance(event.new, Tensor) and event.new.storage is storage) and not isinstance(
                event.cell.holder, Scope
            ):
                return event
    return None


def frozen_clock(walk: Walk) -> Iterator[Report]:
    """The clock or the environment, read in a capture and used in a kernel."""
    for event in walk.events:
        if (
            event.capture is None
            or event.capture.kind == "compile"
            or not isinstance(event, (ev.OpEvent, ev.CallEvent))
        ):
            continue
        if isinstance(event, ev.CallEvent) and not event.name.startswith("torch."):
            continue
        values = event.operands if isinstance(event, ev.OpEvent) else (*event.args, *event.keywords.values())
        if any("clock" in one.marks for value in values for one in hosts_in(value)):
            read = next(
                (
                    one
                    for one in walk.of(ev.CallEvent)
                    if one.capture is event.capture
                    and one.clock < event.clock
                    and isinstance(one.result, Host)
                    and "clock" in one.result.marks
                    and one.name.startswith(("time.", "datetime."))
                ),
                None,
            )
            if read is not None:
                yield at(read, "frozen-clock", why="reads the clock once")
                return
