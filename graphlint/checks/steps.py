"""Optimizers, scalers, schedules, generators: what must be so before a step can be captured."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint import rulebook
from graphlint.checks.base import Report, Walk, at, constant, given_true, of_class
from graphlint.checks.calls import matches
from graphlint.flow import events as ev
from graphlint.flow.values import External, Host, Items, Mapping, Value

NEED_CAPTURABLE = frozenset(
    f"torch.optim.{name}"
    for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Adadelta", "RMSprop", "Rprop", "Muon")
)
NEVER = {
    "torch.optim.LBFGS": "reads losses on the host in its line search",
    "torch.optim.Adafactor": "fails in its own check for `capturable`",
    "torch.optim.SparseAdam": "coalesces its sparse gradients on the host",
}
STATEFUL = NEED_CAPTURABLE | {"torch.optim.SGD"}
FUSED = frozenset(f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD", "Adagrad"))


def stepped(event: ev.CallEvent) -> External | None:
    """The optimizer that the call steps, directly or through a scaler."""
    if event.name == "torch.amp.GradScaler.step" and event.args:
        found = event.args[0]
        return found if isinstance(found, External) and found.name.startswith("torch.optim.") else None
    if event.name.startswith("torch.optim.") and event.name.endswith(".step") and "lr_scheduler" not in event.name:
        return event.receiver if isinstance(event.receiver, External) else None
    return None


def option(optimizer: External, name: str) -> Value | None:
    """An option of the optimizer: as constructed, or as its groups say now."""
    groups = optimizer.slots.get("param_groups")
    for group in groups.values if isinstance(groups, Items) else []:
        if isinstance(group, Mapping) and name in group.slots:
            return group.slots[name]
    return optimizer.keywords.get(name)


def capturable_optimizer(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """The step of an optimizer that was not made for captures."""
    optimizer = stepped(event)
    if optimizer is None:
        return
    if optimizer.name in NEVER:
        yield _made_at(at(event, "uncapturable-optimizer", why=NEVER[optimizer.name]), optimizer, walk)
        return
    if event.name == "torch.amp.GradScaler.step" and optimizer.name.startswith("torch.optim."):
        fused = option(optimizer, "fused")
        if (
            not given_true(fused)
            and not (fused is not None and constant(fused) is None and not isinstance(fused, Host))
            and "**" not in optimizer.keywords
        ):
            yield _made_at(at(event, "unfused-scaler", value=optimizer.name.rpartition(".")[2]), optimizer, walk)
            return
    if optimizer.name in NEED_CAPTURABLE and "**" not in optimizer.keywords:
        flag = option(optimizer, "capturable")
        if flag is None or constant(flag) is False:
            yield _made_at(at(event, "not-capturable", value=optimizer.name.rpartition(".")[2]), optimizer, walk)


def _made_at(report: Report, optimizer: External, walk: Walk) -> Report:
    made = next((event for event in walk.of(ev.CallEvent) if event.result is optimizer), None)
    if made is not None:
        report.related.append((made.frame, made.at, f"the `{optimizer.name.rpartition('.')[2]}` is made here"))
    return report


def scheduler_in_region(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """A learning-rate schedule moves in Python; in a region it moves once."""
    if event.name.startswith("torch.optim.lr_scheduler.") and event.name.endswith(".step"):
        yield at(event, "scheduler-in-region", why="runs in Python")


def state_born_in_region(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """The first step of an optimizer is the captured one, so its state is made and reset by every replay."""
    optimizer = stepped(event)
    if optimizer is None or event.capture is None or optimizer.name not in STATEFUL:
        return
    if not walk.whole and any(inside is None for _, inside in optimizer.facts.get("steps", [])):
        return  # in a made-up run any method may have come first
    if optimizer.name == "torch.optim.SGD":
        momentum = optimizer.keywords.get("momentum")
        if momentum is None or not constant(momentum):
            return
    elif not given_true(option(optimizer, "capturable")):
        return
    earlier = [clock for clock, _ in optimizer.facts.get("steps", []) if clock < event.capture.begin]
    loaded = any(
        one.receiver is optimizer and one.name.endswith(".load_state_dict") and one.clock < event.clock
        for one in walk.of(ev.CallEvent)
    )
    if not earlier and not loaded:
        kind = "its momentum buffers" if optimizer.name == "torch.optim.SGD" else "its moments"
        yield _made_at(at(event, "state-born-in-region", why=kind), optimizer, walk)


def scaler_born_in_region(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """The first loss that a scaler scales is the captured one, so its scale is made, and reset, by every replay."""
    if event.name != "torch.amp.GradScaler.scale" or not walk.whole or event.capture is None:
        return
    known = [
        one
        for one in walk.of(ev.CallEvent)
        if one.receiver is event.receiver
        and one.name.endswith((".scale", ".load_state_dict"))
        and one.clock < event.capture.begin
    ]
    first = not any(
        one.receiver is event.receiver and one.name == event.name and one.clock < event.clock
        for one in walk.of(ev.CallEvent)
    )
    if not known and first and constant(getattr(event.receiver, "keywords", {}).get("enabled")) is not False:
        yield at(event, "state-born-in-region", why="the scale of the scaler")


# --- random numbers --------------------------------------------------------------------------------------------------


def generators(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """A draw from a generator of one's own, which the graph must know of before torch 2.14."""
    given = event.keywords.get("generator")
    generator = of_class(given, "torch.Generator")
    if generator is None or walk.target >= (2, 14) or event.capture is None or generator.born > event.capture.begin:
        return  # one that is made in the region is a fault of its own
    device = getattr(generator, "keywords", {}).get("device") or (
        generator.args[0] if isinstance(generator, External) and generator.args else None
    )
    if constant(device) in (None, "cpu") and not (device is not None and constant(device) is None):
        return
    registered = any(
        one.name.endswith(".register_generator_state") and generator in one.args and one.clock < event.clock
        for one in walk.of(ev.CallEvent)
    )
    if not registered:
        yield at(event, "unregistered-generator", value="generator")


def seeded(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """A seed inside a capture."""
    for fact in rulebook.load().calls.get(event.name, ()):
        if fact.rule == "seed-in-region" and fact.holds_for(walk.target) and matches(fact, event.args, event.keywords):
            if (
                isinstance(event.receiver, External)
                and event.capture is not None
                and event.receiver.born > event.capture.begin
            ):
                continue  # made in the region, which is a fault of its own
            if (
                isinstance(event.receiver, External)
                and event.receiver.name == "torch.Generator"
                and constant(event.receiver.keywords.get("device")) in (None, "cpu")
            ):
                continue
            yield at(event, "seed-in-region", why=fact.why)
            return


__all__ = [
    "capturable_optimizer",
    "generators",
    "option",
    "scheduler_in_region",
    "seeded",
    "state_born_in_region",
    "stepped",
]
