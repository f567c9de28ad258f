"""Pinned host buffers: a copy that reads them later than the host writes them again."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, cell_name, given_true, place
from graphlint.checks.memory import captured, inputs_of
from graphlint.flow import events as ev
from graphlint.flow.values import Storage, Tensor, tensors_in

_WAITS = ("synchronize", "item", "tolist", "cpu", "numpy", "query", "wait", "result", "equal", "allclose", "save")


def early_host_write(walk: Walk) -> Iterator[Report]:
    """The host fills a pinned buffer again while a copy out of it, recorded or `non_blocking`, may not have run."""
    for capture in captured(walk):
        for storage, copy in _sources(capture, walk).items():
            report = _rewritten(storage, copy, capture, walk)
            if report is not None:
                yield report


def _sources(capture: ev.Capture, walk: Walk) -> dict[Storage, ev.CallEvent]:
    """Pinned memory that the region copies from, or that an eager `non_blocking` copy into one of its inputs does."""
    static = {tensor.storage for _, tensor in inputs_of(capture, walk).values()}
    found: dict[Storage, ev.CallEvent] = {}
    for event in walk.of(ev.CallEvent):
        if (
            event.capture not in (None, capture)
            or event.clock < capture.begin
            or event.name.rpartition(".")[2] not in ("copy_", "to", "cuda")
        ):
            continue
        copies = event.name.endswith("copy_")
        source = event.args[0] if copies and event.args else event.receiver
        target = event.receiver if copies else event.result
        into_static = (
            isinstance(target, Tensor) and target.storage in static and given_true(event.keywords.get("non_blocking"))
        )
        if isinstance(source, Tensor) and source.device == "pinned" and (event.capture is capture or into_static):
            found.setdefault(source.storage, event)
    return found


def _rewritten(storage: Storage, copy: ev.CallEvent, capture: ev.Capture, walk: Walk) -> Report | None:
    busy: ev.Event | None = None  # what reads the buffer, since the host waited last
    for event in walk.after(capture.end):
        if event.capture is not None:
            continue
        if isinstance(event, ev.CallEvent) and _waits(event):
            busy = None
        elif (isinstance(event, ev.ReplayEvent) and event.graph is capture.graph and copy.capture is capture) or (
            isinstance(event, ev.CallEvent)
            and copy.capture is None
            and event.at == copy.at
            and event.name == copy.name
            and any(one.storage is storage for one in _given(event))
        ):
            busy = event
        elif isinstance(event, ev.InplaceEvent) and event.storage is storage and busy is not None:
            cell = storage.cell
            report = at(
                event,
                "early-host-write",
                capture,
                value=cell_name(cell).lstrip(".") if cell is not None else "",
                where=place(copy.frame, copy.at),
            )
            report.related.append(
                (busy.frame, busy.at, "nothing has waited for this, which reads the buffer when the GPU gets there")
            )
            return report
    return None


def _given(event: ev.CallEvent) -> list[Tensor]:
    return [
        one
        for value in (*event.args, *([event.receiver] if event.receiver is not None else []))
        for one in tensors_in(value)
    ]


def _waits(event: ev.CallEvent) -> bool:
    """Whether the host waits here, or may."""
    last = event.name.rpartition(".")[2]
    if last not in _WAITS and not event.name.startswith("?"):
        return False
    return not (isinstance(event.receiver, Tensor) and event.receiver.on_host)
