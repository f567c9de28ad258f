"""Streams, events and graphs that are played on the CPU: they keep the order of work and replay what was recorded,
but run nothing elsewhere."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from graphlint.runtime.dryrun.roles import generator_identity
from graphlint.runtime.dryrun.session import Region, Session
from graphlint.runtime.dryrun.streams import Mark
from graphlint.runtime.dryrun.tape import Freed

_pools = itertools.count(1)


def pool_handle() -> tuple[int, int]:
    """Plays `torch.cuda.graph_pool_handle`: a token that is never given out twice."""
    return (0, next(_pools))


class Played:
    """Makes the stand-in classes of one session; `torch.cuda.Stream` and its kin are replaced by them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.Stream = _bound(StreamStandIn, session)
        self.Event = _bound(EventStandIn, session)
        self.CUDAGraph = _bound(GraphStandIn, session)
        self.default = self.Stream.__new__(self.Stream)
        self.default._number = 0

    def current_stream(self, device: object = None) -> Any:
        """The stream that work goes to now."""
        number = self.session.streams.current
        if number == 0:
            return self.default
        stream = self.Stream.__new__(self.Stream)
        stream._number = number
        return stream

    def default_stream(self, device: object = None) -> Any:
        """Stream 0."""
        return self.default


def _bound(base: type, session: Session) -> Any:
    """A subclass of the stand-in that knows its session: users subclass and construct it as they do torch's own."""
    return type(base.__name__.replace("StandIn", ""), (base,), {"_session": session})


class StreamStandIn:
    """Plays `torch.cuda.Stream`."""

    _session: Session
    device = torch.device("cuda", 0)
    device_index = 0

    def __init__(self, device: object = None, priority: int = 0, **kwargs: object) -> None:
        self._number = self._session.streams.new()
        self.priority = priority

    @property
    def cuda_stream(self) -> int:
        """The raw handle; here just a number."""
        return self._number

    @property
    def stream_id(self) -> int:
        """As `cuda_stream`."""
        return self._number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamStandIn) and other._number == self._number

    def __hash__(self) -> int:
        return hash(("stream", self._number))

    def record_event(self, event: Any = None) -> Any:
        """Records an event on this stream and returns it."""
        event = event or _bound(EventStandIn, self._session)()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Work given to this stream from now on waits for the event."""
        session = self._session
        kind = session.streams.wait(self._number, event._mark)
        if kind:
            session.event(kind, "Stream.wait_event")

    def wait_stream(self, stream: Any) -> None:
        """Waits for all work of another stream."""
        session = self._session
        joins = self._number not in session.streams.taking_part
        kind = session.streams.wait(self._number, session.streams.record(stream._number))
        if joins and session.recording:
            session.streams.forked[self._number] = session.site()
        if kind:
            session.event(kind, "Stream.wait_stream")

    def synchronize(self) -> None:
        """The host waits for the stream."""
        self._session.event("stream-sync", "Stream.synchronize")
        self._session.host_waits(self._number)

    def query(self) -> bool:
        """Whether all work is done: always, here."""
        self._session.event("stream-sync", "Stream.query")
        return True

    def is_capturing(self) -> bool:
        """Whether the open region records this stream."""
        return self._number in self._session.streams.taking_part

    def __enter__(self) -> StreamStandIn:
        self._before = self._session.streams.current
        self._session.streams.enter(self._number, self._session.site())
        return self

    def __exit__(self, *error: object) -> None:
        self._session.streams.current = self._before


class EventStandIn:
    """Plays `torch.cuda.Event`."""

    _session: Session

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._mark: Mark | None = None

    def record(self, stream: Any = None) -> None:
        """Takes down what the stream has done so far."""
        streams = self._session.streams
        self._mark = streams.record(streams.current if stream is None else stream._number)

    def wait(self, stream: Any = None) -> None:
        """Makes a stream (default: the current one) wait for this event."""
        streams = self._session.streams
        kind = streams.wait(streams.current if stream is None else stream._number, self._mark)
        if kind:
            self._session.event(kind, "Event.wait")

    def synchronize(self) -> None:
        """The host waits for the event."""
        self._session.event("stream-sync", "Event.synchronize")
        if self._mark is not None:
            self._session.host_waits(self._mark.stream)

    def query(self) -> bool:
        """Whether the work before the event is done: always, here."""
        self._session.event("stream-sync", "Event.query")
        return True

    def elapsed_time(self, other: object) -> float:
        """Milliseconds between two events: none pass on a played device."""
        self._session.event("stream-sync", "Event.elapsed_time")
        return 1e-3


class GraphStandIn:
    """Plays `torch.cuda.CUDAGraph`: records the region's operators, and replays them on the same memory with the same
    numbers."""

    _session: Session

    def __init__(self, keep_graph: bool = False) -> None:
        self.region: Region | None = None
        self._generators: set[int] = set()
        self._pool: Any = None
        self.replays = 0

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Opens a region on the current stream."""
        self._begin("manual", capture_error_mode, pool, self._session.streams.current)

    def _begin(self, kind: str, error_mode: str, pool: object, stream: object) -> None:
        session = self._session
        self._pool = pool_handle() if pool is None else getattr(pool, "id", pool)
        region = Region(kind, session.site(), error_mode)
        region.generators, region.owner = self._generators, weakref.ref(self)
        region.pool = (self._pool, stream)  # freed memory goes to captures on the same stream alone
        if session.region is None:
            self.region = region
        on_default = session.streams.current == 0
        if on_default:
            session.streams.current = session.streams.new()
        session.open(region)
        if kind == "manual" and session.region is region and on_default:
            session.event("default-stream", "CUDAGraph.capture_begin", site=region.site)

    def capture_end(self) -> None:
        """Closes the region."""
        if self._session.region is self.region:
            self._session.close()

    def replay(self) -> None:
        """Runs the recorded operators again."""
        session = self._session
        region = self.region
        if region is None:
            raise RuntimeError("this graph was never captured; capture it before replay()")
        self.replays += 1
        if session.observer is not None:
            session.observer.replaying(self)
        else:
            session.streams.launch()
        try:
            with session.silence():
                region.tape.replay()
        except Freed as error:
            if session.observer is None:
                raise
            session.observer.freed(self, error)

    def reset(self) -> None:
        """Forgets the region."""
        self.region = None

    def instantiate(self) -> None:
        """Nothing to do."""

    def pool(self) -> tuple[int, int]:
        """A token of the graph's memory pool."""
        return self._pool or (0, 0)

    def register_generator_state(self, generator: Any) -> None:
        """The graph will advance this generator on replay."""
        self._generators.add(generator_identity(generator))

    def enable_debug_mode(self) -> None:
        """Nothing to do."""

    def debug_dump(self, path: str) -> None:
        """Nothing to dump."""


