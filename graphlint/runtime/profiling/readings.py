"""A time read several times: its median, and how far the readings spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Microseconds = float
Range = tuple[Microseconds, Microseconds]

_TAIL = 0.1  # of the readings at either end that a range leaves out


@dataclass(frozen=True, slots=True)
class Reading:
    """Wall time of one step in microseconds, once for each timed loop, in the order in which they ran."""

    loops: tuple[Microseconds, ...]

    @property
    def median(self) -> Microseconds:
        return statistics.median(self.loops)

    @property
    def range(self) -> Range:
        """Between these two lie eight of ten loops."""
        return quantile(self.loops, _TAIL), quantile(self.loops, 1 - _TAIL)

    @property
    def uncertainty(self) -> float:
        """Standard error of the median as a part of it, from the middle half of the loops: outliers count little."""
        middle = quantile(self.loops, 0.75) - quantile(self.loops, 0.25)
        return 0.93 * middle / math.sqrt(len(self.loops)) / max(self.median, 1e-9)

    def __add__(self, other: Reading) -> Reading:
        return Reading((*self.loops, *other.loops))


def ratio(slow: Reading, fast: Reading) -> Range:
    """How many times faster `fast` is, turn by turn: both were read in the same turns."""
    return Reading(tuple(a / b for a, b in zip(slow.loops, fast.loops, strict=True))).range


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies, straight lines between neighbours."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
