"""Caches that drop what a graph reads."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, where
from graphlint.checks.memory import captured, inputs_of, memory_read, stale
from graphlint.flow import events as ev
from graphlint.flow.values import Items, Mapping, Scope, Storage, Tensor


def evicted_cache(walk: Walk) -> Iterator[Report]:
    """A cache drops a tensor that a graph reads."""
    for capture in captured(walk):
        touched = memory_read(capture, walk)
        yield from _bounded(capture, touched, walk)
        holders = {
            cell.holder: cell
            for cell, _ in inputs_of(capture, walk).items()
            if isinstance(cell.holder, (Mapping, Items))
        }
        for event in walk.of(ev.MutateEvent):
            if (
                event.name in ("pop", "popitem", "clear", "del", "popleft")
                and event.capture is None
                and event.clock > capture.end
                and event.holder in holders
            ):
                if isinstance(event.holder, Mapping) and stale(capture, event, walk):
                    report = at(event, "evicted-cache", capture, value=str(holders[event.holder].key))
                    yield report
                    break


def _bounded(capture: ev.Capture, touched: set[Storage], walk: Walk) -> Iterator[Report]:
    for storage in touched:
        if storage.owner != "lru":
            continue
        made = next(
            (
                event
                for event in walk.of(ev.CallEvent)
                if isinstance(event.result, Tensor) and event.result.storage is storage
            ),
            None,
        )
        kept = any(
            isinstance(event.new, Tensor) and event.new.storage is storage and not isinstance(event.cell.holder, Scope)
            for event in walk.of(ev.WriteEvent)
        )
        if made is None or kept or not (walk.replays(capture) or not walk.whole):
            continue
        others = {
            event.result.storage
            for event in walk.of(ev.CallEvent)
            if isinstance(event.result, Tensor) and event.result.storage.owner == "lru" and event.at == made.at
        }
        cleared = any(
            event.name == "functools.cache_clear" and event.clock > capture.end for event in walk.of(ev.CallEvent)
        )
        if len(others) > 1 or cleared:
            report = Report("evicted-cache", made.frame, made.at, capture, {"where": where(capture)})
            yield report
