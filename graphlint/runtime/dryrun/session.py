"""The state of one dry run: where tensors live, which region is open, what was written down. The adapters share it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

from graphlint.runtime.dryrun import sites, threads
from graphlint.runtime.dryrun.records import Copy, Event, Op, Role, Site, Trace
from graphlint.runtime.dryrun.roles import DeviceRoles, RememberedRoles, Roles
from graphlint.runtime.dryrun.streams import Streams
from graphlint.runtime.dryrun.tape import Tape
from graphlint.runtime.dryrun.undo import Undo


class Region:
    """One capture region while it is open, and what was recorded in it afterwards.

    `site` is where it was opened, `kind` what opened it (`step`, `graph`, `manual`, `graphed-callable`), `error_mode`
    the capture error mode.
    """

    def __init__(self, kind: str, site: Site, error_mode: str = "global") -> None:
        self.kind, self.site, self.error_mode = kind, site, error_mode
        self.trace = Trace()
        self.tape = Tape()
        self.replayable = kind not in ("step", "watch", "shadow")  # a tape keeps all memory of the region alive
        self.born: dict[int, int] = {}
        self.generators: set[int] = set()
        self.undo: Undo | None = None
        self.owner: Any = None
        self.pool: object = None
        self.recorded: set[int] = set()
        self.last: Any = None


class Call:
    """The torch function the user is inside of: its name and where memory that it makes will live."""

    def __init__(self, name: str, role: Role) -> None:
        self.name, self.role = name, role


class Work:
    """What one thread is doing: the torch functions that it is inside of, its stream, whether its records are wanted
    (`quiet`), and where it was begun, if inside a region."""

    def __init__(self, begun: Site | None = None) -> None:
        self.calls: list[Call] = []
        self.stream = 0
        self.quiet = 0
        self.begun = begun


class Session:
    """Everything a dry run remembers. `emulated` says whether the device is played by the CPU.

    `assume_device`: memory of unknown origin (made before the session began) counts as device memory; that is what a
    CPU-only test means when it hands its tensors over.
    """

    def __init__(self, emulated: bool, assume_device: bool = False) -> None:
        self.emulated, self.assume_device = emulated, assume_device
        self.roles: Roles = RememberedRoles() if emulated else DeviceRoles()
        self.threads: dict[int, Work] = {}
        self._main = Work()
        self.streams = Streams(self)
        self.region: Region | None = None
        self.regions: list[Region] = []
        self.setup = Trace()
        self.stop: CodeType | None = None
        self.thread = threading.get_ident()
        self.observer: Any = None
        self.answers_capturing = True
        self.overwritten: dict[int, Site] = {}
        self.arguments: set[int] = set()
        self.warm: set[str] = set()
        self.last: Any = None

    def role(self, tensor: torch.Tensor) -> Role:
        """The role of a tensor; unknown memory is taken for the device's where the session was told so."""
        found = self.roles.of(tensor)
        if found == "unknown" and self.assume_device:
            self.roles.mark(tensor, "device")
            return "device"
        return found

    def living(self, numbers: set[int]) -> list[tuple[int, Any]]:
        """Weak references to the memory behind those numbers."""
        return self.roles.living(numbers)

    @property
    def work(self) -> Work:
        """What this thread is doing; threads that torch starts belong to the one that captures."""
        return self.threads.get(threading.get_ident(), self._main) if self.threads else self._main

    @property
    def elsewhere(self) -> bool:
        """Whether this is a thread that the program has started, and not the one that captures."""
        return self.work is not self._main

    @property
    def calls(self) -> list[Call]:
        """The torch functions that this thread is inside of, outermost first."""
        return self.work.calls

    @property
    def quiet(self) -> int:
        """How often this thread's records were asked not to be kept."""
        return self.work.quiet

    @property
    def recording(self) -> bool:
        """Whether a region is open and the records of this thread are wanted."""
        return self.region is not None and not self.quiet and not self.elsewhere

    @property
    def trace(self) -> Trace:
        """The open region's trace, or what happens outside of any."""
        return self.region.trace if self.region else self.setup

    @property
    def call(self) -> str:
        """The torch function that the user called, or nothing; in backward the innermost one."""
        return self.calls[-1].name if self.calls else ""

    def site(self) -> Site:
        """The user's line that is running; for an engine thread of backward, the line of the thread that waits for
        it."""
        import sys

        frame = sys._getframe(1)
        if threading.get_ident() != self.thread and torch._C._current_autograd_node() is not None:
            frame = sys._current_frames().get(self.thread, frame)
        return sites.here(frame, self.stop)

    def event(self, kind: str, call: str, detail: str = "", site: Site | None = None) -> None:
        """Writes an event down while a region is open; from another thread it is that thread's fault."""
        if threading.get_ident() != self.thread and torch._C._current_autograd_node() is None:
            threads.disturbs(self, kind, call)
        elif self.recording:
            self.trace.events.append(Event(kind, call, site or self.site(), detail, self.forward_site()))

    def setup_event(self, kind: str, call: str) -> None:
        """Writes down something that matters outside every region too."""
        self.setup.events.append(Event(kind, call, self.site()))

    def copied(self, direction: str, tensor: torch.Tensor, pinned: bool, non_blocking: bool, call: str) -> None:
        """Writes a transfer down, and as an event too where it can't be captured."""
        if tensor.numel() == 0:
            return  # nothing is copied
        if self.elsewhere:
            self.event("thread", call)
            return
        if not self.recording:
            if direction == "device-to-host" and not non_blocking:
                self.host_waits(self.streams.current)
            return
        site = self.site()
        shape, dtype = tuple(tensor.shape), str(tensor.dtype)
        self.trace.copies.append(Copy(direction, pinned, non_blocking, shape, dtype, site))
        if not (pinned and non_blocking):
            self.event(
                "h2d" if direction == "host-to-device" else "d2h", call, "pinned" if pinned else "pageable", site
            )

    def host_waits(self, stream: int | None = None) -> None:
        """The host waits for a stream, or for the whole device; work launched later comes after."""
        if self.observer is not None:
            self.observer.synchronized(stream)
        seen = self.streams.clocks
        for clock in seen.values():
            for other in seen if stream is None else (stream,):
                for number, count in seen[other].items():
                    clock[number] = max(clock.get(number, 0), count)

    def forward_site(self) -> Site | None:
        """In backward: the line of the forward call that this node belongs to (anomaly mode keeps it)."""
        node = torch._C._current_autograd_node()
        while node is not None:
            lines = node.metadata.get("traceback_")
            if lines:
                return _from_traceback(lines)
            node = node.metadata.get("parent_")
        return None

    def add(self, op: Op) -> None:
        """Appends an operator to the open region."""
        self.trace.ops.append(op)

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Nothing is recorded inside (roles are still kept)."""
        work = self.work
        work.quiet += 1
        try:
            yield
        finally:
            work.quiet -= 1

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """The observer hears nothing inside."""
        observer, self.observer = self.observer, None
        try:
            yield
        finally:
            self.observer = observer

    def open(self, region: Region) -> None:
        """Begins a region; one that is open already is a nested capture."""
        if self.region is not None:
            self.event("nested-capture", "torch.cuda.graph", site=region.site)
            return
        if self.observer is not None:
            self.observer.opened(region)
        self.region = region
        self.streams.begin(region.error_mode)

    def close(self) -> Region | None:
        """Ends the open region: streams that were not joined become events; returns the region."""
        region = self.region
        if region is None:
            return None
        for kind, site in self.streams.finish():
            region.trace.events.append(Event(kind, "torch.cuda.stream", site))
        self.region = None
        self.regions.append(region)
        if self.observer is not None:
            self.observer.closed(region)
        return region


def _from_traceback(lines: list[str]) -> Site | None:
    """The innermost user line of a formatted stack, as anomaly mode keeps it."""
    import re

    for text in reversed(lines):
        found = re.match(r'\s*File "(.+)", line (\d+), in (.+)', text)
        if found and not sites.is_library(found[1]):
            return Site(sites.relative(found[1]), int(found[2]), found[3].split("\n")[0])
    return None
