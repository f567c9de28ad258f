"""Gradients and optimizer state that a captured step writes: dropped, never cleared, or replaced behind its back."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint import ir
from graphlint.checks.base import Report, Walk, at, constant, is_none, replayed_after
from graphlint.checks.memory import captured, stale
from graphlint.checks.steps import stepped
from graphlint.flow import events as ev
from graphlint.flow.values import External, Mapping, Tensor


def backward_only(walk: Walk) -> Iterator[ev.Capture]:
    """The captures that hold a backward, and neither the step nor the clearing of gradients."""
    for capture in captured(walk):
        calls = [event for event in walk.inside(capture) if isinstance(event, ev.CallEvent)]
        if capture.kind == "graphed-callable" or not any(event.name.endswith(".backward") for event in calls):
            continue
        if not any(stepped(event) or event.name.endswith(".zero_grad") for event in calls):
            yield capture


def replaced_gradient(walk: Walk) -> Iterator[Report]:
    """Gradients that a captured backward writes are dropped in Python, and an eager step looks for them."""
    for capture in backward_only(walk):
        for event in walk.of(ev.WriteEvent):
            if (
                event.capture is None
                and event.clock > capture.end
                and event.cell.holder is walk.machine.gradients
                and is_none(event.new)
            ):
                replay = replayed_after(capture, event.clock, walk)
                use = _looked_for(event, replay, walk) if replay is not None else None
                if use is not None:
                    report = Report("replaced-gradient", *_asked(event), capture, {"why": "drops the gradients"})
                    report.related.append((use.frame, use.at, "the eager step finds no gradients here"))
                    yield report
                    break


def _asked(event: ev.Event) -> tuple[ev.Frame, ir.Span]:
    """The place of a call; of one that only hands on a call of its own name, the place where that is called."""
    frame, span = event.frame, event.at
    while frame.func is not None and frame.func.name == "zero_grad":
        caller, call = frame.parent, frame.call_at
        if caller is None or call is None:
            break
        frame, span = caller, call
    return frame, span


def _looked_for(drop: ev.WriteEvent, replay: ev.ReplayEvent, walk: Walk) -> ev.Event | None:
    """Where gradients are asked for behind the replay, with no eager backward since they were dropped."""
    for event in walk.after(drop.clock):
        if event.capture is not None:
            continue
        if isinstance(event, ev.CallEvent) and event.name.endswith(".backward"):
            return None
        if event.clock < replay.clock:
            continue
        if isinstance(event, ev.CallEvent) and stepped(event) is not None:
            return event
        if isinstance(event, ev.ReadEvent) and event.cell == drop.cell and is_none(event.value):
            return event
    return None


def piled_gradient(walk: Walk) -> Iterator[Report]:
    """Gradients exist when the backward is captured, so it adds to them, and nothing clears them between replays and
    steps."""
    for capture in backward_only(walk):
        replays = walk.replays(capture)
        if len(replays) < 2 or not walk.whole or not _exist_at(capture, walk):
            continue
        step = _step_between(replays, walk)
        if step is None or any(
            _clears(event) for event in walk.events if event.capture is None and event.clock > capture.end
        ):
            continue
        backward = next(
            event
            for event in walk.inside(capture)
            if isinstance(event, ev.CallEvent) and event.name.endswith(".backward")
        )
        report = Report(
            "replaced-gradient",
            *_in_region(backward, capture),
            capture,
            {"why": "adds to the gradients that are there"},
        )
        report.related.append(
            (step.frame, step.at, "the step here takes the sum of all replays so far: nothing clears the gradients")
        )
        yield report


def _in_region(event: ev.Event, capture: ev.Capture) -> tuple[ev.Frame, tuple[int, int, int, int]]:
    """The statement of the region that leads to the event."""
    frame, span = event.frame, event.at
    while frame is not capture.frame:
        if frame.parent is None or frame.call_at is None:
            break
        span, frame = frame.call_at, frame.parent
    return (frame, span) if frame is capture.frame else (event.frame, event.at)


def _exist_at(capture: ev.Capture, walk: Walk) -> bool:
    exist = False
    for event in walk.events:
        if event.clock > capture.begin:
            break
        if isinstance(event, ev.CallEvent) and event.name.endswith(".backward"):
            exist = True
        elif (
            isinstance(event, ev.WriteEvent) and event.cell.holder is walk.machine.gradients and is_none(event.new)
        ) or (
            isinstance(event, ev.CallEvent)
            and event.name.endswith(".zero_grad")
            and constant(event.keywords.get("set_to_none")) is not False
        ):
            exist = False
    return exist


def _step_between(replays: list[ev.ReplayEvent], walk: Walk) -> ev.CallEvent | None:
    steps = [event for event in walk.of(ev.CallEvent) if event.capture is None and stepped(event) is not None]
    return next((step for step in steps if replays[0].clock < step.clock < replays[1].clock), None)


def _clears(event: ev.Event) -> bool:
    if isinstance(event, ev.InplaceEvent):
        return event.storage.owner == "grad" and event.name in ("zero_", "fill_", "mul_", "copy_")
    if isinstance(event, ev.CallEvent):
        return event.name.endswith((".zero_grad", "._foreach_zero_")) or event.name.startswith("?")
    return isinstance(event, ev.WriteEvent) and event.how in ("grad", "zero_grad")


def replaced_optimizer_state(walk: Walk) -> Iterator[Report]:
    """The state of an optimizer whose step is captured is loaded, cleared or replaced."""
    for capture in captured(walk):
        inside = [stepped(event) for event in walk.inside(capture) if isinstance(event, ev.CallEvent)]
        optimizers = [one for one in inside if one is not None]
        for event in walk.events:
            if (
                event.capture is not None
                or event.clock < capture.end
                or not _replaces_state(event, optimizers)
                or not stale(capture, event, walk)
            ):
                continue
            yield at(
                event,
                "replaced-optimizer-state",
                capture,
                why="puts new state tensors in the place of the old ones"
                if isinstance(event, ev.CallEvent)
                else "drops the state that the graph goes on with",
            )
            break


def _replaces_state(event: ev.Event, optimizers: list[External]) -> bool:
    if isinstance(event, ev.CallEvent):
        return event.name.endswith(".load_state_dict") and event.receiver in optimizers
    states = [one.slots.get("state") for one in optimizers]
    if isinstance(event, ev.MutateEvent):
        return event.name in ("clear", "pop", "popitem", "del") and any(event.holder is one for one in states)
    if isinstance(event, ev.WriteEvent):
        if any(event.cell.holder is one for one in optimizers):
            return event.cell.key == "state"
        return any(event.cell.holder is one for one in states if isinstance(one, Mapping)) and not isinstance(
            event.new, Tensor
        )
    return False
