"""Numbers in the parameter groups of a captured optimizer: frozen at capture, changed by schedules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, constant, inplace_after, place
from graphlint.checks.steps import option, stepped
from graphlint.flow import events as ev
from graphlint.flow.values import External, Host, Items, Mapping, Storage, Tensor, Value, alternatives

SCHEDULERS = "torch.optim.lr_scheduler."
_CYCLES = (f"{SCHEDULERS}OneCycleLR", f"{SCHEDULERS}CyclicLR")  # move the momentum too, unless told not to
_PLAIN = ("lr", "params", "initial_lr")  # `lr` is judged apart; the others are no operands of the step


def frozen_lr(walk: Walk) -> Iterator[Report]:
    """A captured optimizer step with numbers of its groups as Python numbers, and something that changes them."""
    for event in walk.of(ev.CallEvent):
        optimizer = stepped(event)
        capture = event.capture
        if optimizer is None or capture is None or "guarded" in capture.tags:
            continue
        found = list(_of_rate(event, optimizer, capture, walk)) or list(_of_others(event, optimizer, capture, walk))
        yield from found


def _of_rate(event: ev.CallEvent, optimizer: External, capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    rate = _rate_at(optimizer, capture, walk)
    if rate is not None and any(isinstance(one, Tensor) for one in alternatives(rate)):
        yield from _tensor_rate(event, optimizer, rate, capture, walk)
        return
    change = next(
        (one for one in _between(capture, walk) if _steps_schedule(one, optimizer) or _writes(one, optimizer, "lr")),
        None,
    )
    if change is not None:
        yield _frozen(event, change, "lr", "the learning rate changes here")


def _rate_at(optimizer: External, capture: ev.Capture, walk: Walk) -> Value | None:
    """The rate that stood in the groups at the capture."""
    groups = _groups(optimizer)
    later = next(
        (
            event
            for event in walk.of(ev.WriteEvent)
            if event.clock > capture.end
            and event.cell.key == "lr"
            and any(event.cell.holder is group for group in groups)
        ),
        None,
    )
    return later.old if later is not None and later.old is not None else option(optimizer, "lr")


def _frozen(event: ev.CallEvent, change: ev.Event, key: str, why: str) -> Report:
    report = at(event, "frozen-lr", where=place(change.frame, change.at), value=key)
    report.related.append((change.frame, change.at, why))
    return report


def _between(capture: ev.Capture, walk: Walk) -> Iterator[ev.Event]:
    """What happens outside, between the capture and its last replay; in a class seen by itself, all that happens
    later."""
    last = max((event.clock for event in walk.replays(capture)), default=0)
    for event in walk.events:
        if event.capture is None and capture.end < event.clock and not (walk.whole and event.clock > last):
            yield event


def _steps_schedule(event: ev.Event, optimizer: External) -> External | None:
    """The scheduler of this optimizer that steps here."""
    if not (isinstance(event, ev.CallEvent) and event.name.startswith(SCHEDULERS) and event.name.endswith(".step")):
        return None
    scheduler = event.receiver
    if isinstance(scheduler, External) and (optimizer in scheduler.args or optimizer in scheduler.keywords.values()):
        return scheduler
    return None


def _groups(optimizer: External) -> list[Mapping]:
    groups = optimizer.slots.get("param_groups")
    return [group for group in groups.values if isinstance(group, Mapping)] if isinstance(groups, Items) else []


def _writes(event: ev.Event, optimizer: External, key: str = "") -> bool:
    """Whether it puts a number (not a tensor) under `key`, or under any that a step computes with, into a group."""
    if (
        not isinstance(event, ev.WriteEvent)
        or isinstance(event.new, Tensor)
        or not any(event.cell.holder is group for group in _groups(optimizer))
    ):
        return False
    if (
        isinstance(event.old, Host)
        and isinstance(event.new, Host)
        and event.old.known
        and event.old.value == event.new.value
        and event.new.known
    ):
        return False
    return event.cell.key == key if key else event.cell.key not in _PLAIN


def _of_others(event: ev.CallEvent, optimizer: External, capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """Weight decay, momentum, betas: never tensors, so always frozen."""
    for change in _between(capture, walk):
        scheduler = _steps_schedule(change, optimizer)
        if (
            scheduler is not None
            and scheduler.name in _CYCLES
            and constant(scheduler.keywords.get("cycle_momentum")) is not False
        ):
            yield _frozen(event, change, "momentum", "the schedule moves the momentum here")
            return
        if isinstance(change, ev.WriteEvent) and _writes(change, optimizer):
            yield _frozen(event, change, str(change.cell.key), f"`{change.cell.key}` changes here")
            return


def _tensor_rate(
    event: ev.CallEvent, optimizer: External, rate: Value, capture: ev.Capture, walk: Walk
) -> Iterator[Report]:
    """The rate is a tensor: on the CPU it is frozen; one tensor for several groups collapses per-group schedules;
    another tensor is not read."""
    tensor = next(one for one in alternatives(rate) if isinstance(one, Tensor))
    change = next(
        (one for one in _between(capture, walk) if _steps_schedule(one, optimizer) or _writes(one, optimizer, "lr")),
        None,
    )
    if tensor.on_host:
        change = change or inplace_after(tensor.storage, capture, walk)
        if change is not None:
            yield _frozen(
                event,
                change,
                "lr",
                "the learning rate changes here, in a CPU tensor whose number the graph has baked in",
            )
        return
    groups = _groups(optimizer)
    rates = [group.slots.get("lr") for group in groups]
    shared = len(rates) > 1 and sum(isinstance(one, Tensor) and one.storage is tensor.storage for one in rates) > 1
    spread = next(
        (one for one in _between(capture, walk) if _several_schedules(_steps_schedule(one, optimizer))), None
    ) or _filled_apart(tensor.storage, capture, walk)
    if shared and spread is not None:
        made = next((one for one in walk.of(ev.CallEvent) if one.result is optimizer), event)
        report = Report(
            "shared-lr-tensor", made.frame, made.at, capture, {"value": "lr", "where": place(spread.frame, spread.at)}
        )
        report.related.append((spread.frame, spread.at, "the rates are set per group here"))
        yield report
        return
    yield from _other_rate(tensor.storage, groups, capture, walk)


def _several_schedules(scheduler: External | None) -> bool:
    """Whether it has a function, or a rate, for each group."""
    if scheduler is None:
        return False
    given = [
        *scheduler.args[1:2],
        *[scheduler.keywords[key] for key in ("lr_lambda", "max_lr", "base_lr") if key in scheduler.keywords],
    ]
    return any(isinstance(one, Items) and (len(one.slots) > 1 or not one.exact) for one in given)


def _filled_apart(storage: Storage, capture: ev.Capture, walk: Walk) -> ev.InplaceEvent | None:
    """One tensor is filled twice at one place before a replay, with two values: a loop over groups that means each of
    them."""
    fills = [
        event
        for event in walk.of(ev.InplaceEvent)
        if event.storage is storage and event.capture is None and event.clock > capture.end
    ]
    for first, second in itertools.pairwise(fills):
        if (
            first.at != second.at
            or first.frame is not second.frame
            or any(first.clock < replay.clock < second.clock for replay in walk.replays(capture))
        ):
            continue
        one, other = constant(first.source), constant(second.source)
        if first.name == "mul_" or (one is not None and other is not None and one != other):
            return first
    return None


def _other_rate(storage: Storage, groups: list[Mapping], capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """Another tensor is put where the graph reads the rate from."""
    for change in _between(capture, walk):
        if (
            isinstance(change, ev.WriteEvent)
            and change.cell.key == "lr"
            and any(change.cell.holder is group for group in groups)
        ):
            found = [one for one in alternatives(change.new) if isinstance(one, Tensor)]
            if found and all(one.storage is not storage for one in found):
                yield at(
                    change,
                    "replaced-optimizer-state",
                    capture,
                    why="puts another tensor in the place of the rate that the graph reads",
                )
                return
