"""Threads of the program other than the one that captures: what they do with the device is seen, not recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphlint.runtime.dryrun.records import Event
from graphlint.runtime.dryrun.sites import here

if TYPE_CHECKING:
    from graphlint.runtime.dryrun.session import Session

#: what needs no device, and so does no harm to a capture on another thread
_HOST_ONLY = ("asks-capturing", "environment", "clock", "host-draw", "scheduler-step", "seed", "rng-state")


def watched_start(session: Session, start: Callable[[Any], None]) -> Callable[[Any], None]:
    """`threading.Thread.start` for a played device: the new thread runs under the session's eyes."""
    from graphlint.runtime.dryrun.modes import CallMode, OpMode
    from graphlint.runtime.dryrun.session import Work

    def begin(self: Any) -> None:
        run, inside = self.run, here(None, session.stop) if session.region is not None else None

        def seen() -> None:
            session.threads[threading.get_ident()] = Work(inside)
            with CallMode(session), OpMode(session):
                run()

        self.run = seen
        start(self)

    return begin


def disturbs(session: Session, kind: str, call: str) -> None:
    """A thread that does not capture has used the device: in global mode that ends the capture.

    Told where the region started the thread, else at the region itself, which runs beside it.
    """
    region = session.region
    if region is None or kind in _HOST_ONLY or (region.error_mode != "global" and call != "torch.cuda.synchronize"):
        return
    site, work = here(None, session.stop), session.threads.get(threading.get_ident())
    if work is None:  # a thread that nobody has seen begin
        region.trace.events.append(Event("thread", call, site))
    else:
        region.trace.events.append(Event("thread", call, work.begun or region.site, f" ({site.filename}:{site.row})"))
