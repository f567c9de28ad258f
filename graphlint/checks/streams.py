"""Streams, events and threads: work that leaves the capture, never comes back, or disturbs it from beside."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, where
from graphlint.checks.calls import fact_of
from graphlint.checks.order import outermost
from graphlint.flow import events as ev
from graphlint.flow.values import External, Tensor, Value, alternatives, tensors_in

_WAITS = ("torch.cuda.Stream.wait_stream", "torch.cuda.Stream.wait_event", "torch.cuda.Event.wait")


def side_streams(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """Every stream that the region uses is forked from the capture before and joined after."""
    if capture.kind == "warp":
        return
    forked: set[int] = set()  # once forked, a stream belongs to the capture until its end
    used: dict[int, ev.StreamEvent] = {}  # with work that nothing has joined yet
    current: list[Value] = [capture.stream] if capture.stream is not None else []
    known = {id(one) for one in current}
    entered: list[ev.StreamEvent] = []
    for event in walk.inside(capture):
        if isinstance(event, ev.CallEvent) and event.name == "torch.cuda.set_stream" and event.args:
            if _is_default(event.args[0]) and capture.stream is not event.args[0]:
                yield at(event, "default-stream", why="puts what follows on the default stream")
            entered[-1:] = [
                ev.StreamEvent(event.clock, event.at, event.frame, event.capture, event.sure, event.args[0], "enter")
            ]
        elif isinstance(event, ev.StreamEvent):
            if event.how == "enter":
                entered.append(event)
                if _is_default(event.stream) and capture.stream is not event.stream:
                    yield at(event, "default-stream", why="puts work on the default stream")
            elif entered:
                entered.pop()
        elif isinstance(event, ev.CallEvent) and event.name in _WAITS:
            yield from _waited(event, capture, forked, used, known)
        elif entered and isinstance(event, (ev.CallEvent, ev.OpEvent)) and _is_work(event):
            opened = entered[-1]
            stream = opened.stream
            if (
                isinstance(stream, External)
                and stream.name.startswith("torch.")
                and id(stream) not in known
                and not _is_default(stream)
            ):
                if id(stream) not in forked and id(stream) not in used:
                    yield at(opened, "unforked-stream", value="")
                used[id(stream)] = opened
    for ident, opened in used.items():
        if ident in forked and ident not in known:
            yield at(opened, "unjoined-stream", value="")


def _waited(
    event: ev.CallEvent,
    capture: ev.Capture,
    forked: set[int],
    used: dict[int, ev.StreamEvent],
    known: set[int],
) -> Iterator[Report]:
    """Who waits for whom: a side stream that waits for the capture is forked, one the capture waits for is joined."""
    if event.name == "torch.cuda.Event.wait":
        waiter: Value | None = event.args[0] if event.args else capture.stream
        source: Value | None = event.receiver
    else:
        waiter, source = event.receiver, event.args[0] if event.args else None
    for one in alternatives(source) if source is not None else ():
        if not isinstance(one, External):
            known.add(id(waiter))  # forked from, or joined with, nobody knows what
            return
        stream: Value | None = one
        if one.name == "torch.cuda.Event":
            recorded = one.facts.get("recorded")
            if recorded is None:
                return
            _, inside, stream = recorded
            if inside is not capture:
                if not event.sure:
                    return  # a wait for work that another branch may have started inside
                yield at(event, "outside-event")
                return
            if stream is None:
                stream = capture.stream
        source_in = stream is capture.stream or id(stream) in forked or stream is None
        waiter_in = waiter is capture.stream or id(waiter) in forked
        if source_in and not waiter_in and waiter is not None:
            forked.add(id(waiter))
        elif waiter_in and id(stream) in forked:
            used.pop(id(stream), None)
        elif (
            waiter_in
            and not source_in
            and id(stream) not in used  # reported as not forked
            and isinstance(stream, External)
            and not stream.facts.get("capture")
            and event.sure
        ):
            yield at(event, "outside-event")


def _is_default(stream: Value) -> bool:
    return isinstance(stream, External) and bool(stream.facts.get("default"))


def recorded_stream(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """`record_stream` on several tensors of the region: none of their blocks is used again before the capture ends."""
    held = [
        event
        for event in walk.inside(capture)
        if isinstance(event, ev.CallEvent)
        and event.name == "torch.Tensor.record_stream"
        and isinstance(event.receiver, Tensor)
        and event.receiver.storage.pool is capture
    ]
    if len({event.receiver.storage for event in held if isinstance(event.receiver, Tensor)}) > 1:
        yield at(held[0], "recorded-stream", capture)


def begun_on_default(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """`capture_begin()` while the default stream is current."""
    if capture.kind == "manual" and capture.sure and walk.whole and "veiled" not in capture.tags:
        if capture.stream is None or _is_default(capture.stream):
            yield Report(
                "default-stream",
                capture.frame,
                capture.at,
                capture,
                {"why": "begins a capture while the default stream is current"},
            )


def foreign_stream(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """A library is handed a tensor and works on a stream of its own, unless it was given PyTorch's."""
    inside = 0
    for event in walk.events:
        if capture.end and event.clock > capture.end:
            return
        if (
            isinstance(event, ev.StreamEvent)
            and isinstance(event.stream, External)
            and not event.stream.name.startswith("torch.")
        ):
            inside += 1 if event.how == "enter" else -1
        elif isinstance(event, ev.CallEvent):
            if event.name.startswith("cupy.") and event.name.endswith(".use"):
                return  # that stream is current from here on
            fact = fact_of(event, walk, "default-stream") if event.capture is capture and not inside else None
            if fact is not None:
                yield at(event, "default-stream", why=fact.why)


