"""Functions compiled with CUDA graphs that record again and again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from graphlint import ir
from graphlint.checks.base import Report, Walk, at, constant, within
from graphlint.checks.memory import memory_read
from graphlint.flow import events as ev
from graphlint.flow.values import External, Host, Items, Tensor, Unknown, Value, Wrapped, alternatives, tensors_in


def compiled_calls(walk: Walk) -> Iterator[tuple[ev.CallEvent, Wrapped]]:
    """The calls, outside captures, of functions compiled with CUDA graphs."""
    for event in walk.of(ev.CallEvent):
        if (
            event.name == "<compiled>.__call__"
            and event.capture is None
            and isinstance(event.receiver, Wrapped)
            and event.receiver.facts.get("graphs")
        ):
            yield event, event.receiver


def dynamic_recording(walk: Walk) -> Iterator[Report]:
    """A loop calls the function with a slice as long as the round counts: every length is another recording."""
    seen: set[int] = set()
    for event, func in compiled_calls(walk):
        if id(func) in seen or not _symbolic(func):
            continue
        for part in walk.of(ev.IndexEvent):
            if (
                part.clock > event.clock
                or part.frame is not event.frame
                or not within(part.at, event.at)
                or not isinstance(part.obj, (Tensor, Unknown))
            ):
                continue
            counted = next((one for one in _bounds(part.index) if _counts(one, event, walk)), None)
            if counted is not None:
                seen.add(id(func))
                yield at(
                    event,
                    "dynamic-recording",
                    func.facts.get("capture"),
                    why="gets a new shape in each round of the loop",
                )
                break


def many_sizes(walk: Walk) -> Iterator[Report]:
    """A loop hands the function tensors of ever other sizes: every size is another recording."""
    calls: dict[tuple[int, ir.Span], list[ev.CallEvent]] = {}
    for event, func in compiled_calls(walk):
        if _symbolic(func):
            calls.setdefault((id(func), event.at), []).append(event)
    for made in calls.values():
        columns: dict[int, set[tuple[int | None, ...]]] = {}
        for call in made:
            for index, arg in enumerate(call.args):
                sizes = {one.dims for one in alternatives(arg) if isinstance(one, Tensor) and one.dims is not None}
                columns.setdefault(index, set()).update(sizes)
        if any(_grows(sizes) for sizes in columns.values()) and not _sliced_here(made[0], walk):
            called = made[0].receiver
            capture = called.facts.get("capture") if isinstance(called, Wrapped) else None
            yield at(made[-1], "dynamic-recording", capture, why="gets a new shape in each round of the loop")


def _grows(sizes: set[tuple[int | None, ...]]) -> bool:
    """Whether one dimension took two sizes in the rounds that were walked, and others in those that were not."""
    return len({len(one) for one in sizes}) == 1 and any(
        None in column and len({one for one in column if one is not None}) > 1 for column in zip(*sizes, strict=True)
    )


def _sliced_here(call: ev.CallEvent, walk: Walk) -> bool:
    """Whether the sizes come from a slice in the call itself, which `dynamic_recording` looks at."""
    return any(
        part.frame is call.frame and within(part.at, call.at) and isinstance(part.obj, (Tensor, Unknown))
        for part in walk.of(ev.IndexEvent)
    )


def replaced_weights(walk: Walk) -> Iterator[Report]:
    """Between its calls, the function's weights get new memory again and again: for each address another recording."""
    for func, made in _by_function(walk):
        capture = func.facts.get("capture")
        if capture is None:
            continue
        touched = memory_read(capture, walk)
        moves: dict[ir.Span, list[ev.MoveEvent]] = {}
        for move in walk.of(ev.MoveEvent):
            if move.capture is None and move.clock > capture.end and touched & set(move.storages):
                moves.setdefault(move.at, []).append(move)
        for found in moves.values():
            between = [move for move in found if any(call.clock > move.clock for call in made)]
            rounds = {sum(call.clock < move.clock for call in made) for move in between}
            if len(rounds) > 1:
                report = at(
                    between[0],
                    "dynamic-recording",
                    capture,
                    why="gives what the function reads new memory each time",
                )
                yield report
                break


