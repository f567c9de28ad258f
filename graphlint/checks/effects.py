"""What Python does in a region happens once: counters, lists, flags, hooks, state that is made there."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, cell_name, place
from graphlint.checks.memory import captured
from graphlint.flow import events as ev
from graphlint.flow.values import Cell, External, Holder, Host, Mapping, Scope, Tensor, Value, alternatives

_GROWING = frozenset({"append", "add", "extend", "appendleft"})
_SHRINKING = frozenset({"pop", "popleft", "clear"})


def unrepeated_effect(walk: Walk) -> Iterator[Report]:
    """A region changes Python state that code outside relies on after replays."""
    for capture in captured(walk):
        replays = walk.replays(capture)
        if not replays or capture.kind == "graphed-callable":
            continue
        first = replays[0].clock
        seen: set[Cell] = set()
        for event in walk.inside(capture):
            if isinstance(event, ev.WriteEvent) and event.cell not in seen and _old(event.cell.holder, capture) and not _put_back(event.cell, capture, walk):
                why = _relied_on(event, capture, first, walk)
                if why is not None:
                    seen.add(event.cell)
                    report = at(event, "unrepeated-effect", value=cell_name(event.cell).lstrip("."), where=place(why.frame, why.at))
                    report.related.append((why.frame, why.at, "code outside the graph relies on it here"))
                    yield report
            elif isinstance(event, ev.MutateEvent) and event.name in (_GROWING | _SHRINKING if walk.whole else _GROWING) and _old(event.holder, capture):
                use = _container_used(event, replays, walk)
                if use is not None:
                    report = at(event, "unrepeated-effect", where=place(use.frame, use.at))
                    report.related.append((use.frame, use.at, "code outside the graph relies on it here"))
                    yield report
                    break


def _old(holder: Holder, capture: ev.Capture) -> bool:
    """Whether the holder is from before the capture and outlives it."""
    if isinstance(holder, Scope):
        return holder.outer is None or (holder.born < capture.begin and holder is not capture.frame.scope)
    return holder.born < capture.begin


def _relied_on(event: ev.WriteEvent, capture: ev.Capture, first: int, walk: Walk) -> ev.Event | None:
    """Where code outside needs the write to happen at each replay: it counts, or resets what the region sets."""
    if not any(isinstance(one, Host) for one in alternatives(event.new)):
        return None
    outside = [one for one in walk.of(ev.WriteEvent) if one.cell == event.cell and one.capture is None and one.clock > capture.end and _other(one.new, event.new) and one.at != event.at]
    reads = [one for one in walk.of(ev.ReadEvent) if one.cell == event.cell and one.capture is None and one.clock > first]
    if event.how == "augment" and any(isinstance(one, Host) and one.kind in ("int", "float", "any") for one in alternatives(event.new)):
        return reads[0] if reads else None
    for read in reads:
        before = next((one for one in reversed(outside) if one.clock < read.clock), None)
        if before is not None and any(before.clock < replay.clock < read.clock for replay in walk.replays(capture)):
            return before  # set outside, then replayed, then asked for what the region would have set
    return None


def _put_back(cell: Cell, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the region leaves the cell as it found it: a depth that goes up and down, a setting of a `with`."""
    writes = [event for event in walk.inside(capture) if isinstance(event, ev.WriteEvent) and event.cell == cell]
    if len(writes) < 2:
        return False
    first, last = writes[0].old, writes[-1].new
    if first is last or (isinstance(first, Host) and isinstance(last, Host) and first.known and last.known and first.value == last.value):
        return True
    return writes[0].how == writes[-1].how == "augment" and writes[0].at != writes[-1].at


def _other(new: Value, old: Value) -> bool:
    if isinstance(new, Host) and isinstance(old, Host):
        return (not (new.known and old.known and new.value == old.value) and new.kind != old.kind) or new.known != old.known or new.value != old.value
    return True


def _container_used(change: ev.MutateEvent, replays: list[ev.ReplayEvent], walk: Walk) -> ev.Event | None:
    """A list or dict that the region grows is looked at outside after a replay; not by the function that grows it, which fills it where it runs."""
    holder = change.holder
    for event in walk.events:
        if event.clock < replays[0].clock or event.capture is not None or event.frame.func is change.frame.func:
            continue
        if isinstance(event, ev.CallEvent) and (any(one is holder for one in event.args)):
            return event
        if isinstance(event, ev.LoopEvent) and event.value is holder:
            return event
        if isinstance(event, ev.IndexEvent) and event.obj is holder and event.stored is None:
            return event
    return None


def first_step_branch(walk: Walk) -> Iterator[Report]:
    """A branch that tells the first call from later ones by state that the same region changes."""
    for capture in captured(walk):
        tests = [event for event in walk.inside(capture) if isinstance(event, ev.TestEvent)]
        writes = [event for event in walk.inside(capture) if isinstance(event, ev.WriteEvent)]
        for test in tests:
            for host in alternatives(test.value):
                if not isinstance(host, Host):
                    continue
                for cell in host.origins:
                    later = next((write for write in writes if write.cell == cell and write.clock > test.clock), None)
                    if later is not None and not _put_back(cell, capture, walk) and _old(cell.holder, capture) and isinstance(later.new, Host) and _flips(later, host) and walk.replays(capture):
                        report = at(test, "first-step-branch", value=cell_name(cell).lstrip("."))
                        report.related.append((later.frame, later.at, "the region changes it here, once, at capture"))
                        yield report
                        return


def _flips(write: ev.WriteEvent, tested: Host) -> bool:
    old, new = write.old, write.new
    if isinstance(old, Host) and isinstance(new, Host) and old.known and new.known and isinstance(old.value, bool):
        return bool(old.value != new.value)
    return write.how == "augment"


def region_cache(walk: Walk) -> Iterator[Report]:
    """A tensor that is made in the region because a slot was empty, and kept there."""
    for capture in captured(walk):
        if not walk.whole or capture.kind == "graphed-callable":
            continue
        tested = {cell for event in walk.inside(capture) if isinstance(event, ev.TestEvent) for one in alternatives(event.value) if isinstance(one, Host) for cell in one.origins}
        for event in walk.inside(capture):
            if not isinstance(event, ev.WriteEvent) or not isinstance(event.new, Tensor) or event.new.storage.pool is not capture:
                continue
            if not _old(event.cell.holder, capture) or (isinstance(event.cell.holder, Scope) and event.cell.holder.outer is not None):
                continue
            empty = (event.old is None and isinstance(event.cell.holder, Mapping)) or (isinstance(event.old, Host) and event.old.kind == "none")
            if not empty or not (event.cell in tested or isinstance(event.cell.holder, Mapping)):
                continue
            if isinstance(event.cell.holder, Mapping) and event.frame is capture.frame:
                continue  # the region's own body leaves its result there
            if event.new.storage.owner == "grad" or _is_output(event.cell, capture, walk):
                continue
            yield at(event, "region-cache", value=cell_name(event.cell).lstrip("."))
            break


def _is_output(cell: Cell, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the slot is merely where the region leaves its result: nothing in the region read it before."""
    return not any(event.capture is capture and event.cell == cell for event in walk.of(ev.ReadEvent)) and not isinstance(cell.holder, Mapping)


__all__ = ["External"]
