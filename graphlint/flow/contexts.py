"""Context managers from outside the project: captures, streams, exit stacks, grad modes, default devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow import graphs, tensors
from graphlint.flow.values import (
    NONE,
    UNKNOWN,
    Bound,
    External,
    Host,
    Instance,
    Unknown,
    Value,
    alternatives,
)

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine


Body = Callable[[Value], None]


SWALLOWING = frozenset({"pytest.raises", "contextlib.suppress", "unittest.TestCase.assertRaises"})


def captures(manager: Value) -> bool:
    return isinstance(manager, External) and graphs.is_context(manager.name, frozenset())


def with_external(machine: Machine, manager: Value, body: Body, at: ir.Span, whole: ir.Span) -> None:
    """A context manager from outside the project."""
    if isinstance(manager, External) and manager.name in SWALLOWING and machine.open:
        captures_, machine.open = machine.open, []  # what is expected to raise there is caught: nothing in it is judged
        try:
            body(manager)
        finally:
            machine.open = captures_
        return
    if isinstance(manager, Instance) and manager.cls.is_a(*graphs.CONTEXTS):
        kept = manager.slots.get("<arguments>")
        inner = External(
            next(base for base in manager.cls.outside() if base in graphs.CONTEXTS), machine.site(at), machine.clock
        )
        if isinstance(kept, External):
            inner.args, inner.keywords = kept.args, kept.keywords
        manager = inner
    if isinstance(manager, External):
        if graphs.is_context(manager.name, machine.declared):
            capture = graphs.begin_context(machine, manager, whole)
            try:
                body(manager)
            finally:
                if capture in machine.open:
                    graphs.end(machine, capture, at)
            return
        if manager.name in ("torch.cuda.stream", "torch.cuda.Stream", "torch.cuda.StreamContext"):
            _on_stream(machine, manager, body, at)
            return
        if manager.name == "contextlib.ExitStack":
            body(manager)
            close_stack(machine, manager, at)
            return
        if manager.name in GRAD_MODES:
            outer, machine.grad_mode = machine.grad_mode, grad_mode(manager)
            try:
                body(manager)
            finally:
                machine.grad_mode = outer
            return
        if manager.name in ("torch.amp.autocast",):
            machine.autocast.append((manager, machine.tick()))
            body(manager)
            machine.autocast.pop()
            return
        if graphs.is_graph_class(manager.name):
            capture = graphs.begin(machine, "graph", manager.name, whole, manager, {})
            body(manager)
            if capture in machine.open:
                graphs.end(machine, capture, at)
            return
        if manager.name.startswith("cupy.cuda.") and manager.name.endswith("Stream"):
            machine.happen(ev.StreamEvent, at, manager, "enter")
            body(manager)
            machine.happen(ev.StreamEvent, at, manager, "leave")
            return
        if manager.name in EXECUTORS:
            body(manager)
            wait_for_workers(machine, manager)
            return
    if isinstance(manager, Host) and manager.kind == "device":
        before, machine.default_device = machine.default_device, tensors.device_text(machine, manager)
        body(manager)
        machine.default_device = before
        return
    veil = isinstance(manager, (Unknown, Bound))
    machine.veils += veil
    body(manager)
    machine.veils -= veil


GRAD_MODES = frozenset({"torch.no_grad", "torch.inference_mode", "torch.enable_grad", "torch.set_grad_enabled"})


def grad_mode(switch: External) -> bool:
    """Whether autograd records under `torch.no_grad()` and its kin; not where that is unknown."""
    given = switch.args[0] if switch.args else switch.keywords.get("mode")
    if switch.name in ("torch.no_grad", "torch.enable_grad"):
        return switch.name == "torch.enable_grad"
    value = given.value if isinstance(given, Host) and given.known else None
    return value is True if switch.name == "torch.set_grad_enabled" else value is False


def set_grad(machine: Machine, event: ev.CallEvent) -> Value:
    """`torch.set_grad_enabled(...)`: from here on, or for a `with`."""
    made = External("torch.set_grad_enabled", machine.site(event.at), machine.clock)
    made.args, made.keywords = event.args, event.keywords
    return made


def _on_stream(machine: Machine, manager: External, body: Body, at: ir.Span) -> None:
    stream = (
        manager
        if manager.name == "torch.cuda.Stream"
        else (manager.args[0] if manager.args else manager.keywords.get("stream", UNKNOWN))
    )
    if isinstance(stream, Host) and stream.kind == "none":
        body(UNKNOWN)
        return
    machine.happen(ev.StreamEvent, at, stream, "enter")
    depth = len(machine.streams)
    machine.streams.append(stream)
    try:
        body(manager)
    finally:
        del machine.streams[depth:]
        machine.happen(ev.StreamEvent, at, stream, "leave")


def enter_stream(machine: Machine, event: ev.CallEvent, manager: External) -> Value:
    """`context.__enter__()` of `torch.cuda.stream(...)`."""
    stream = manager.args[0] if manager.args else manager.keywords.get("stream", UNKNOWN)
    machine.happen(ev.StreamEvent, event.at, stream, "enter")
    machine.streams.append(stream)
    return manager


def leave_stream(machine: Machine, event: ev.CallEvent, manager: External) -> Value:
    if machine.streams:
        machine.happen(ev.StreamEvent, event.at, machine.streams.pop(), "leave")
    return NONE


def close_stack(machine: Machine, stack: External, at: ir.Span) -> None:
    for what in reversed(stack.facts.pop("entered", [])):
        if isinstance(what, ev.Capture):
            if what in machine.open:
                graphs.end(machine, what, at)
        elif isinstance(what, External) and machine.streams and machine.streams[-1] is what:
            machine.streams.pop()
            machine.happen(ev.StreamEvent, at, what, "leave")


def enter_context(machine: Machine, event: ev.CallEvent, stack: External) -> Value:
    """`stack.enter_context(manager)`: entered until the stack closes."""
    manager = event.args[0] if event.args else UNKNOWN
    entered = stack.facts.setdefault("entered", [])
    for one in alternatives(manager):
        if isinstance(one, External) and graphs.is_context(one.name, machine.declared):
            entered.append(graphs.begin_context(machine, one, event.at))
            return one
        if isinstance(one, External) and one.name == "torch.cuda.stream" and one.args:
            machine.happen(ev.StreamEvent, event.at, one.args[0], "enter")
            machine.streams.append(one.args[0])
            entered.append(one.args[0])
            return one
    return manager


EXECUTORS = frozenset(
    {"concurrent.futures.ThreadPoolExecutor", "multiprocessing.pool.ThreadPool", "multiprocessing.dummy.Pool"}
)


def wait_for_workers(machine: Machine, pool: External) -> None:
    for future in pool.facts.get("futures", []):
        future.facts.setdefault("joined", machine.clock)
