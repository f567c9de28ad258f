"""Warm-up: what sets itself up at its first use, and what a warm-up on the wrong stream leaves behind."""

from __future__ import annotations

import re
from collections.abc import Iterator

from graphlint import ir
from graphlint.checks.base import Report, Walk, at, constant
from graphlint.checks.calls import fact_of
from graphlint.flow import events as ev
from graphlint.flow.values import External, Wrapped, tensors_in

_LIBRARY = re.compile(r"cu[A-Z]+|attention|kernels")
# modules that do matrix products, too
_PRODUCTS = ("torch.nn.MultiheadAttention", "torch.nn.Transformer")
BACKWARD = frozenset({"torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad"})
DDP = "torch.nn.parallel.DistributedDataParallel"


def needs(event: ev.Event, walk: Walk) -> tuple[set[str], str]:
    """The libraries that this work sets up at its first call, and the words for the first of them."""
    if isinstance(event, ev.OpEvent):
        return (
            ({"cuBLAS"}, "makes its cuBLAS handle and workspace at the first call") if event.op == "@" else (set(), "")
        )
    fact = fact_of(event, walk, "no-warmup") if isinstance(event, ev.CallEvent) else None
    found = _LIBRARY.search(fact.why) if fact is not None else None
    if fact is None or found is None:
        return set(), ""
    return {found.group(), *(["cuBLAS"] if fact.name.startswith(_PRODUCTS) else [])}, fact.why


def no_warmup(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """A library is used for the first time inside the capture."""
    if not walk.whole or capture.kind not in ("graph", "manual") or not capture.sure:
        return
    before = [
        event
        for event in walk.events
        if event.clock < capture.begin and not (event.capture is not None and event.capture.kind == "wrapper")
    ]
    if any(isinstance(event, ev.CallEvent) and event.name.startswith("?") for event in before):
        return  # something ran that nobody knows
    seen = {library for event in before if _on_gpu(event) for library in needs(event, walk)[0]}
    for event in walk.inside(capture):
        libraries, why = needs(event, walk)
        if libraries and not libraries & seen and _on_gpu(event) and event.sure:
            frame, span = _seen_from(event, capture)
            report = Report("no-warmup", frame, span, capture, {"why": why})
            if frame is not event.frame:
                report.related.append((event.frame, event.at, "the first use is here"))
            yield report
            return  # the warm-up that it asks for sets up the others as well


def _on_gpu(event: ev.Event) -> bool:
    result = event.result if isinstance(event, (ev.CallEvent, ev.OpEvent)) else None
    return result is not None and any(not one.on_host for one in tensors_in(result))


def first_compiled_call(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """A compiled function is called for the first time inside the capture, so it is compiled there."""
    if event.name == "<compiled>.__call__" and walk.whole and constant(event.keywords.get("<first>")) is True:
        if (
            event.capture is not None
            and event.capture.kind in ("graph", "manual")
            and isinstance(event.receiver, Wrapped)
        ):
            yield at(event, "first-compiled-call")


def short_warmup(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """DDP gathers statistics in its first ten iterations: eleven must run before the capture."""
    if not walk.whole or capture.kind not in ("graph", "manual"):
        return
    wrapped = [event for event in walk.of(ev.CallEvent) if event.name == DDP and event.clock < capture.begin]
    if not wrapped:
        return
    for event in walk.of(ev.CallEvent):
        if (
            event.name == "builtins.range"
            and event.clock < capture.begin
            and event.frame is capture.frame
            and event.args
        ):
            rounds = constant(event.args[-1])
            if isinstance(rounds, int) and not isinstance(rounds, bool) and rounds < 11:
                yield Report("short-warmup", event.frame, event.at, capture, {"value": str(rounds)})
                return


# --- the stream of the warm-up ---------------------------------------------------------------------------------------


def default_stream_warmup(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """Autograd ran on the default stream over what the capture goes backward through, and its graph is still alive."""
    if not walk.whole or not _goes_backward(capture, walk):
        return
    before = _on_default_stream(walk, capture)
    wrapped = (
        next((event for event in before if isinstance(event, ev.CallEvent) and event.name == DDP), None)
        if capture.kind != "graphed-callable"
        else None
    )
    found: ev.CallEvent | ev.OpEvent | None = wrapped
    if found is None and capture.alive:
        learned = set().union(*(_learns(event) for event in walk.inside(capture)))
        begun = next((event.clock for event in before if _records(event) and _learns(event) & learned), None)
        kept = [
            event
            for event in before
            if begun is not None
            and event.clock >= begun
            and event.sure
            and _records(event)
            and any(one.storage in capture.alive for one in tensors_in(event.result))
        ]
        found = kept[-1] if kept else None
    if found is not None:
        frame, span = _seen_from(found, capture)
        report = Report("default-stream-warmup", frame, span, capture)
        report.related.append((capture.frame, capture.at, "a backward is captured here"))
        yield report


def _goes_backward(capture: ev.Capture, walk: Walk) -> bool:
    if capture.kind == "graphed-callable":
        return capture.backward
    return capture.kind in ("graph", "manual") and any(
        isinstance(event, ev.CallEvent) and event.name in BACKWARD for event in walk.inside(capture)
    )


def _learns(event: ev.Event) -> set[int]:
    """What asks for gradients in this piece of work: modules of torch with parameters, leaf tensors."""
    if not isinstance(event, (ev.CallEvent, ev.OpEvent)):
        return set()
    given = (
        event.operands
        if isinstance(event, ev.OpEvent)
        else (*event.args, *event.keywords.values(), *([event.receiver] if event.receiver is not None else []))
    )
    found = {
        id(one.storage)
        for value in given
        for one in tensors_in(value)
        if one.grad and (one.leaf or one.storage.owner == "param")
    }
    if (
        isinstance(event, ev.CallEvent)
        and isinstance(event.receiver, External)
        and event.name.endswith(".forward")
        and _records(event)
    ):
        found.add(id(event.receiver))
    return found


def _records(event: ev.CallEvent | ev.OpEvent) -> bool:
    """Whether an autograd graph hangs on what it gave back."""
    return any(one.grad and not one.leaf for one in tensors_in(event.result))


def _on_default_stream(walk: Walk, capture: ev.Capture) -> list[ev.CallEvent | ev.OpEvent]:
    """Work before the capture, while the default stream was current."""
    streams: list[bool] = []  # of each stream entered: is it the default one?
    found: list[ev.CallEvent | ev.OpEvent] = []
    for event in walk.events:
        if event.clock > capture.begin:
            break
        if isinstance(event, ev.StreamEvent):
            if event.how == "enter":
                streams.append(_is_default(event.stream))
            elif streams:
                streams.pop()
        elif isinstance(event, (ev.CallEvent, ev.OpEvent)) and event.capture is None:
            if (
                isinstance(event, ev.CallEvent)
                and event.name == "torch.cuda.set_stream"
                and not (event.args and _is_default(event.args[0]))
            ):
                return []  # another stream from here on, and nobody knows until when
            if not streams or streams[-1]:
                found.append(event)
    return found


def _is_default(stream: object) -> bool:
    return isinstance(stream, External) and bool(stream.facts.get("default"))


def _seen_from(event: ev.Event, capture: ev.Capture) -> tuple[ev.Frame, ir.Span]:
    """The place of an event in the innermost function that it shares with the capture."""
    around = {id(frame) for frame, _, _ in capture.stack}
    frame, span = event.frame, event.at
    while id(frame) not in around and frame.parent is not None and frame.call_at is not None:
        span, frame = frame.call_at, frame.parent
    return frame, span
