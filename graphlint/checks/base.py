"""What every check works with: a finished walk, and the `Report` it yields."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow.machine import Machine
from graphlint.flow.values import (
    Bound,
    Cell,
    Closure,
    External,
    Holder,
    Host,
    Instance,
    Items,
    Mapping,
    Scope,
    Storage,
    Tensor,
    Unknown,
    Value,
    alternatives,
)
from graphlint.link import names_in

E = TypeVar("E", bound=ev.Event)

# kinds of capture in which Python runs as it stands; a compiled region has dynamo between Python and the capture
DIRECT = frozenset({"graph", "manual", "graphed-callable", "capture-safe", "warp", "wrapper", "other-backend"})


@dataclass(slots=True)
class Report:
    """What a check found: the rule's name, where, in which capture, and the words for the rule's message.

    `words` fill the message's fields (`{why}`, `{value}`, `{call}`, `{where}`); a field that is not given is the source
    text at `at`. `related`
    are second places with a reason: (frame, span, reason).
    """

    rule: str
    frame: ev.Frame
    at: ir.Span
    capture: ev.Capture | None
    words: dict[str, str] = field(default_factory=dict)
    related: list[tuple[ev.Frame, ir.Span, str]] = field(default_factory=list)
    help: str = ""


def at(event: ev.Event, rule: str, capture: ev.Capture | None = None, **words: str) -> Report:
    """A report at an event, in the capture it happened in."""
    return Report(rule, event.frame, event.at, capture or event.capture, words)


class Walk:
    """A finished walk, indexed for the checks."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.events = machine.events
        self.captures = machine.captures
        self.whole = machine.whole
        self.target = machine.target
        self.lengths: frozenset[int] | None = None  # reads that end as attention lengths, once asked for
        self._by_type: dict[type[ev.Event], list[ev.Event]] = {}
        self._inside: dict[int, list[ev.Event]] = {}
        self._replays: dict[int, list[ev.ReplayEvent]] = {}
        for event in self.events:
            self._by_type.setdefault(type(event), []).append(event)
            if event.capture is not None:
                self._inside.setdefault(event.capture.begin, []).append(event)

    def names_in(self, func: ir.Function) -> frozenset[str]:
        """Every name that the body of a function mentions."""
        shared, key = self.machine.project.shared, ("names", id(func))
        if key not in shared:
            shared[key] = frozenset(names_in(func.body))
        found: frozenset[str] = shared[key]
        return found

    def after(self, clock: int) -> Iterator[ev.Event]:
        """All events behind that moment, in order."""
        for index in range(bisect.bisect_right(self.events, clock, key=lambda event: event.clock), len(self.events)):
            yield self.events[index]

    def of(self, kind: type[E]) -> list[E]:
        """All events of one kind, in order."""
        return self._by_type.get(kind, [])  # type: ignore[return-value]

    def direct(self, kind: type[E]) -> Iterator[E]:
        """The events of one kind that happened in a capture in which Python runs as it stands."""
        for event in self.of(kind):
            if event.capture is not None and event.capture.kind in DIRECT:
                yield event

    def inside(self, capture: ev.Capture) -> list[ev.Event]:
        """All events of one capture."""
        return self._inside.get(capture.begin, [])

    def replays(self, capture: ev.Capture) -> list[ev.ReplayEvent]:
        """The replays that run this capture: those of its graph after its end and before the graph is captured anew."""
        known = self._replays.get(capture.begin)
        if known is None:
            later = [
                one.begin
                for one in self.captures
                if one is not capture
                and one.graph is capture.graph
                and one.begin > capture.begin
                and capture.graph is not None
            ]
            until = min(later, default=1 << 60)
            known = [
                event
                for event in self.of(ev.ReplayEvent)
                if event.graph is not None and event.graph is capture.graph and capture.end < event.clock < until
            ]
            self._replays[capture.begin] = known
        return known

    def kept(self, capture: ev.Capture) -> bool:
        """Whether something that outlives the capturing function holds its graph: an attribute, a list, a closure, the
        caller."""
        return any(
            _holds_graph(event, capture)
            for event in self.events
            if event.clock > capture.begin or isinstance(event, ev.WriteEvent)
        )


def _holds_graph(event: ev.Event, capture: ev.Capture) -> bool:
    if isinstance(event, ev.WriteEvent):
        lasting = not isinstance(event.cell.holder, Scope) or event.cell.holder.outer is None
        return lasting and reaches(event.new, capture.graph)
    if isinstance(event, ev.MutateEvent):
        return any(reaches(value, capture.graph) for value in event.values)
    return isinstance(event, ev.ReturnEvent) and reaches(event.value, capture.graph)


