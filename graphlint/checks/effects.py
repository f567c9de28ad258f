"""What Python does in a region happens once: counters, lists, flags, hooks, state that is made there."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, cell_name, is_none, place
from graphlint.checks.frozen import uses
from graphlint.checks.hooks import hook_of
from graphlint.checks.memory import captured
from graphlint.flow import events as ev
from graphlint.flow.values import Cell, External, Holder, Host, Mapping, Scope, Tensor, Value, alternatives, tensors_in

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
            if (
                isinstance(event, ev.WriteEvent)
                and event.cell not in seen
                and _old(event.cell.holder, capture)
                and not _put_back(event.cell, capture, walk)
            ):
                why = _relied_on(event, capture, first, walk)
                if why is not None:
                    seen.add(event.cell)
                    yield _unrepeated(
                        event,
                        why,
                        walk,
                        "the region relies on it here, at each replay"
                        if why.capture is capture
                        else "code outside the graph relies on it here",
                        cell_name(event.cell).lstrip("."),
                    )
            elif (
                isinstance(event, ev.MutateEvent)
                and event.name in (_GROWING | _SHRINKING if walk.whole else _GROWING)
                and _old(event.holder, capture)
            ):
                use = _container_used(event, replays, walk)
                if use is not None and not _collects(event, capture):
                    yield _unrepeated(event, use, walk)
                    break


def _unrepeated(
    event: ev.Event, use: ev.Event, walk: Walk, why: str = "code outside the graph relies on it here", value: str = ""
) -> Report:
    """The report of an effect, or of the hook that has it."""
    hook = hook_of(event.frame, walk)
    if hook is not None:
        report = at(hook, "python-hook", event.capture)
        report.related.append((event.frame, event.at, "the hook changes this in Python"))
    else:
        report = at(event, "unrepeated-effect", where=place(use.frame, use.at), value=value)
    report.related.append((use.frame, use.at, why))
    return report


def _collects(event: ev.MutateEvent, capture: ev.Capture) -> bool:
    """Whether the capturing function itself puts the graph's results away: they are made once, and stay where they
    are."""
    results = [one for value in event.values for one in tensors_in(value)]
    return event.frame is capture.frame and bool(results) and all(one.storage.pool is capture for one in results)


def _old(holder: Holder, capture: ev.Capture) -> bool:
    """Whether the holder is from before the capture and outlives it."""
    if isinstance(holder, Scope):
        return holder.outer is None or (holder.born < capture.begin and holder is not capture.frame.scope)
    return holder.born < capture.begin


def _relied_on(event: ev.WriteEvent, capture: ev.Capture, first: int, walk: Walk) -> ev.Event | None:
    """Where code outside needs the write to happen at each replay: it counts, or resets what the region sets."""
    plain = any(isinstance(one, Host) for one in alternatives(event.new))
    # state that the region reads as well is another rule's, `replaced-buffer`
    result = walk.whole and not any(
        one.cell == event.cell and one.clock < event.clock for one in walk.of(ev.ReadEvent) if one.capture is capture
    )
    outside = [
        one
        for one in walk.of(ev.WriteEvent)
        if one.cell == event.cell
        and one.capture is None
        and one.clock > capture.end
        and (
            ((_other(one.new, event.new) if plain else is_none(one.new)) and one.at != event.at)
            or (result and _eager_result(one.new, event.new, capture))
        )
    ]
    reads = [
        one for one in walk.of(ev.ReadEvent) if one.cell == event.cell and one.capture is None and one.clock > first
    ]
    if event.how == "augment" and any(
        isinstance(one, Host) and one.kind in ("int", "float", "any") for one in alternatives(event.new)
    ):
        if _set_before(event, capture, walk):
            return None
        return reads[0] if reads else _used_inside(event, capture, walk)
    for read in reads:
        before = next((one for one in reversed(outside) if one.clock < read.clock), None)
        if before is not None and any(before.clock < replay.clock < read.clock for replay in walk.replays(capture)):
            return before  # set outside, then replayed, then asked for what the region would have set
    return None


def _eager_result(new: Value, recorded: Value, capture: ev.Capture) -> bool:
    """Whether a slot that the graph left its own memory in now holds a tensor of an eager call, which no replay
    fills."""
    return (
        isinstance(new, Tensor)
        and isinstance(recorded, Tensor)
        and recorded.storage.pool is capture
        and new.storage.pool is None
    )


def _set_before(count: ev.WriteEvent, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the region itself starts the count: it then comes to the same at each run."""
    return any(
        isinstance(event, ev.WriteEvent)
        and event.cell == count.cell
        and event.clock < count.clock
        and event.how != "augment"
        for event in walk.inside(capture)
    )


def _used_inside(count: ev.WriteEvent, capture: ev.Capture, walk: Walk) -> ev.Event | None:
    """Where the region computes on the device with a number that it counts on in Python."""
    for event in walk.inside(capture):
        if (
            event.clock > count.clock
            and any(count.cell in host.origins for host, _ in uses(event))
            and not isinstance(event, (ev.TestEvent, ev.LoopEvent))
        ):
            return event
    return None


