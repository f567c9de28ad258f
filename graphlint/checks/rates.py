"""Numbers in the parameter groups of a captured optimizer: frozen at capture, changed by schedules."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, inplace_after, place
from graphlint.checks.steps import option, stepped
from graphlint.flow import events as ev
from graphlint.flow.values import (
    External,
    Items,
    Mapping,
    Tensor,
    Value,
    alternatives,
)


def frozen_lr(walk: Walk) -> Iterator[Report]:
    """A captured optimizer step with the learning rate as a Python number, and something that changes the rate."""
    for event in walk.of(ev.CallEvent):
        optimizer = stepped(event)
        capture = event.capture
        if optimizer is None or capture is None or "guarded" in capture.tags:
            continue
        rate = option(optimizer, "lr")
        if rate is not None and any(isinstance(one, Tensor) for one in alternatives(rate)):
            yield from _host_rate(event, optimizer, rate, capture, walk)
            continue
        change = _rate_change(optimizer, capture, walk)
        if change is not None:
            report = at(event, "frozen-lr", where=place(change.frame, change.at), value="lr")
            report.related.append((change.frame, change.at, "the learning rate changes here"))
            yield report


def _rate_change(optimizer: External, capture: ev.Capture, walk: Walk) -> ev.Event | None:
    """A scheduler of this optimizer that steps, or a write to its groups, between the capture and a replay."""
    last = max((event.clock for event in walk.replays(capture)), default=0)
    groups = optimizer.slots.get("param_groups")
    holders = [group for group in (groups.values if isinstance(groups, Items) else []) if isinstance(group, Mapping)]
    for event in walk.events:
        if event.capture is not None or not capture.end < event.clock or (walk.whole and event.clock > last):
            continue
        if isinstance(event, ev.CallEvent) and event.name.startswith("torch.optim.lr_scheduler.") and event.name.endswith(".step"):
            scheduler = event.receiver
            if isinstance(scheduler, External) and (optimizer in scheduler.args or optimizer in scheduler.keywords.values()):
                return event
        if isinstance(event, ev.WriteEvent) and event.cell.key == "lr" and any(event.cell.holder is group for group in holders) and not isinstance(event.new, Tensor):
            return event
    return None


def _host_rate(event: ev.CallEvent, optimizer: External, rate: Value, capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """The rate is a tensor: on the CPU it is frozen; one tensor for several groups collapses per-group schedules."""
    change = _rate_change(optimizer, capture, walk)
    tensor = next(one for one in alternatives(rate) if isinstance(one, Tensor))
    if tensor.on_host:
        change = change or inplace_after(tensor.storage, capture, walk)
        if change is not None:
            report = at(event, "frozen-lr", where=place(change.frame, change.at), value="lr")
            report.related.append((change.frame, change.at, "the learning rate changes here, in a CPU tensor whose number the graph has baked in"))
            yield report
        return
    groups = optimizer.slots.get("param_groups")
    rates = [group.slots.get("lr") for group in (groups.values if isinstance(groups, Items) else []) if isinstance(group, Mapping)]
    shared = len(rates) > 1 and all(isinstance(one, Tensor) and one.storage is tensor.storage for one in rates)
    if shared and change is not None:
        made = next((one for one in walk.of(ev.CallEvent) if one.result is optimizer), event)
        report = Report("shared-lr-tensor", made.frame, made.at, capture, {"value": "lr", "where": place(change.frame, change.at)})
        report.related.append((change.frame, change.at, "the rates are set per group here"))
        yield report