def reaches(value: Value, graph: Holder | None, depth: int = 3) -> bool:
    """Whether the value is the graph, or a container, an object or a function that holds it."""
    for one in alternatives(value):
        if one is graph:
            return True
        if depth and isinstance(one, Bound) and reaches(one.receiver, graph, depth - 1):
            return True
        if depth and isinstance(one, Closure) and any(reaches(inner, graph, 0) for inner in one.scope.slots.values()):
            return True
        if (
            depth
            and isinstance(one, (Items, Mapping, Instance, External))
            and any(reaches(inner, graph, depth - 1) for inner in list(one.slots.values()))
        ):
            return True
    return False


# --- asking values ---------------------------------------------------------------------------------------------------


def on_device(value: Value) -> Tensor | None:
    """The tensor it is or may be, unless that is known to lie on the host; only where something shows that it is a
    tensor."""
    for one in alternatives(value):
        if isinstance(one, Tensor) and one.sure and one.device in ("cuda", "?"):
            return one
    return None


def surely_on_device(value: Value) -> Tensor | None:
    """The tensor it is, when it is known to lie on the device."""
    for one in alternatives(value):
        if isinstance(one, Tensor) and one.device == "cuda":
            return one
    return None


def on_host(value: Value | None) -> bool:
    """Whether it is a tensor known to lie on the host."""
    return value is not None and all(isinstance(one, Tensor) and one.on_host for one in alternatives(value))


def unknown(value: Value) -> bool:
    return all(
        isinstance(one, Unknown) or (isinstance(one, Bound) and isinstance(one.receiver, Unknown))
        for one in alternatives(value)
    )


def constant(value: Value | None) -> object:
    """The constant it is, or None."""
    return value.value if isinstance(value, Host) and value.known else None


def is_none(value: Value | None) -> bool:
    """Whether it is known to be None."""
    return isinstance(value, Host) and value.kind == "none"


def given_true(value: Value | None) -> bool:
    return constant(value) is True


def of_class(value: Value | None, *names: str) -> External | Instance | None:
    """The object it is, if its class or a base of it outside the project is one of `names`."""
    for one in alternatives(value) if value is not None else ():
        if isinstance(one, External) and one.name in names:
            return one
        if isinstance(one, Instance) and one.cls.is_a(*names):
            return one
    return None


def place(frame: ev.Frame, span: ir.Span) -> str:
    """`file.py:12`, for messages."""
    return f"{frame.module.path.rpartition('/')[2]}:{span[0]}"


def where(capture: ev.Capture) -> str:
    return place(capture.frame, capture.at)


def cell_name(cell: Cell) -> str:
    """How a reader would call the cell: `self.scale`, `temperature`, `group['lr']`."""
    if isinstance(cell.holder, Scope):
        return str(cell.key)
    return (
        f".{cell.key}"
        if isinstance(cell.holder, (Instance, External)) and isinstance(cell.key, str)
        else f"[{cell.key!r}]"
    )


def inplace_after(storage: Storage, capture: ev.Capture, walk: Walk) -> ev.InplaceEvent | None:
    """A write outside into this memory, between the capture and its last replay."""
    last = max((event.clock for event in walk.replays(capture)), default=0)
    return next(
        (
            event
            for event in walk.of(ev.InplaceEvent)
            if event.storage is storage and event.capture is None and capture.end < event.clock < last
        ),
        None,
    )


def replayed_after(capture: ev.Capture, clock: int, walk: Walk) -> ev.ReplayEvent | None:
    """The first replay of this capture behind that moment."""
    return next((event for event in walk.replays(capture) if event.clock > clock), None)


def operands(event: ev.Event) -> list[Value]:
    """What a call or an operator takes: receiver, arguments, keywords; nothing for other events."""
    if isinstance(event, ev.OpEvent):
        return list(event.operands)
    if isinstance(event, ev.CallEvent):
        return [*event.args, *event.keywords.values(), *([event.receiver] if event.receiver is not None else [])]
    return []


def within(inner: ir.Span, outer: ir.Span) -> bool:
    """Whether one span lies in the other."""
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]


def storages(values: Iterable[Value]) -> set[Storage]:
    from graphlint.flow.values import tensors_in

    return {one.storage for value in values for one in tensors_in(value)}


__all__ = [
    "DIRECT",
    "Holder",
    "Report",
    "Walk",
    "at",
    "cell_name",
    "constant",
    "given_true",
    "inplace_after",
    "is_none",
    "of_class",
    "on_device",
    "on_host",
    "operands",
    "place",
    "replayed_after",
    "storages",
    "surely_on_device",
    "unknown",
    "where",
    "within",
]
