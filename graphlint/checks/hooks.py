"""Hooks: Python that a module, a parameter or an optimizer runs by itself; it runs at the capture and on no replay."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at
from graphlint.checks.memory import captured
from graphlint.flow import events as ev
from graphlint.flow.values import Bound, Closure, Partial, Value

REGISTERS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook",
             "register_post_accumulate_grad_hook", "register_hook", "register_step_post_hook", "register_step_pre_hook")  # fmt: skip


def registered(walk: Walk) -> Iterator[ev.CallEvent]:
    """The calls that hang a hook onto something."""
    for event in walk.of(ev.CallEvent):
        if event.name.rpartition(".")[2] in REGISTERS and event.args:
            yield event


def _function(hook: Value) -> object:
    if isinstance(hook, Partial):
        return _function(hook.func)
    if isinstance(hook, Bound) and isinstance(hook.func, Closure):
        return hook.func.func
    return hook.func if isinstance(hook, Closure) else None


def hook_of(frame: ev.Frame | None, walk: Walk) -> ev.CallEvent | None:
    """Where the hook was registered that is running in this frame or around it."""
    hooks = {id(_function(event.args[0])): event for event in registered(walk) if _function(event.args[0]) is not None}
    while frame is not None:
        if frame.func is not None and id(frame.func) in hooks:
            return hooks[id(frame.func)]
        frame = frame.parent
    return None


def late_hook(walk: Walk) -> Iterator[Report]:
    """A hook is hung onto a module that a capture has run already, and the graph is replayed with it in place."""
    for capture in captured(walk):
        if capture.kind == "graphed-callable":
            continue
        ran = _ran(capture, walk)
        for event in registered(walk):
            if (
                event.capture is not None
                or event.clock < capture.end
                or event.receiver is None
                or id(event.receiver) not in ran
            ):
                continue
            removed = next(
                (
                    one.clock
                    for one in walk.of(ev.CallEvent)
                    if one.receiver is event.result and one.name.endswith(".remove")
                ),
                1 << 60,
            )
            replay = next((one for one in walk.replays(capture) if event.clock < one.clock < removed), None)
            if replay is not None and not _runs_eagerly(event, removed, walk):
                report = at(event, "python-hook", capture)
                report.related.append((replay.frame, replay.at, "the replay here runs without it"))
                yield report
                break


def _ran(capture: ev.Capture, walk: Walk) -> set[int]:
    """The modules that ran in a capture, and the tensors' hooks' owners."""
    found: set[int] = set()
    for event in walk.inside(capture):
        if (
            isinstance(event, ev.CallEvent)
            and event.name.endswith((".forward", ".step"))
            and event.receiver is not None
        ):
            found.add(id(event.receiver))
        frame: ev.Frame | None = event.frame
        while frame is not None and frame is not capture.frame:
            if frame.receiver is not None:
                found.add(id(frame.receiver))
            frame = frame.parent
    return found


def _runs_eagerly(event: ev.CallEvent, until: int, walk: Walk) -> bool:
    """Whether the hook is there for eager calls: the module runs outside the graph while it hangs."""
    return any(
        one.receiver is event.receiver
        and one.name.endswith(".forward")
        and one.capture is None
        and event.clock < one.clock < until
        for one in walk.of(ev.CallEvent)
    )
