"""Optimizers, scalers, warm-up, collectives, generators: what must be so before a step can be captured."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint import rulebook
from graphlint.checks.base import Report, Walk, at, constant, given_true, of_class, place
from graphlint.checks.calls import matches
from graphlint.flow import events as ev
from graphlint.flow import names
from graphlint.flow.values import External, Host, Items, Mapping, Tensor, Value, Wrapped, alternatives, tensors_in

NEED_CAPTURABLE = frozenset(f"torch.optim.{name}" for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Adadelta", "RMSprop", "Rprop", "Muon"))
NEVER = {"torch.optim.LBFGS": "reads losses on the host in its line search", "torch.optim.Adafactor": "fails in its own check for `capturable`", "torch.optim.SparseAdam": "coalesces its sparse gradients on the host"}
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
        if not given_true(fused) and not (fused is not None and constant(fused) is None and not isinstance(fused, Host)) and "**" not in optimizer.keywords:
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
    if optimizer is None or not walk.whole or event.capture is None or optimizer.name not in STATEFUL:
        return
    if optimizer.name == "torch.optim.SGD":
        momentum = optimizer.keywords.get("momentum")
        if momentum is None or not constant(momentum):
            return
    elif not given_true(option(optimizer, "capturable")):
        return
    earlier = [clock for clock, _ in optimizer.facts.get("steps", []) if clock < event.capture.begin]
    loaded = any(one.receiver is optimizer and one.name.endswith(".load_state_dict") and one.clock < event.clock for one in walk.of(ev.CallEvent))
    if not earlier and not loaded:
        kind = "its momentum buffers" if optimizer.name == "torch.optim.SGD" else "its moments"
        yield _made_at(at(event, "state-born-in-region", why=kind), optimizer, walk)


# --- warm-up ---------------------------------------------------------------------------------------------------------


def library_of(event: ev.Event) -> str:
    """The CUDA library whose handle this work needs, or nothing."""
    if isinstance(event, ev.OpEvent):
        return "cublas" if event.op == "@" else ""
    if isinstance(event, ev.CallEvent):
        head, _, last = event.name.rpartition(".")
        if last == "forward" and head.startswith("torch.nn."):
            module = head.rpartition(".")[2]
            return next((library for library, members in names.LIBRARY_MODULES.items() if module in members), "")
        if head in ("torch", "torch.Tensor", "torch.nn.functional", "torch.fft", "torch.linalg"):
            return next((library for library, members in names.LIBRARIES.items() if last in members), "")
    return ""


_LIBRARY_WORDS = {"cublas": "cuBLAS", "cudnn": "cuDNN", "cufft": "cuFFT"}


def no_warmup(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """A library is used for the first time inside the capture."""
    if not walk.whole or capture.kind not in ("graph", "manual") or not capture.sure:
        return
    seen = {library_of(event) for event in walk.events if event.clock < capture.begin and _on_gpu(event)}
    opaque = any(isinstance(event, ev.CallEvent) and event.name.startswith("?") and event.clock < capture.begin for event in walk.events)
    for event in walk.inside(capture):
        library = library_of(event)
        if library and library not in seen and _on_gpu(event) and not opaque and event.sure:
            seen.add(library)
            yield at(event, "no-warmup", why=f"is the first call into {_LIBRARY_WORDS[library]}, which sets up its handle and workspace")


def _on_gpu(event: ev.Event) -> bool:
    result = event.result if isinstance(event, (ev.CallEvent, ev.OpEvent)) else None
    return result is not None and any(not one.on_host for one in tensors_in(result))


def first_compiled_call(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """A compiled function is called for the first time inside the capture, so it is compiled there."""
    if event.name == "<compiled>.__call__" and walk.whole and constant(event.keywords.get("<first>")) is True:
        if event.capture is not None and event.capture.kind in ("graph", "manual") and isinstance(event.receiver, Wrapped):
            yield at(event, "first-compiled-call")


def short_warmup(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """DDP gathers statistics in its first ten iterations: eleven must run before the capture."""
    if not walk.whole or capture.kind not in ("graph", "manual"):
        return
    wrapped = [event for event in walk.of(ev.CallEvent) if event.name == "torch.nn.parallel.DistributedDataParallel" and event.clock < capture.begin]
    if not wrapped:
        return
    for event in walk.of(ev.CallEvent):
        if event.name == "builtins.range" and event.clock < capture.begin and event.frame is capture.frame and event.args:
            rounds = constant(event.args[-1])
            if isinstance(rounds, int) and not isinstance(rounds, bool) and rounds < 11:
                yield Report("short-warmup", event.frame, event.at, capture, {"value": str(rounds)})
                return


# --- collectives -----------------------------------------------------------------------------------------------------

COLLECTIVES = frozenset({"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "reduce", "all_to_all", "all_to_all_single", "gather", "scatter", "send", "recv", "isend", "irecv", "barrier"})  # fmt: skip


def collectives(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """The first collective of a group makes its communicator; a gloo group works on the host."""
    head, _, last = event.name.rpartition(".")
    if head != "torch.distributed" or last not in COLLECTIVES:
        return
    group = event.keywords.get("group")
    backend = _backend(group, event, walk)
    if backend is not None and "gloo" in backend or backend == "mpi":
        yield at(event, "cpu-collective")
        return
    if not walk.whole or event.capture is None or last == "barrier":
        return
    earlier = [one for one in walk.of(ev.CallEvent) if one.clock < event.capture.begin and one.name.rpartition(".")[0] == "torch.distributed" and one.name.rpartition(".")[2] in COLLECTIVES]
    made = [one for one in walk.of(ev.CallEvent) if one.name in ("torch.distributed.init_process_group", "torch.distributed.new_group")]
    if made and not any(_same_group(one.keywords.get("group"), group) for one in earlier):
        eager = any("device_id" in one.keywords for one in made)
        if not eager:
            report = at(event, "first-collective")
            report.related.append((made[-1].frame, made[-1].at, "the group is made here; its communicator comes with the first collective"))
            yield report


def _same_group(one: Value | None, other: Value | None) -> bool:
    return one is other or (isinstance(one, Host) and other is None) or (isinstance(other, Host) and one is None)


def _backend(group: Value | None, event: ev.CallEvent, walk: Walk) -> str | None:
    for one in walk.of(ev.CallEvent):
        if one.clock > event.clock:
            break
        if one.name == "torch.distributed.new_group" and group is not None and one.result is group:
            found = constant(one.keywords.get("backend"))
            return found if isinstance(found, str) else None
        if one.name == "torch.distributed.init_process_group" and group is None:
            found = constant(one.args[0] if one.args else one.keywords.get("backend"))
            return found if isinstance(found, str) and ":" not in found and "," not in found else None
    return None


# --- random numbers --------------------------------------------------------------------------------------------------


def generators(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """A draw from a generator of one's own, which the graph must know of before torch 2.14."""
    given = event.keywords.get("generator")
    generator = of_class(given, "torch.Generator")
    if generator is None or walk.target >= (2, 14) or event.capture is None:
        return
    device = getattr(generator, "keywords", {}).get("device") or (generator.args[0] if isinstance(generator, External) and generator.args else None)
    if constant(device) in (None, "cpu") and not (device is not None and constant(device) is None):
        return
    registered = any(one.name.endswith(".register_generator_state") and generator in one.args and one.clock < event.clock for one in walk.of(ev.CallEvent))
    if not registered:
        yield at(event, "unregistered-generator", value="generator")


def seeded(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """A seed inside a capture."""
    for fact in rulebook.load().calls.get(event.name, ()):
        if fact.rule == "seed-in-region" and fact.holds_for(walk.target) and matches(fact, event.args, event.keywords):
            if isinstance(event.receiver, External) and event.receiver.name == "torch.Generator" and constant(event.receiver.keywords.get("device")) in (None, "cpu"):
                continue
            yield at(event, "seed-in-region", why=fact.why)
            return


__all__ = ["Tensor", "alternatives", "capturable_optimizer", "collectives", "first_compiled_call", "generators", "library_of", "no_warmup", "option", "place", "scheduler_in_region", "seeded", "short_warmup", "state_born_in_region", "stepped"]
