"""`capture_watch()`: lists, in any code, what would wait for the device or break a capture, with the lines; nothing
is raised or changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from graphlint import rulebook
from graphlint.findings import Finding
from graphlint.runtime.dryrun import emulate as sessions
from graphlint.runtime.dryrun import sites
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.report import DryRunReport, executed_lines
from graphlint.runtime.dryrun.session import Region, Session

_WAIT = "a wait for the device"  # what torch's own trace tells, of waits that have another name here too


class Watched:
    """What `capture_watch` has seen so far; complete when its block has ended.

    `findings` are the violations, each line and rule once; `counts` how often each was met, by `(filename, row, rule)`.
    """

    def __init__(self) -> None:
        self.findings: tuple[Finding, ...] = ()
        self.counts: dict[tuple[str, int, str], int] = {}
        self.report: DryRunReport | None = None

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return "no synchronisation seen"
        return "\n".join(self._line(finding) for finding in self.findings)

    def _line(self, finding: Finding) -> str:
        at = finding.at
        times = self.counts[at.filename, at.row, finding.name]
        return f"{at.filename}:{at.row}: {finding.code} {finding.name}: {finding.message} ({times} times)"


@contextlib.contextmanager
def capture_watch(*, target_torch: str | None = None, emulate: bool | None = None) -> Iterator[Watched]:
    """Watches a block of ordinary eager code and lists the host synchronisations and the other capture violations in
    it.

    On a machine with a device the code runs there as it is, and synchronisations of streams, events and the device
    are seen too. Without one, or with `emulate=True`, the CPU plays the device: tensors made before the block count as
    device tensors, `device="cuda"` works inside it. The watch belongs to the calling thread. Code that asks
    `is_current_stream_capturing()` gets a true answer, not the dry run's.

    Example:
        with capture_watch() as seen:
            train_step(x, y)
        print(seen)
    """
    session = sessions.session_for({}, emulate)
    watched = Watched()
    with sessions.emulated_device(session):
        region = Region("watch", sites.here())
        session.region, session.answers_capturing = region, False
        try:
            with sessions.forward_lines(), _traced_waits(session):
                yield watched
        finally:
            session.region, session.answers_capturing = None, True
            _finish(
                watched,
                region,
                sessions.device_name(session),
                Judge(rulebook.parse_version(target_torch or torch.__version__)),
            )


def _finish(watched: Watched, region: Region, device: str, judge: Judge) -> None:
    found = [
        finding for finding in judge.judge(region.trace) if finding.name not in ("default-stream", "unforked-stream")
    ]
    explained = {(f.at.filename, f.at.row) for f in found if _WAIT not in f.message}
    found = [f for f in found if _WAIT not in f.message or (f.at.filename, f.at.row) not in explained]
    watched.findings = tuple(sorted(found, key=lambda f: (f.at, f.code)))
    told = [event for event in region.trace.events if event.call != _WAIT or event.site.place not in explained]
    places = [event.site.place for event in told] + [op.site.place for op in region.trace.ops if judge.operator(op)]
    for finding in found:
        place = finding.at.filename, finding.at.row
        watched.counts[finding.at.filename, finding.at.row, finding.name] = max(1, places.count(place))
    watched.report = DryRunReport(
        findings=watched.findings,
        copies=tuple(region.trace.copies),
        draws=tuple(region.trace.draws),
        executed=executed_lines(region.trace),
        operators=len(region.trace.ops),
        device=device,
        torch=str(torch.__version__),
    )


@contextlib.contextmanager
def _traced_waits(session: Session) -> Iterator[None]:
    """On a device: torch's own trace tells of waits that libraries make past Python's `torch.cuda` names. The switch
    stays on for the process."""
    if session.emulated:
        yield
        return
    from torch.cuda import _gpu_trace

    torch._C._activate_gpu_trace()
    active = True

    def waits(*arguments: Any) -> None:
        if active and session.region is not None:
            session.event("stream-sync", _WAIT)

    _gpu_trace.register_callback_for_stream_synchronization(waits)
    _gpu_trace.register_callback_for_device_synchronization(waits)
    _gpu_trace.register_callback_for_event_synchronization(waits)
    try:
        yield
    finally:
        active = False
