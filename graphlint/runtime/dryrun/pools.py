"""Memory that graphs of one pool have in common: what a capture leaves free, the next capture of the pool takes.

Played by an allocator that rounds, fits, splits and joins as torch's caching allocator does. Plain Python; no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

Block = tuple[int, int, int]  # segment, first byte, byte behind the last
Stale = Callable[[], bool]

_GRAIN = 512
_SMALL = 1 << 20
_MANY = 2000  # blocks in use at once, from which on a pool is no longer followed


class Space:
    """The memory of one pool on one stream."""

    def __init__(self) -> None:
        self._segments = itertools.count()
        self._free: list[Block] = []
        self._small: set[int] = set()
        self._used: dict[int, tuple[Block, Stale]] = {}
        self.followed = True

    def take(self, number: int, size: int, stale: Stale) -> Block | None:
        """A block for memory of `size` bytes; `stale` will tell when nobody uses it any more. None where the pool has
        grown too large to be followed."""
        self.followed = self.followed and len(self._used) < _MANY
        if not self.followed:
            return None
        for other, (block, dead) in list(self._used.items()):
            if dead():
                del self._used[other]
                self._release(block)
        block = self._fit(max(-(-size // _GRAIN) * _GRAIN, _GRAIN))
        self._used[number] = (block, stale)
        return block

    def _fit(self, size: int) -> Block:
        small = size <= _SMALL
        fitting = [b for b in self._free if (b[0] in self._small) == small and b[2] - b[1] >= size]
        if not fitting:
            fitting = [self._grow(size, small)]
        segment, first, last = min(fitting, key=lambda b: (b[2] - b[1], b))
        self._free.remove((segment, first, last))
        rest = last - first - size
        if rest >= _GRAIN if small else rest > _SMALL:
            self._free.append((segment, first + size, last))
            last = first + size
        return segment, first, last

    def _grow(self, size: int, small: bool) -> Block:
        segment = next(self._segments)
        if small:
            self._small.add(segment)
        length = 2 * _SMALL if small else 20 * _SMALL if size < 10 * _SMALL else -(-size // (2 * _SMALL)) * 2 * _SMALL
        self._free.append((segment, 0, length))
        return self._free[-1]

    def _release(self, block: Block) -> None:
        segment, first, last = block
        for other in [b for b in self._free if b[0] == segment and (b[2] == first or b[1] == last)]:
            self._free.remove(other)
            first, last = min(first, other[1]), max(last, other[2])
        self._free.append((segment, first, last))


def common(one: Iterable[tuple[int, Block]], other: Iterable[tuple[int, Block]]) -> tuple[set[int], set[int]]:
    """The memory of either side whose blocks overlap with blocks of the other side."""
    theirs = list(other)
    mine, hit = set(), set()
    for number, (segment, first, last) in one:
        for foreign, block in theirs:
            if block[0] == segment and block[1] < last and first < block[2]:
                mine.add(number)
                hit.add(foreign)
    return mine, hit