def _is_work(event: ev.CallEvent | ev.OpEvent) -> bool:
    """Whether it launches something on the GPU."""
    if isinstance(event, ev.OpEvent):
        return isinstance(event.result, Tensor) and not event.result.on_host
    if event.name.startswith(
        ("torch.cuda.Stream", "torch.cuda.Event", "torch.cuda.current", "builtins.", "torch.cuda.stream")
    ):
        return False
    if event.name == "torch.Tensor.copy_":  # to the host as well
        return any(not one.on_host for value in (event.receiver, *event.args[:1]) if value for one in tensors_in(value))
    return any(not one.on_host for one in tensors_in(event.result))


def nested_capture(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """A capture or a replay inside a capture; a graph object captured twice."""
    outer = capture.outer
    if outer is not None and outer.kind != "compile" and capture.kind not in ("capture-safe", "compile"):
        yield Report(
            "nested-capture",
            capture.frame,
            capture.at,
            outer,
            {"why": f"begins while the capture at {where(outer)} is open,"},
        )
    if capture.graph is not None and capture.kind in ("graph", "manual"):
        before = [one for one in walk.captures if one.graph is capture.graph and one.end and one.end < capture.begin]
        if not walk.whole:  # in a made-up run methods follow one another by chance
            before = [one for one in before if outermost(one.frame) is outermost(capture.frame)]
        if before and capture.sure and "one-of" not in capture.tags and not _reset_between(capture, before[-1], walk):
            yield Report(
                "nested-capture",
                capture.frame,
                capture.at,
                capture,
                {"why": "captures a second time into a graph object that already holds a capture,"},
            )


def _reset_between(capture: ev.Capture, before: ev.Capture, walk: Walk) -> bool:
    return any(
        event.name.endswith(".reset") and event.receiver is capture.graph and before.end < event.clock < capture.begin
        for event in walk.of(ev.CallEvent)
    )


def replay_in_capture(event: ev.ReplayEvent, walk: Walk) -> Iterator[Report]:
    """`g.replay()` while a capture is open."""
    if event.capture is not None and event.graph is not None and event.capture.kind in ("graph", "manual"):
        yield at(event, "nested-capture", why="replays a graph")
