"""The result of a profile, as plain values that print, compare and go to JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import msgspec

from graphlint.runtime.profiling.readings import Microseconds, Range


class Verdict(str, Enum):
    """What to do about the whole step."""

    FIRST = "do it first"
    EASY = "worth it if it is easy"
    NOT_WORTH = "not worth it"


class Choice(str, Enum):
    """What to do about one module."""

    CAPTURE = "capture"
    INSIDE = "as the module around it"
    OPEN = "look inside"  # can't be captured whole; its parts may
    LEAVE = "leave out"


@dataclass(frozen=True, slots=True)
class Whole:
    """One step, in microseconds."""

    wall: Microseconds  # eager, host and device running freely
    host: Microseconds  # what the host needs to enqueue it, time blocked on the device left out
    device: Microseconds  # device busy, overlapping streams counted once
    nodes: int  # kernels, copies and fills
    outside: Microseconds  # idle between two steps: data loading and the like, which no graph removes
    share: float  # of the wall time, in which the device idles for the host
    projected: Microseconds  # wall time as one graph
    graphed: Microseconds | None = None  # measured wall time as one graph, in turns with the eager step
    failed: str = ""  # why it was not measured
    fetch: Microseconds = 0.0  # what the host needs to get a batch, which is no part of the step
    wall_range: Range | None = None  # eight of ten readings of the eager step lie in it
    graphed_range: Range | None = None
    measured_range: Range | None = None  # the measured gain, turn by turn
    earlier: Microseconds | None = None  # the eager step before anything was captured; `wall` was read beside the graph

    @property
    def gain(self) -> float:
        """Projected: how many times faster one graph is."""
        return self.wall / self.projected

    @property
    def gain_range(self) -> Range | None:
        """The projected gain over the readings of the eager step."""
        low, high = self.wall_range or (0.0, 0.0)
        return (low / self.projected, high / self.projected) if self.wall_range else None

    @property
    def measured_gain(self) -> float | None:
        return None if self.graphed is None else self.wall / self.graphed

    @property
    def prediction_error(self) -> float | None:
        """Projected gain over measured gain, minus one: both over the eager time read beside the graph."""
        return None if self.graphed is None else self.graphed / self.projected - 1

    @property
    def earlier_error(self) -> float | None:
        """The same for the gain as it was projected before the measurement, over the eager time of then."""
        if self.measured_gain is None or self.earlier is None:
            return None
        return self.earlier / self.projected / self.measured_gain - 1


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the step, its submodules and its backward included."""

    path: str
    kind: str  # class name
    nodes: int
    host: Microseconds
    device: Microseconds
    share: float  # of its own time, in which it leaves the device idle
    step_gain: float  # how many times faster the step is with only this module captured
    choice: Choice
    reason: str
    eager: Microseconds | None = None  # measured alone, forward and backward
    graphed: Microseconds | None = None
    projected: Microseconds = 0.0  # alone, as a graph
    step_measured: float | None = None  # how many times faster the step was with only this module behind the guard

    @property
    def alone(self) -> float:
        """Projected: how many times faster the module alone is as a graph."""
        return max(self.host, self.device) / self.projected if self.projected else 1.0

    @property
    def gain(self) -> float | None:
        """Measured alone: how many times faster the graph is."""
        return None if self.graphed is None or self.eager is None else self.eager / self.graphed


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, in plain words."""

    verdict: Verdict
    headline: str
    points: tuple[str, ...] = ()
    blocked: bool = False  # something in the step forbids a capture as it is


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle device time of one cause, for one step as recorded."""

    cause: str
    said: str
    time: Microseconds
    count: int
    longest: Microseconds


@dataclass(frozen=True, slots=True)
class Drawing:
    """The typical step for the timeline. Times are microseconds from its first event, without the profiler's delay."""

    length: Microseconds
    ops: tuple[tuple[str, Microseconds, Microseconds, int, str], ...]  # name, start, duration, stream, kind
    gaps: tuple[tuple[Microseconds, Microseconds, str, str, str], ...]  # start, duration, cause, path, operator
    calls: tuple[tuple[Microseconds, Microseconds, str, str], ...]  # start, duration, kind, name
    modules: tuple[tuple[str, str, Microseconds, Microseconds, int], ...]  # path, class, start, duration, depth
    behind: Microseconds  # how long the device still works for earlier steps
    node_gap: Microseconds  # between the kernels of the graph that is drawn below
    shrink: float  # what the profiler's idle time was multiplied with to give the step its true length


@dataclass(frozen=True, slots=True)
class Report:
    """Is a CUDA graph worth it for this step?"""

    source: str
    card: str
    torch: str
    steps: int
    live: bool  # measured here; otherwise everything comes from a recording
    whole: Whole
    idle: tuple[Idle, ...]
    modules: tuple[Module, ...]
    advice: Advice
    costs: str  # where the costs of a replay come from
    notes: tuple[str, ...] = ()
    drawing: Drawing | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: everything but the drawing, with gains and shares worked out."""
        plain: dict[str, Any] = asdict(self)
        del plain["drawing"]
        whole = self.whole
        plain["whole"] |= {
            "gain": whole.gain,
            "gain_range": whole.gain_range,
            "measured_gain": whole.measured_gain,
            "prediction_error": whole.prediction_error,
            "earlier_error": whole.earlier_error,
        }
        for row, module in zip(plain["modules"], self.modules, strict=True):
            row |= {"gain": module.gain, "projected_gain": module.alone}
        return plain

    def to_json(self) -> str:
        """The report as JSON, times in microseconds."""
        return msgspec.json.format(msgspec.json.encode(self.as_dict()), indent=2).decode()

    def to_text(self) -> str:
        """The report for a terminal."""
        from graphlint.runtime.profiling.text import render

        return render(self)

    def to_html(self) -> str:
        """One page that needs nothing else: advice, numbers, and the timeline with its gaps."""
        from graphlint.runtime.profiling.page import render

        return render(self)

    def __str__(self) -> str:
        return self.to_text()