def consumed(walk: Walk) -> Iterator[Report]:
    """A region takes the next item of an iterator, or of a queue, that stood before it: once, at capture."""
    for capture in captured(walk):
        replays = walk.replays(capture)
        if not replays or capture.kind == "graphed-callable":
            continue
        for event in walk.inside(capture):
            source: Value | None = None
            if isinstance(event, ev.CallEvent) and event.name == "builtins.next" and event.args:
                source = event.args[0]
            elif isinstance(event, ev.MutateEvent) and event.name in ("pop", "popleft") and tensors_in(event.holder):
                source = event.holder
            if isinstance(source, Holder) and _old(source, capture):
                report = at(event, "unrepeated-effect", where=place(replays[0].frame, replays[0].at))
                report.related.append((replays[0].frame, replays[0].at, "the replay takes no further item"))
                yield report
                break


def unscaled_twice(walk: Walk) -> Iterator[Report]:
    """`unscale_` is captured and the scaler's step is not: what the scaler remembers of it does not happen on
    replay."""
    for event in walk.of(ev.CallEvent):
        if event.name != "torch.amp.GradScaler.unscale_" or event.capture is None or not walk.replays(event.capture):
            continue
        first = walk.replays(event.capture)[0].clock
        step = next(
            (
                one
                for one in walk.of(ev.CallEvent)
                if one.name == "torch.amp.GradScaler.step"
                and one.receiver is event.receiver
                and one.capture is None
                and one.clock > first
            ),
            None,
        )
        if step is not None:
            report = at(
                event,
                "unrepeated-effect",
                where=place(step.frame, step.at),
                value="the scaler's note that it has unscaled",
            )
            report.related.append((step.frame, step.at, "the scaler does not know of it here, and unscales again"))
            yield report
            return


def averaged_on_host(walk: Walk) -> Iterator[Report]:
    """`AveragedModel.update_parameters` asks its counter whether this is the first call: on the host, once, at
    capture."""
    for event in walk.direct(ev.CallEvent):
        model = event.receiver
        if event.name != "torch.optim.swa_utils.AveragedModel.update_parameters" or not isinstance(model, External):
            continue
        moved = any(one.receiver is model and one.name.endswith((".to", ".cuda")) for one in walk.of(ev.CallEvent))
        if moved or "device" in model.keywords or len(model.args) > 1:
            yield at(event, "hidden-check", why="tests its counter on the host")
        else:
            yield at(event, "first-step-branch", value="n_averaged")


def _put_back(cell: Cell, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the region leaves the cell as it found it: a depth that goes up and down, a setting of a `with`."""
    writes = [event for event in walk.inside(capture) if isinstance(event, ev.WriteEvent) and event.cell == cell]
    if len(writes) < 2:
        return False
    first, last = writes[0].old, writes[-1].new
    if first is last or (
        isinstance(first, Host) and isinstance(last, Host) and first.known and last.known and first.value == last.value
    ):
        return True
    return writes[0].how == writes[-1].how == "augment" and writes[0].at != writes[-1].at


def _other(new: Value, old: Value) -> bool:
    if isinstance(new, Host) and isinstance(old, Host):
        return (
            (not (new.known and old.known and new.value == old.value) and new.kind != old.kind)
            or new.known != old.known
            or new.value != old.value
        )
    return True


def _container_used(change: ev.MutateEvent, replays: list[ev.ReplayEvent], walk: Walk) -> ev.Event | None:
    """A list or dict that the region grows is looked at outside after a replay; not by the function that grows it,
    which fills it where it runs."""
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
        tests = [event for event in walk.inside(capture) if isinstance(event, ev.TestEvent) and event.differs]
        writes = [event for event in walk.inside(capture) if isinstance(event, ev.WriteEvent)]
        for test in tests:
            for host in alternatives(test.value):
                if not isinstance(host, Host):
                    continue
                for cell in host.origins:
                    later = next(
                        (
                            write
                            for write in writes
                            # a count that goes up before it is tested stands still all the same
                            if write.cell == cell and (write.clock > test.clock or write.how == "augment")
                        ),
                        None,
                    )
                    if (
                        later is not None
                        and not _put_back(cell, capture, walk)
                        and _old(cell.holder, capture)
                        and (
                            (isinstance(later.new, Host) and _flips(later, host))
                            or (
                                test.otherwise
                                and "none" in host.marks
                                and is_none(later.old)
                                and any(isinstance(one, Tensor) for one in alternatives(later.new))
                            )
                        )
                        and walk.replays(capture)
                    ):
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
        if not (walk.whole or capture.frame.name.endswith("__init__")) or capture.kind == "graphed-callable":
            continue
        tested = {
            cell
            for event in walk.inside(capture)
            if isinstance(event, ev.TestEvent) and not event.otherwise
            for one in alternatives(event.value)
            if isinstance(one, Host)
            for cell in one.origins
        }
        for event in walk.inside(capture):
            if (
                not isinstance(event, ev.WriteEvent)
                or not isinstance(event.new, Tensor)
                or event.new.storage.pool is not capture
            ):
                continue
            if not _old(event.cell.holder, capture) or (
                isinstance(event.cell.holder, Scope) and event.cell.holder.outer is not None
            ):
                continue
            empty = (event.old is None and isinstance(event.cell.holder, Mapping)) or (
                isinstance(event.old, Host) and event.old.kind == "none"
            )
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
    return not any(
        event.capture is capture and event.cell == cell for event in walk.of(ev.ReadEvent)
    ) and not isinstance(cell.holder, Mapping)


__all__ = ["External"]
