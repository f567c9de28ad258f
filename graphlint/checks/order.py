"""The order of streams: a replay, what it reads and what it leaves, on streams that do not wait for one another.

One pass over the walk keeps, for each stream, up to which moment of every other stream it has waited (`wait_stream`,
events, what the host waited for). A piece of work is ordered behind another when its stream has waited for that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from graphlint.checks.base import Report, Walk, at, place
from graphlint.flow import events as ev
from graphlint.flow import names
from graphlint.flow.values import External, Storage, Tensor, Value, alternatives, tensors_in

Stream = int  # the identity of a stream; 0 is the default stream, -1 one that is not known
DEFAULT: Stream = 0
UNKNOWN_STREAM: Stream = -1
# the host waits for the stream that it reads from
_HOST_READS = frozenset(
    {
        "torch.Tensor.item",
        "torch.Tensor.tolist",
        "torch.Tensor.cpu",
        "torch.Tensor.numpy",
        "builtins.int",
        "builtins.float",
        "builtins.bool",
        "builtins.print",
    }
)
_NO_WORK = names.HOST_METHODS | names.VIEWS | names.MANY_VIEWS | {"record_stream"}


def stream_of(value: Value | None) -> Stream:
    """Which stream a value is."""
    if value is None:
        return DEFAULT
    found = alternatives(value)
    if len(found) != 1 or not isinstance(found[0], External) or not found[0].name.startswith("torch."):
        return UNKNOWN_STREAM
    return DEFAULT if found[0].facts.get("default") else id(found[0])


class Order:
    """Who has waited for whom, up to which clock."""

    def __init__(self) -> None:
        self.current: list[Stream] = []
        self.waited: dict[tuple[Stream, Stream], int] = {}  # (who, for whom) -> up to which clock
        self.host: dict[Stream, int] = {}  # what the host has waited for, and with it everything later
        self.all = 0
        self.marks: dict[int, tuple[Stream, int]] = {}  # event object -> stream and clock of its last record

    @property
    def here(self) -> Stream:
        return self.current[-1] if self.current else DEFAULT

    def settled(self, reader: Stream, writer: Stream, clock: int) -> bool:
        """Whether work that is given to `reader` now runs behind what `writer` was given at `clock`."""
        if reader == writer or UNKNOWN_STREAM in (reader, writer):
            return True
        return max(self.all, self.host.get(writer, 0), self.waited.get((reader, writer), 0)) >= clock

    def wait(self, who: Stream, whom: Stream, clock: int) -> None:
        """`who` waits for what `whom` was given up to `clock`, and for what that had waited for."""
        if UNKNOWN_STREAM in (who, whom):
            self.all = clock
            return
        self.waited[who, whom] = max(clock, self.waited.get((who, whom), 0))
        for (other, third), until in list(self.waited.items()):
            if other == whom and third != who:
                self.waited[who, third] = max(until, self.waited.get((who, third), 0))

    def see(self, event: ev.Event) -> None:
        """Follows what the event says of streams."""
        if isinstance(event, ev.StreamEvent):
            if event.how == "enter":
                self.current.append(stream_of(event.stream))
            elif self.current:
                self.current.pop()
        elif isinstance(event, ev.CallEvent):
            self._call(event)

    def _call(self, event: ev.CallEvent) -> None:
        name, first = event.name, event.args[0] if event.args else None
        if name == "torch.cuda.set_stream":
            self.current[-1:] = [stream_of(first)]
        elif name.endswith(".synchronize") and name.startswith(("torch.cuda.Stream", "torch.cuda.Event")):
            stream, clock = (
                (stream_of(event.receiver), event.clock)
                if "Stream" in name
                else self.marks.get(id(event.receiver), (UNKNOWN_STREAM, event.clock))
            )
            self._host_waits(stream, clock, event.clock)
        elif name.endswith(".synchronize"):
            self.all = event.clock
        elif name in _HOST_READS and tensors_in(event.receiver or first or event.result):
            self._host_waits(self.here, event.clock, event.clock)
        elif name == "torch.cuda.Stream.wait_stream":
            self.wait(stream_of(event.receiver), stream_of(first), event.clock)
        elif name in ("torch.cuda.Stream.wait_event", "torch.cuda.Event.wait"):
            mark, who = (
                (first, stream_of(event.receiver))
                if name.endswith("wait_event")
                else (event.receiver, stream_of(first) if first is not None else self.here)
            )
            whom, clock = self.marks.get(id(mark), (UNKNOWN_STREAM, event.clock))
            self.wait(who, whom, clock if whom != UNKNOWN_STREAM else event.clock)
        elif name == "torch.cuda.Event.record":
            self.marks[id(event.receiver)] = (stream_of(first) if first is not None else self.here, event.clock)
        elif name == "torch.cuda.Stream.record_event":
            self.marks[id(first if first is not None else event.result)] = (stream_of(event.receiver), event.clock)

    def _host_waits(self, stream: Stream, until: int, now: int) -> None:
        if stream == UNKNOWN_STREAM:
            self.all = now
            return
        self.host[stream] = max(until, self.host.get(stream, 0))
        for (who, whom), clock in self.waited.items():
            if who == stream:
                self.host[whom] = max(clock, self.host.get(whom, 0))


@dataclass
class _Use:
    """What a capture does with memory: what it reads that was there before, what it leaves written."""

    reads: set[Storage] = field(default_factory=set)
    leaves: set[Storage] = field(default_factory=set)


def _use(capture: ev.Capture, walk: Walk) -> _Use:
    use = _Use()
    for event in walk.inside(capture):
        if isinstance(event, ev.InplaceEvent):
            use.leaves.add(event.storage)
        for one in _given(event):
            if one.storage.pool is not capture:
                use.reads.add(one.storage)
    return use


def _given(event: ev.Event) -> list[Tensor]:
    """The tensors that a piece of work on the GPU is given."""
    if isinstance(event, ev.OpEvent):
        return [one for value in event.operands for one in tensors_in(value)]
    if (
        isinstance(event, ev.CallEvent)
        and event.name.startswith("torch.")
        and event.name.rpartition(".")[2] not in _NO_WORK
    ):
        values = (*event.args, *event.keywords.values(), *([event.receiver] if event.receiver is not None else []))
        return [one for value in values for one in tensors_in(value)]
    return []


def unordered_replay(walk: Walk) -> Iterator[Report]:
    """Streams that do not wait: a result read too early, an input written while, or after, it is read."""
    if not walk.of(ev.ReplayEvent) or not walk.of(ev.StreamEvent):
        return
    order = Order()
    replays: dict[int, tuple[ev.ReplayEvent, Stream, ev.Capture, _Use]] = {}
    fills: dict[Storage, tuple[ev.InplaceEvent, Stream]] = {}
    uses: dict[int, _Use] = {}
    aside = {id(event) for _, _, events in walk.machine.threads for event in events}
    for event in walk.events:
        if event.capture is not None or id(event) in aside:
            continue
        order.see(event)
        if isinstance(event, ev.ReplayEvent):
            capture = next(
                (
                    one
                    for one in reversed(walk.captures)
                    if one.graph is event.graph and event.graph is not None and 0 < one.end < event.clock
                ),
                None,
            )
            if capture is not None:
                use = uses.setdefault(capture.begin, _use(capture, walk))
                yield from _too_early(event, order, use, fills, capture, walk)
                replays[id(event.graph)] = (event, order.here, capture, use)
        elif isinstance(event, ev.InplaceEvent):
            fills[event.storage] = (event, order.here)
            yield from _behind_replay(event, [event.storage], "written", order, replays, walk)
        elif isinstance(event, (ev.CallEvent, ev.OpEvent)):
            yield from _behind_replay(event, [one.storage for one in _given(event)], "read", order, replays, walk)


def _behind_replay(
    event: ev.Event,
    touched: list[Storage],
    how: str,
    order: Order,
    replays: dict[int, tuple[ev.ReplayEvent, Stream, ev.Capture, _Use]],
    walk: Walk,
) -> Iterator[Report]:
    """Memory of a graph is touched on a stream that does not wait for the replay."""
    for key, (replay, stream, capture, use) in list(replays.items()):
        if order.settled(order.here, stream, replay.clock) or not one_flow(replay, event, walk):
            continue
        memory = [
            one
            for one in touched
            if one.pool is capture or one in use.leaves or (how == "written" and one in use.reads)
        ]
        if memory:
            del replays[key]
            result = "its result is read" if how == "read" else "what it works on is written"
            report = at(
                replay,
                "unordered-replay",
                capture,
                why=f"{result} on a stream that does not wait for it",
                where=place(event.frame, event.at),
            )
            report.related.append((event.frame, event.at, f"{result} here, without waiting"))
            yield report
            return


def _too_early(
    event: ev.ReplayEvent,
    order: Order,
    use: _Use,
    fills: dict[Storage, tuple[ev.InplaceEvent, Stream]],
    capture: ev.Capture,
    walk: Walk,
) -> Iterator[Report]:
    """The replay does not wait for the stream that fills one of its inputs."""
    for storage in use.reads & set(fills):
        fill, stream = fills[storage]
        if (
            fill.clock > capture.end
            and not order.settled(order.here, stream, fill.clock)
            and one_flow(fill, event, walk)
        ):
            del fills[storage]
            value = storage.text or "a static input"
            report = at(
                fill,
                "late-refill",
                capture,
                value=value,
                why="on a stream that the replay does not wait for",
                where=place(event.frame, event.at),
            )
            report.related.append((event.frame, event.at, "the replay, which may run first"))
            yield report
            return


def one_flow(one: ev.Event, other: ev.Event, walk: Walk) -> bool:
    """Whether one event follows the other in a run that the walk has seen: in a made-up run only within one method."""
    return walk.whole or outermost(one.frame) is outermost(other.frame)


def outermost(frame: ev.Frame) -> ev.Frame:
    """The frame of the function that a walk began with, or of the module's top level."""
    while frame.parent is not None and frame.parent.parent is not None:
        frame = frame.parent
    return frame
