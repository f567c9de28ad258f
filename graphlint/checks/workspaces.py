"""cuBLAS workspaces: memory that a graph uses and no name holds."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, constant, replayed_after
from graphlint.checks.memory import captured
from graphlint.checks.recordings import compiled_calls
from graphlint.checks.warmup import needs
from graphlint.flow import events as ev


def cleared_workspace(walk: Walk) -> Iterator[Report]:
    """A compiled function records between a capture and its replays, and frees the workspace that the capture's stream
    had before."""
    for capture in captured(walk):
        if not walk.whole or capture.kind == "graphed-callable" or not _products(walk.inside(capture), walk):
            continue
        if not _warmed_on_stream(capture, walk):
            continue  # the workspace was made inside, in the graph's own pool
        for call, _ in compiled_calls(walk):
            first = constant(call.keywords.get("<first>")) is True
            if first and call.clock > capture.end and replayed_after(capture, call.clock, walk):
                report = at(call, "cleared-workspace", capture)
                report.related.append((capture.frame, capture.at, "captured on a stream that had a workspace already"))
                yield report
                break


def _warmed_on_stream(capture: ev.Capture, walk: Walk) -> bool:
    """Whether matrix products ran on the very stream before it was captured."""
    current: list[object] = []
    for event in walk.events:
        if event.clock >= capture.begin:
            return False
        if isinstance(event, ev.StreamEvent):
            if event.how == "enter":
                current.append(event.stream)
            elif current:
                current.pop()
        elif current and current[-1] is capture.stream and event.capture is None and _products([event], walk):
            return True
    return False


def _products(events: list[ev.Event], walk: Walk) -> bool:
    return any("cuBLAS" in needs(event, walk)[0] for event in events)
