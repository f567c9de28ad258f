"""What a guard counts, notes and warns of: nothing it does instead of what was asked goes unsaid."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, field

from graphlint.runtime.errors import CaptureError, FallbackWarning, GuardWarning
from graphlint.runtime.report import Fallback

MAX_FAULTS = 100
_OWN = os.path.dirname(os.path.abspath(__file__))


@dataclass
class Ledger:
    """The books of one guard, called `name` in warnings."""

    name: str
    counts: dict[str, int] = field(
        default_factory=lambda: {"captures": 0, "inlined": 0, "shadowed": 0, "eager": 0},
    )
    fallbacks: dict[str, Fallback] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: dict[str, dict[str, object]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def note(self, text: str) -> None:
        """One line of the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def warn(self, warning: Warning) -> None:
        """A warning at the user's line."""
        warnings.warn(warning, stacklevel=_frames_of_ours())

    def warn_once(self, warning: Warning, kind: str) -> None:
        """A warning that is not repeated for this guard."""
        if kind not in self._told:
            self._told.add(kind)
            self.warn(warning)

    def refused(self, error: CaptureError) -> None:
        """A call that no graph can serve; each reason is kept once, without the traceback that holds the call."""
        reason = f"{error.rule}: {error.reason} {error.where}"
        if reason not in self.faults and len(self.faults) < MAX_FAULTS:
            self.faults[reason] = dict(error.to_dict())

    def eager(self, error: CaptureError) -> None:
        """An eager call in place of a replay: counted always, told once for each reason."""
        self.counts["eager"] += 1
        reason = f"{error.code} {error.rule}: {error.reason}"
        fallback = self.fallbacks.setdefault(reason, Fallback(reason))
        if not fallback.calls:
            self.warn(FallbackWarning(f"{self.name} runs eagerly: {error}"))
        fallback.calls += 1

    def thrashing(self, max_graphs: int) -> None:
        """Graphs are captured and dropped over and over."""
        text = (
            f"CG601 capture-in-loop: {self.name} was captured {self.counts['captures']} times for "
            f"max_graphs={max_graphs}; pass changing numbers as tensors and changing lengths in buckets"
        )
        self.warn_once(GuardWarning(text), "thrashing")

    def copies(self) -> None:
        """The first results were kept, so that every result is a copy."""
        self.note(
            "CG411 kept-output: results are held when later calls come, so each is a copy from the start "
            "(outputs='clone' or a ring says so beforehand)"
        )

    def kept(self) -> None:
        """A result is held while the next call overwrites it."""
        text = (
            f"CG411 kept-output: a result of {self.name} is kept while the next call overwrites it; from now on "
            "results are copied (choose outputs='clone' or a ring to say so yourself)"
        )
        self.warn(GuardWarning(text))


def _frames_of_ours() -> int:
    """The `stacklevel` of the user's line: how many frames above `warn` are the runtime's own."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OWN, "<graphlint")):
        depth, frame = depth + 1, frame.f_back
    return depth
