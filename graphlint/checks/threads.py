"""Other threads: a capture in the global mode forbids what they do with the GPU as well."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, constant, given_true
from graphlint.flow import events as ev
from graphlint.flow.values import External, Instance, Tensor, Value, tensors_in

_READS = frozenset(
    {"torch.Tensor.pin_memory", "torch.Tensor.item", "torch.Tensor.cpu", "torch.Tensor.tolist", "torch.Tensor.numpy"}
)


def thread_in_capture(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """Another thread uses the GPU while a capture is open."""
    if capture.kind not in ("graph", "manual", "graphed-callable") or capture.mode == "?":
        return
    until = capture.end or walk.machine.clock
    for owner, started, events in sorted(walk.machine.threads, key=lambda one: not capture.begin < one[1] < until):
        inside = capture.begin < started < until
        if not inside and not (started < capture.begin and _alive(owner, capture, walk)):
            continue
        touch = next(
            (event for event in events if isinstance(event, ev.CallEvent) and _disturbs(event, capture.mode)), None
        )
        if touch is not None:
            start = next((event for event in walk.of(ev.CallEvent) if event.clock == started), None) if inside else None
            frame, span = (start.frame, start.at) if start is not None else (capture.frame, capture.at)
            report = Report("thread-in-capture", frame, span, capture, {"value": _thread_name(owner)})
            report.related.append((touch.frame, touch.at, "the thread uses the GPU here"))
            yield report
            return


def _alive(owner: Value, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the thread may still run when the capture begins; a pool's task is taken for done."""
    if isinstance(owner, External) and owner.name == "concurrent.futures.Future":
        return False
    joined = owner.facts.get("joined", 0) if isinstance(owner, External) else 0
    if isinstance(owner, Instance):
        joined = max(
            (
                event.clock
                for event in walk.of(ev.CallEvent)
                if event.receiver is owner and event.name.endswith(".join")
            ),
            default=0,
        )
    return not 0 < joined < capture.begin


def _thread_name(owner: Value) -> str:
    if isinstance(owner, Instance):
        return owner.cls.name
    return owner.name if isinstance(owner, External) else "threading.Thread"


def _disturbs(event: ev.CallEvent, mode: str) -> bool:
    """Whether the call kills a capture of this mode from another thread."""
    if event.name == "torch.cuda.synchronize":
        return True
    if mode != "global":
        return False
    if event.name in _READS:
        return not isinstance(event.receiver, Tensor) or event.name.endswith("pin_memory") or not event.receiver.on_host
    if given_true(event.keywords.get("pin_memory")) and event.name.startswith("torch."):
        return "utils.data" not in event.name
    return event.name.startswith("torch.") and any(one.device == "cuda" for one in tensors_in(event.result))


def loader_in_capture(capture: ev.Capture, walk: Walk) -> Iterator[Report]:
    """A capture in a loop over a `DataLoader` whose thread pins batches meanwhile."""
    if capture.kind not in ("graph", "manual", "graphed-callable") or capture.mode != "global":
        return
    for frame, _, loops in capture.stack:
        around = [event for event in walk.of(ev.LoopEvent) if event.frame is frame and event.clock < capture.begin]
        loader = _pinning(around[-1].value, walk) if loops and around else None
        if loader is not None:
            report = Report("thread-in-capture", capture.frame, capture.at, capture, {"value": "DataLoader"})
            report.related.append(
                (around[-1].frame, around[-1].at, "this loop keeps the thread that pins batches alive")
            )
            yield report
            return


def _pinning(source: Value, walk: Walk) -> External | None:
    """The loader with worker processes and a pinning thread that is looped over, also through `enumerate`."""
    if not isinstance(source, External):
        call = next(
            (one for one in walk.of(ev.CallEvent) if one.name == "builtins.enumerate" and one.result is source), None
        )
        source = call.args[0] if call is not None and call.args else source
    if not isinstance(source, External) or source.name != "torch.utils.data.DataLoader":
        return None
    workers = constant(source.keywords.get("num_workers"))
    return (
        source if given_true(source.keywords.get("pin_memory")) and isinstance(workers, int) and workers > 0 else None
    )