class GraphContext:
    """Plays `torch.cuda.graph`."""

    default_capture_stream: Any = None

    def __init__(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        **kwargs: object,
    ) -> None:
        self.cuda_graph, self.pool, self.capture_error_mode = cuda_graph, pool, capture_error_mode
        self.capture_stream = stream

    def __enter__(self) -> None:
        session = self.cuda_graph._session
        self._before = session.streams.current
        session.host_waits()  # torch synchronises before it begins
        session.streams.current = (
            self.capture_stream._number if self.capture_stream is not None else session.streams.new()
        )
        stream = "torch's own" if self.capture_stream is None else session.streams.current
        self.cuda_graph._begin("graph", self.capture_error_mode, self.pool, stream)

    def __exit__(self, *error: object) -> None:
        self.cuda_graph.capture_end()
        self.cuda_graph._session.streams.current = self._before


def set_stream(session: Session, stream: Any) -> None:
    """Plays `torch.cuda.set_stream`."""
    if session.recording and stream._number == 0:
        session.event("default-stream", "torch.cuda.set_stream")
    session.streams.enter(stream._number, session.site())


@contextlib.contextmanager
def stream_context(session: Session, stream: Any) -> Iterator[None]:
    """Plays `torch.cuda.stream(s)`; `None` changes nothing."""
    before = session.streams.current
    if stream is not None and session.recording and stream._number == 0:
        session.event("default-stream", "torch.cuda.stream")
    if stream is not None:
        session.streams.enter(stream._number, session.site())
    try:
        yield
    finally:
        session.streams.current = before
