"""The order of work on streams: a vector clock per stream tells what has been waited for. Plain Python; no torch.

While a region is open it also knows which streams take part in the capture: the one that opened it, and every stream
that waited on an event recorded on such a stream.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from graphlint.runtime.dryrun.records import Site

if TYPE_CHECKING:
    from graphlint.runtime.dryrun.session import Session

Clock = dict[int, int]


class Mark:
    """What an event has seen: the clock of its stream when it was recorded, and the capture it was recorded in."""

    def __init__(self, clock: Clock, capture: int, stream: int) -> None:
        self.clock, self.capture, self.stream = clock, capture, stream


class Streams:
    """Clocks of all streams; stream 0 is the default stream."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ids = itertools.count(1)
        self._captures = itertools.count(1)
        self.clocks: dict[int, Clock] = {0: {}}
        self.main = 0
        self.capture = 0
        self.taking_part: set[int] = set()
        self.last_work: dict[int, Site] = {}
        self.forked: dict[int, Site] = {}
        self.entered: dict[int, Site] = {}

    @property
    def current(self) -> int:
        """The stream that this thread's work goes to."""
        return self._session.work.stream

    @current.setter
    def current(self, stream: int) -> None:
        self._session.work.stream = stream

    def enter(self, stream: int, site: Site) -> None:
        """Work goes to another stream from here on."""
        self.current = stream
        self.entered[stream] = site

    def new(self) -> int:
        """A fresh stream."""
        number = next(self._ids)
        self.clocks[number] = {}
        return number

    def begin(self, error_mode: str) -> None:
        """A capture opens on the current stream."""
        self.capture, self.main = next(self._captures), self.current
        self.taking_part, self.last_work = {self.current}, {}
        self.entered.clear()

    def finish(self) -> list[tuple[str, Site]]:
        """The capture ends: the streams whose work the capturing stream has not waited for, with the line of that
        work."""
        seen = self.clocks[self.main]
        lost = [
            ("unjoined-stream", self.forked.get(stream, site))
            for stream, site in self.last_work.items()
            if stream != self.main
            and stream in self.taking_part
            and self.clocks[stream].get(stream, 0) > seen.get(stream, 0)
        ]
        self.capture, self.taking_part = 0, set()
        return lost

    def launch(self) -> str:
        """Work goes to the current stream; returns the kind of event if the capture does not allow it."""
        clock = self.clocks[self.current]
        clock[self.current] = clock.get(self.current, 0) + 1
        if not self.capture:
            return ""
        if self.current in self.taking_part:
            if self.current != self.main:
                self.last_work[self.current] = self._session.site()
            return ""
        return "default-stream" if self.current == 0 else "unforked-stream"

    def record(self, stream: int) -> Mark:
        """An event is recorded on a stream."""
        inside = self.capture if stream in self.taking_part else 0
        return Mark(dict(self.clocks[stream]), inside, stream)

    def wait(self, stream: int, mark: Mark | None) -> str:
        """A stream waits for an event; returns the kind of event if the capture does not allow it."""
        if mark is None:
            return "outside-event" if stream in self.taking_part else ""
        outside = bool(self.capture) and stream in self.taking_part and mark.capture != self.capture
        clock = self.clocks[stream]
        for other, count in mark.clock.items():
            clock[other] = max(clock.get(other, 0), count)
        if self.capture and mark.capture == self.capture:
            self.taking_part.add(stream)
        return "outside-event" if outside else ""