def _by_function(walk: Walk) -> list[tuple[Wrapped, list[ev.CallEvent]]]:
    calls: dict[int, tuple[Wrapped, list[ev.CallEvent]]] = {}
    for event, func in compiled_calls(walk):
        calls.setdefault(id(func), (func, []))[1].append(event)
    return list(calls.values())


def _symbolic(func: Wrapped) -> bool:
    """Whether sizes are symbolic: asked for, or made so by dynamo at the second size."""
    words = func.facts.get("keywords", {})
    return constant(words.get("dynamic")) is not False


def _bounds(index: Value) -> list[Host]:
    parts = index.values if isinstance(index, Items) else [index]
    return [
        one
        for part in parts
        if isinstance(part, External) and part.name == "slice"
        for bound in part.args
        for one in alternatives(bound)
        if isinstance(one, Host)
    ]


def _counts(bound: Host, call: ev.CallEvent, walk: Walk) -> bool:
    """Whether the bound is what a loop over `range` counts with, in the function of the call."""
    if "loop" in bound.marks:
        return True
    loops = [
        event
        for event in walk.of(ev.LoopEvent)
        if event.frame is call.frame
        and event.clock < call.clock
        and isinstance(event.value, External)
        and event.value.name == "range"
    ]
    counted = {
        constant(event.new)
        for event in walk.of(ev.WriteEvent)
        if event.frame is call.frame and event.how == "loop" and loops
    }
    return bound.known and bound.value in counted


def missing_step_mark(walk: Walk) -> Iterator[Report]:
    """A loop calls the function in gradient mode, and no backward and no step mark comes between two rounds: every call
    is one more node."""
    calls: dict[int, list[ev.CallEvent]] = {}
    for event, func in compiled_calls(walk):
        calls.setdefault(id(func), []).append(event)
    for made in calls.values():
        for first, second in itertools.pairwise(made):
            if (
                first.at != second.at
                or first.frame is not second.frame
                or constant(second.keywords.get("<grad>")) is not True
                or not _wants_gradient(second)
            ):
                continue
            if not _holds_on(first, second, walk) or _ends_step(first, second, walk) or _few_rounds(first, walk):
                continue
            yield at(
                second,
                "missing-step-mark",
                second.receiver.facts.get("capture") if isinstance(second.receiver, Wrapped) else None,
            )
            break


def _wants_gradient(call: ev.CallEvent) -> bool:
    return any(one.grad for one in tensors_in(call.result))


def _holds_on(first: ev.CallEvent, second: ev.CallEvent, walk: Walk) -> bool:
    """Whether something keeps the result, or a sum with it: a result that dies leaves no backward pending."""
    for event in walk.after(first.clock):
        if event.clock > second.clock:
            break
        if isinstance(event, ev.MutateEvent) and any(one.grad for value in event.values for one in tensors_in(value)):
            return True
        if (
            isinstance(event, ev.WriteEvent)
            and event.how == "augment"
            and any(one.grad for one in tensors_in(event.new))
        ):
            return True
        if (
            isinstance(event, ev.InplaceEvent)
            and event.name == "+="
            and event.source is not None
            and any(one.grad for one in tensors_in(event.source))
        ):
            return True
    return False


def _ends_step(first: ev.CallEvent, second: ev.CallEvent, walk: Walk) -> bool:
    """Whether a backward, or a mark, ends the step between the two calls."""
    for event in walk.of(ev.CallEvent):
        if first.clock < event.clock < second.clock and event.name.endswith(
            (".backward", "cudagraph_mark_step_begin", "autograd.grad")
        ):
            return True
    return False


def _few_rounds(call: ev.CallEvent, walk: Walk) -> bool:
    """Whether the loop is over two or three things that are written out: one path with several nodes, which replays."""
    loops = [event.value for event in walk.of(ev.LoopEvent) if event.frame is call.frame and event.clock < call.clock]
    if not loops:
        return True
    source = loops[-1]
    if isinstance(source, External) and source.name == "range":
        return all(isinstance(constant(one), int) and constant(one) <= 3 for one in source.args)  # type: ignore[operator]
    return isinstance(source, Items) and source.exact and len(source.slots) <= 3
