"""Graphs captured again and again, one for each size, and callables that capture by themselves."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, place, where
from graphlint.checks.frozen import _holds
from graphlint.checks.memory import memory_read
from graphlint.flow import events as ev
from graphlint.flow import modules
from graphlint.flow.values import Closure, Host, Items, Mapping, Scope, Storage, Tensor, Value, Wrapped, alternatives, tensors_in


def capture_in_loop(walk: Walk) -> Iterator[Report]:
    """One region captured anew in every round of a loop, over the same memory, with a replay between."""
    seen: set[tuple[int, tuple[int, int, int, int]]] = set()
    for index, second in enumerate(walk.captures):
        for first in walk.captures[:index]:
            if first.at != second.at or first.frame.module is not second.frame.module or first.kind not in ("graph", "manual"):
                continue
            spot = _loop_of(first, second)
            if spot is None:
                continue
            frame, span = spot
            key = (id(frame.module), span)
            replayed = any(first.end < event.clock < second.begin for event in walk.replays(first))
            if key in seen or not replayed or _kept(first, walk) or not _same_work(first, second, walk):
                continue
            seen.add(key)
            yield Report("capture-in-loop", frame, span, second, {"where": where(second)})


def _loop_of(first: ev.Capture, second: ev.Capture) -> tuple[ev.Frame, tuple[int, int, int, int]] | None:
    """The innermost frame with a loop in which both captures were begun from the same line."""
    for frame, span, loops in second.stack:
        if loops and any(one is frame and at_ == span for one, at_, _ in first.stack):
            return frame, span
    return None


def _kept(capture: ev.Capture, walk: Walk) -> bool:
    """Whether the graph is put into a dict or list: one graph for each key is another pattern."""
    for event in walk.events:
        if isinstance(event, ev.MutateEvent) and event.clock > capture.end and any(_holds(value, capture) for value in event.values):
            return True
        if isinstance(event, ev.WriteEvent) and isinstance(event.cell.holder, (Mapping, Items)) and event.clock > capture.end and _holds(event.new, capture):
            return True
    return False


def _same_work(first: ev.Capture, second: ev.Capture, walk: Walk) -> bool:
    """Both captures touch memory from before the loop, and the same."""
    old = {storage for storage in memory_read(first, walk) if storage.born < first.begin}
    new = {storage for storage in memory_read(second, walk) if storage.born < first.begin}
    called = {id(event.receiver) for event in walk.inside(first) if isinstance(event, ev.CallEvent) and modules.is_module(event.receiver or Wrapped(Host(), ""))}
    again = {id(event.receiver) for event in walk.inside(second) if isinstance(event, ev.CallEvent) and modules.is_module(event.receiver or Wrapped(Host(), ""))}
    return old == new and called == again and bool(old or called)


def unbounded_graphs(walk: Walk) -> Iterator[Report]:
    """A graph is kept for every size that comes: the key is a size as it is, and nothing drops old graphs."""
    stores: dict[tuple[str, int], list[tuple[ev.Capture, ev.WriteEvent, Value]]] = {}
    for capture in walk.captures:
        if capture.kind not in ("graph", "manual") or capture.graph is None:
            continue
        for event in walk.of(ev.WriteEvent):
            if event.clock > capture.end and isinstance(event.cell.holder, Mapping) and event.capture is None and _holds(event.new, capture):
                key = _key_value(event, walk)
                if key is not None and not _bounded(event.cell.holder, walk):
                    stores.setdefault((capture.frame.module.path, capture.at[0]), []).append((capture, event, key))
                break
    for kept in stores.values():
        if not _varying_size([key for _, _, key in kept]) or walk.whole and len(kept) < 2:
            continue
        capture, event, _ = kept[0]
        report = Report("unbounded-graphs", capture.frame, capture.at, capture, {"value": "size"})
        report.related.append((event.frame, event.at, "the graph is kept here, one for each size"))
        yield report


def _key_value(event: ev.WriteEvent, walk: Walk) -> Value | None:
    """The value of the key under which the slot was written."""
    store = next((one for one in walk.of(ev.IndexEvent) if one.stored is event.new and event.cell.holder in alternatives(one.obj)), None)
    return store.index if store is not None else None


def _varying_size(keys: list[Value]) -> bool:
    """Whether a part of the key is a size as it came (not rounded to a bucket) and not always the same."""
    columns: dict[int, list[Host]] = {}
    for key in keys:
        for index, part in enumerate(key.values if isinstance(key, Items) else [key]):
            for one in alternatives(part):
                if isinstance(one, Host):
                    columns.setdefault(index, []).append(one)
    for column in columns.values():
        raw = all("shape" in one.marks and "computed" not in one.marks and one.kind in ("int", "size", "any") for one in column)
        if raw and (any(not one.known for one in column) or len({one.value for one in column}) > 1):
            return True
    return False


def _bounded(holder: Mapping, walk: Walk) -> bool:
    """Whether something drops entries, or tests how many there are."""
    for event in walk.events:
        if isinstance(event, ev.MutateEvent) and event.holder is holder and event.name in ("pop", "popitem", "clear", "del"):
            return True
        if isinstance(event, ev.CallEvent) and event.name == "builtins.len" and event.args and event.args[0] is holder and event.capture is None:
            if any(one.frame is event.frame and one.at[0] <= event.at[0] <= one.at[2] and one.how in ("if", "while") for one in walk.of(ev.TestEvent)):
                return True
    return False


# --- compiled with CUDA graphs ---------------------------------------------------------------------------------------


def overwritten_output(walk: Walk) -> Iterator[Report]:
    """The result of a compiled call is used after the next call of the same function."""
    calls: dict[int, list[ev.CallEvent]] = {}
    reported: set[int] = set()
    for event in walk.events:
        if isinstance(event, ev.CallEvent) and event.name == "<compiled>.__call__" and isinstance(event.receiver, Wrapped) and event.receiver.facts.get("graphs"):
            calls.setdefault(id(event.receiver), []).append(event)
        if event.capture is not None or not isinstance(event, (ev.CallEvent, ev.OpEvent, ev.MutateEvent)):
            continue
        values = list(event.operands) if isinstance(event, ev.OpEvent) else (list(event.values) if isinstance(event, ev.MutateEvent) else [*event.args, *event.keywords.values(), *([event.receiver] if event.receiver is not None else [])])
        for value in values:
            for one in tensors_in(value):
                yield from _overwritten(one.storage, one, event, calls, reported)


def _overwritten(storage: Storage, tensor: Tensor, event: ev.Event, calls: dict[int, list[ev.CallEvent]], reported: set[int]) -> Iterator[Report]:
    if storage.via is None or storage.via.kind != "compile":
        return
    for ident, made in calls.items():
        mine = next((call for call in made if any(one.storage is storage for one in tensors_in(call.result))), None)
        if mine is None or ident in reported:
            continue
        later = next((call for call in made if call.clock > mine.clock and call.clock < event.clock and call is not event), None)
        if later is None or tensor.grad and _trains(made):
            continue
        reported.add(ident)
        report = at(later, "overwritten-output", storage.via, why=f"its result of {place(mine.frame, mine.at)} is still read at {place(event.frame, event.at)}")
        report.related.append((mine.frame, mine.at, "the earlier result comes from here"))
        report.related.append((event.frame, event.at, "and is read here"))
        yield report


def _trains(calls: list[ev.CallEvent]) -> bool:
    return False


def skipped_cudagraph(walk: Walk) -> Iterator[Report]:
    """A function compiled with CUDA graphs that writes its inputs, or takes CPU tensors."""
    for event in walk.of(ev.CallEvent):
        if event.name != "<compiled>.__call__" or not isinstance(event.receiver, Wrapped) or not event.receiver.facts.get("graphs") or event.capture is not None:
            continue
        capture = event.receiver.facts.get("capture")
        given = {one.storage for value in (*event.args, *event.keywords.values()) for one in tensors_in(value) if one.storage.owner not in ("param", "buffer")}
        for write in walk.of(ev.InplaceEvent):
            if capture is not None and write.capture is capture and write.storage in given:
                report = at(write, "skipped-cudagraph", capture, why="is an input that the function writes", value="")
                yield report
                return


# --- make_graphed_callables ------------------------------------------------------------------------------------------


def closed_over_parameters(walk: Walk) -> Iterator[Report]:
    """A plain function is graphed whose module it reaches by closure: its parameters get no gradient."""
    for event in walk.of(ev.CallEvent):
        if event.name != "torch.cuda.make_graphed_callables" or not event.args or not isinstance(event.args[0], Closure):
            continue
        capture = next((one for one in walk.captures if one.at == event.at and one.kind == "graphed-callable" and one.frame is event.frame), None)
        if capture is None:
            continue
        trained = any(one.name.endswith(".backward") and one.clock > capture.end for one in walk.of(ev.CallEvent)) or not walk.whole
        inner = next((one for one in walk.inside(capture) if isinstance(one, ev.CallEvent) and one.name.startswith("torch.nn.") and one.name.endswith(".forward") and any(t.grad for t in tensors_in(one.result)) and not modules.is_plain(one.name[: -len(".forward")])), None)
        if inner is not None and trained and walk.whole:
            report = at(event, "closed-over-parameters", capture)
            report.related.append((inner.frame, inner.at, "its parameters are reached here"))
            yield report


def two_forwards(walk: Walk) -> Iterator[Report]:
    """A graphed callable runs twice before the backward of the first."""
    pending: dict[int, ev.CallEvent] = {}
    done: set[int] = set()
    suspects: dict[int, ev.CallEvent] = {}
    for event in walk.of(ev.CallEvent):
        if event.capture is not None:
            continue
        if event.name == "<graphed>.__call__":
            ident = id(event.receiver)
            if ident in pending and ident not in done:
                suspects.setdefault(ident, event)
            pending[ident] = event
        elif event.name.endswith(".backward"):
            for ident, second in suspects.items():
                done.add(ident)
                yield at(second, "two-forwards", _graphed_capture(second))
            suspects.clear()
            pending.clear()


def _graphed_capture(event: ev.CallEvent) -> ev.Capture | None:
    return event.receiver.facts.get("capture") if isinstance(event.receiver, Wrapped) else None


__all__ = ["Scope", "capture_in_loop", "closed_over_parameters", "overwritten_output", "skipped_cudagraph", "two_forwards", "unbounded_graphs"]
