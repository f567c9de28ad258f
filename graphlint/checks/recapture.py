"""Graphs captured again and again, one for each size, and callables that capture by themselves."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, constant, where
from graphlint.checks.keys import asks_for_key, called_names, holds, statements
from graphlint.checks.memory import memory_read
from graphlint.flow import events as ev
from graphlint.flow import modules, names
from graphlint.flow.values import (
    External,
    Holder,
    Host,
    Items,
    Mapping,
    Scope,
    Storage,
    Value,
    alternatives,
    hosts_in,
    tensors_in,
)


def capture_in_loop(walk: Walk) -> Iterator[Report]:
    """One region captured anew in every round of a loop, over the same memory, with a replay between."""
    seen: set[tuple[int, tuple[int, int, int, int]]] = set()
    for index, second in enumerate(walk.captures):
        for first in walk.captures[:index]:
            if (
                first.at != second.at
                or first.frame.module is not second.frame.module
                or first.kind not in ("graph", "manual")
            ):
                continue
            spot = _loop_of(first, second)
            if spot is None:
                continue
            frame, span = spot
            key = (id(second.frame.module), second.at)
            replays = [event for event in walk.replays(first) if first.end < event.clock < second.begin]
            if (
                key in seen
                or not replays
                or _on_change(first, second, walk)
                or (frame is not first.frame and _handed_in(first))
                or _per_setting(first, frame, walk)
                or not _same_work(first, second, walk)
            ):
                continue
            kept = _kept(first, walk)
            if kept is None and not _pays_off(replays, walk):
                seen.add(key)
                at_fault = (
                    (frame, span) if any(event.frame is frame for event in replays) else (second.frame, second.at)
                )  # who captures only to replay once
                report = Report("capture-in-loop", *at_fault, second, {"where": where(second)})
                if at_fault[0] is not frame:
                    report.related.append((frame, span, "it is called from this loop"))
                yield report
            elif (
                isinstance(kept, ev.MutateEvent)
                and not _written_out(frame, first, walk)
                and not _shrinks(kept.holder, walk)
            ):
                seen.add(key)
                report = Report("unbounded-graphs", second.frame, second.at, second, {"value": "round of the loop"})
                report.related.append((kept.frame, kept.at, "the graph is kept here, and nothing lets go of it"))
                yield report


def _on_change(first: ev.Capture, second: ev.Capture, walk: Walk) -> bool:
    """Whether a test finds that a setting is another one, and only then a new graph is captured."""
    between = [event for event in walk.after(first.end) if event.clock < second.begin]
    written = {
        event.cell for event in between if isinstance(event, ev.WriteEvent) and not isinstance(event.cell.holder, Scope)
    }
    tests = (
        event
        for event in between
        if isinstance(event, ev.TestEvent)
        and event.how == "if"
        and any(event.frame is frame for frame, _, _ in second.stack)
    )
    return any(
        cell in written
        for event in tests
        for one in alternatives(event.value)
        if isinstance(one, Host) and "none" not in one.marks
        for cell in one.origins
    )


def _handed_in(capture: ev.Capture) -> bool:
    """Whether the region calls a parameter of the function around it: a helper that captures what it is given, other
    work each time."""
    function = capture.frame.func
    if function is None:
        return False
    params = {param.name for param in function.params}
    return any(stmt.at == capture.at and params & set(called_names(stmt)) for stmt in statements(function.body))


def _per_setting(capture: ev.Capture, frame: ev.Frame, walk: Walk) -> bool:
    """Whether the region takes a flag, a name or a size that the loop goes over: each is a graph of its own. (A number
    that could be a tensor is not.)"""
    looped = {event.cell for event in walk.of(ev.WriteEvent) if event.frame is frame and event.how == "loop"}
    return any(
        event.cell in looped
        and all(isinstance(one, Host) and one.kind in ("bool", "str", "int") for one in alternatives(event.value))
        for event in walk.of(ev.ReadEvent)
        if event.capture is capture
    )


def _written_out(frame: ev.Frame, capture: ev.Capture, walk: Walk) -> bool:
    """Whether the loop around is over a handful of things that are written out."""
    loops = [event.value for event in walk.of(ev.LoopEvent) if event.frame is frame and event.clock < capture.begin]
    source = loops[-1] if loops else None
    if isinstance(source, External) and source.name == "range":
        return _at_most(source, FEW)
    return isinstance(source, Items) and source.exact and len(source.slots) <= 8


def _shrinks(holder: Holder, walk: Walk) -> bool:
    """Whether something takes graphs out again, or asks how many there are."""
    for event in walk.events:
        if (
            isinstance(event, ev.MutateEvent)
            and event.holder is holder
            and event.name in ("pop", "popleft", "clear", "del", "remove")
        ):
            return True
        if isinstance(event, ev.CallEvent) and event.name == "builtins.len" and event.args and event.args[0] is holder:
            return True
        if isinstance(event, ev.WriteEvent) and event.old is holder and event.new is not holder:
            return True
    return False


def _pays_off(replays: list[ev.ReplayEvent], walk: Walk) -> bool:
    """Whether one capture is replayed in a loop of its own before the next, a benchmark or an epoch; not in a handful
    of rounds, which cost less than the capture."""
    lines = [(event.frame.module.path, event.at) for event in replays]
    if len(set(lines)) == len(lines):
        return False
    for replay in replays:
        loops = [
            event.value for event in walk.of(ev.LoopEvent) if event.frame is replay.frame and event.clock < replay.clock
        ]
        if not (loops and isinstance(loops[-1], External) and _at_most(loops[-1], FEW)):
            return True
    return False


FEW = 8  # replays that are no reason to capture


def _at_most(rounds: External, most: int) -> bool:
    ends = [constant(one) for one in rounds.args] if rounds.name == "range" else []
    return bool(ends) and all(isinstance(one, int) and one <= most for one in ends)


def _loop_of(first: ev.Capture, second: ev.Capture) -> tuple[ev.Frame, tuple[int, int, int, int]] | None:
    """The innermost frame with a loop in which both captures were begun from the same line."""
    for frame, span, loops in second.stack:
        if loops and any(one is frame and at_ == span for one, at_, _ in first.stack):
            return frame, span
    return None


def _kept(capture: ev.Capture, walk: Walk) -> ev.Event | None:
    """Where the graph, or what owns it, is put into a dict or list: one graph for each key is another pattern."""
    for event in walk.after(capture.end):
        if isinstance(event, ev.MutateEvent) and any(holds(value, capture) for value in event.values):
            return event
        if (
            isinstance(event, ev.WriteEvent)
            and isinstance(event.cell.holder, (Mapping, Items))
            and holds(event.new, capture)
        ):
            return event
    return None


def _same_work(first: ev.Capture, second: ev.Capture, walk: Walk) -> bool:
    """Both captures run the same lines on the same memory, or on data that came in at the same place."""
    old, new = memory_read(first, walk), memory_read(second, walk)
    called, again = _called(first, walk), _called(second, walk)
    strange = any(isinstance(event, ev.CallEvent) and event.name.startswith("?") for event in walk.inside(first))
    if called != again or not (old or called or strange) or _lines(first, walk) != _lines(second, walk):
        return False
    made = {storage.site: storage for storage in old - new if storage.born < first.begin}
    anew = {storage.site: storage for storage in new - old if storage.born < second.begin}
    return made.keys() == anew.keys() and all(_same_size(one, walk) for one in made.values())


def _called(capture: ev.Capture, walk: Walk) -> set[int]:
    """The modules that a capture runs."""
    return {
        id(event.receiver)
        for event in walk.inside(capture)
        if isinstance(event, ev.CallEvent) and event.receiver is not None and modules.is_module(event.receiver)
    }


def _same_size(storage: Storage, walk: Walk) -> bool:
    """Whether the tensor is not made for a size of its own: each size needs a graph of its own."""
    made = next(
        (event for event in walk.of(ev.CallEvent) if any(one.storage is storage for one in tensors_in(event.result))),
        None,
    )
    if made is None or made.name.rpartition(".")[2] not in names.FACTORIES | names.LIKE:
        return True
    sizes = [host for value in made.args for host in hosts_in(value)]
    return all(host.known and not host.marks - {"length"} and not host.origins for host in sizes)


def _lines(capture: ev.Capture, walk: Walk) -> set[tuple[str, int]]:
    """The lines that a capture runs: other ones are another graph."""
    return {(event.frame.module.path, event.at[0]) for event in walk.inside(capture)}


def unbounded_graphs(walk: Walk) -> Iterator[Report]:
    """A graph is kept for every size that comes: the key is a size as it is, and nothing drops old graphs."""
    stores: dict[tuple[str, int], list[tuple[ev.Capture, ev.WriteEvent, Value]]] = {}
    for capture in walk.captures:
        if capture.kind not in ("graph", "manual") or capture.graph is None:
            continue
        for event in walk.of(ev.WriteEvent):
            if (
                event.clock > capture.end
                and isinstance(event.cell.holder, Mapping)
                and event.capture is None
                and holds(event.new, capture)
            ):
                key = _key_value(event, walk)
                if key is not None and not _bounded(event.cell.holder, walk):
                    stores.setdefault((capture.frame.module.path, capture.at[0]), []).append((capture, event, key))
                break
    for kept in stores.values():
        if not _varying_size([key for _, _, key in kept]) or (walk.whole and len(kept) < 2):
            continue
        capture, event, _ = kept[0]
        if not walk.whole and not any(
            frame.func is not None and asks_for_key(frame.func, _name_of(event.cell.holder, walk))
            for frame, _, _ in capture.stack
        ):
            continue  # who calls it decides which sizes come; it may well round them
        report = Report("unbounded-graphs", capture.frame, capture.at, capture, {"value": "size"})
        report.related.append((event.frame, event.at, "the graph is kept here, one for each size"))
        yield report


def _name_of(holder: Holder, walk: Walk) -> str:
    """The attribute or name that the dict lies under."""
    return next((str(event.cell.key) for event in walk.of(ev.WriteEvent) if event.new is holder), "")


def _key_value(event: ev.WriteEvent, walk: Walk) -> Value | None:
    """The value of the key under which the slot was written."""
    store = next(
        (
            one
            for one in reversed(walk.of(ev.IndexEvent))
            if one.stored is not None
            and one.stored in alternatives(event.new)
            and one.clock <= event.clock
            and event.cell.holder in alternatives(one.obj)
            and one.at[0] == event.at[0]
        ),
        None,
    )
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
        raw = all(
            "shape" in one.marks and "computed" not in one.marks and one.kind in ("int", "size", "any")
            for one in column
        )
        if raw and (
            _of_several(column) if any(not one.known for one in column) else len({one.value for one in column}) > 1
        ):
            return True
    return False


def _of_several(column: list[Host]) -> bool:
    """Whether sizes that are not known are those of different tensors."""
    sources = [{mark for mark in one.marks if mark.startswith("of@")} for one in column]
    return not all(sources) or len(set().union(*sources)) > 1


def _bounded(holder: Mapping, walk: Walk) -> bool:
    """Whether something drops entries, or tests how many there are."""
    for event in walk.events:
        if (
            isinstance(event, ev.MutateEvent)
            and event.holder is holder
            and event.name in ("pop", "popitem", "clear", "del")
        ):
            return True
        if (
            isinstance(event, ev.CallEvent)
            and event.name == "builtins.len"
            and event.args
            and event.args[0] is holder
            and event.capture is None
        ):
            if any(
                one.frame is event.frame and one.at[0] <= event.at[0] <= one.at[2] and one.how in ("if", "while")
                for one in walk.of(ev.TestEvent)
            ):
                return True
    return False


# --- compiled with CUDA graphs ---------------------------------------------------------------------------------------


# --- make_graphed_callables ------------------------------------------------------------------------------------------
