"""A real device is watched, not played: waits, streams, generators and the allocator tell the session what is asked of
them, and then do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from graphlint.runtime.dryrun import moves
from graphlint.runtime.dryrun.records import Op
from graphlint.runtime.dryrun.session import Session

if TYPE_CHECKING:
    from graphlint.runtime.dryrun.patches import Patches


def watch_device(session: Session, patches: Patches) -> None:
    """Watches `torch.cuda` of a machine with a device."""
    cuda: Any = torch.cuda
    _watch_waits(session, patches)
    _watch_streams(_RealStreams(session), patches)
    for name in ("empty_cache", "ipc_collect"):
        patches.put(cuda, name, noted(session, "allocator", f"torch.cuda.{name}", getattr(cuda, name)))
    for name, detail in (("get_rng_state", "get"), ("set_rng_state", "set")):
        patches.put(cuda, name, noted(session, "rng-state", f"torch.cuda.{name}", getattr(cuda, name), detail))
    patches.put(torch, "cond", functools.partial(moves.play_cond, session))  # torch's own would compile the dry run
    patches.put(cuda, "is_current_stream_capturing", capturing(session, cuda.is_current_stream_capturing))


def noted(session: Session, kind: str, call: str, function: Callable[..., Any], detail: str = "") -> Callable[..., Any]:
    """A function that writes an event down and then does what it always did."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        session.event(kind, call, detail)
        return function(*args, **kwargs)

    return wrapper


def capturing(session: Session, function: Callable[[], bool]) -> Callable[[], bool]:
    """`is_current_stream_capturing` that says yes while the dry run's region is open, and where torch says so."""

    def is_current_stream_capturing() -> bool:
        if session.region is not None:
            session.event("asks-capturing", "torch.cuda.is_current_stream_capturing")
            return session.answers_capturing
        return function()

    return is_current_stream_capturing


def fresh_on_device(session: Session, op: Op, result: torch.Tensor) -> None:
    """Torch may just have built a device tensor from Python data, a list or an array: a copy from pageable memory that
    no mode shows. Transfers that the user asks for by name are noted elsewhere.
    """
    indexes = op.call in ("torch.Tensor.__getitem__", "torch.Tensor.__setitem__")
    fresh = op.name == "aten::lift_fresh" and op.on_device
    moved = op.name == "aten::_to_copy" and indexes and not op.on_device and result.is_cuda
    if result.numel() and (fresh or moved):
        kind, detail = ("host-index", "index") if indexes else ("h2d", "pageable")
        session.event(kind, op.call or op.name, detail, op.site)


def _watch_waits(session: Session, patches: Patches) -> None:
    """The host waits for the device: no mode shows it."""
    cuda: Any = torch.cuda
    patches.put(cuda, "synchronize", noted(session, "stream-sync", "torch.cuda.synchronize", cuda.synchronize))
    for owner, names in (
        (cuda.Stream, ("synchronize", "query")),
        (cuda.Event, ("synchronize", "query", "elapsed_time")),
    ):
        for name in names:
            patches.put(owner, name, noted(session, "stream-sync", f"{owner.__name__}.{name}", getattr(owner, name)))


class _RealStreams:
    """Gives torch's streams the numbers that the session's clocks know them by; the default stream is 0."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._numbers: dict[int, int] = {0: 0}

    def number(self, stream: Any) -> int:
        """The number of a stream; None is the current one."""
        if stream is None:
            return self.session.streams.current
        handle = int(stream.cuda_stream)
        if handle not in self._numbers:
            self._numbers[handle] = self.session.streams.new()
        return self._numbers[handle]

    def enter(self, stream: Any) -> int:
        """Work goes to a stream from now on; gives the number of the one before."""
        number, before = self.number(stream), self.session.streams.current
        if number == 0 and self.session.recording:
            self.session.event("default-stream", "torch.cuda.stream")
        self.session.streams.current = number
        return before

    def record(self, event: Any, stream: Any) -> None:
        """An event is recorded."""
        event.graphlint_mark = self.session.streams.record(self.number(stream))

    def wait(self, stream: Any, event: Any) -> None:
        """A stream waits for an event."""
        number, streams = self.number(stream), self.session.streams
        joins = number not in streams.taking_part
        kind = streams.wait(number, getattr(event, "graphlint_mark", None))
        if joins and number in streams.taking_part and self.session.recording:
            streams.forked[number] = self.session.site()
        if kind:
            self.session.event(kind, "Stream.wait_event")


def _watch_streams(real: _RealStreams, patches: Patches) -> None:
    """Forks and joins, for work that a capture would lose or refuse. `wait_stream`, `wait_event` and `record_event` go
    through the events.
    """
    cuda: Any = torch.cuda
    set_stream, record, wait = cuda.set_stream, cuda.Event.record, cuda.Event.wait

    def watched_set(stream: Any) -> None:
        set_stream(stream)
        if stream is not None:
            real.enter(stream)

    def watched_record(event: Any, stream: Any = None) -> None:
        record(event) if stream is None else record(event, stream)
        real.record(event, stream)

    def watched_wait(event: Any, stream: Any = None) -> None:
        real.wait(stream, event)
        wait(event) if stream is None else wait(event, stream)

    patches.put(cuda, "set_stream", watched_set)
    patches.put(cuda.Event, "record", watched_record)
    patches.put(cuda.Event, "wait", watched_wait)
    if hasattr(cuda.Stream, "__enter__"):
        _watch_with(real, patches)


def _watch_with(real: _RealStreams, patches: Patches) -> None:
    """`with stream:`, which newer releases of torch do in C++."""
    cuda: Any = torch.cuda
    enter, leave = cuda.Stream.__enter__, cuda.Stream.__exit__
    before: list[int] = []

    def watched_enter(stream: Any) -> Any:
        entered = enter(stream)
        before.append(real.enter(stream))
        return entered

    def watched_leave(stream: Any, *error: Any) -> Any:
        left = leave(stream, *error)
        real.session.streams.current = before.pop()
        return left

    patches.put(cuda.Stream, "__enter__", watched_enter)
    patches.put(cuda.Stream, "__exit__", watched_leave)
