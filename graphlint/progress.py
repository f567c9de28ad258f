"""How far a long run is, on a terminal only: one line on stderr that is overwritten and gone at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")
_AFTER, _EVERY = 0.7, 0.1  # seconds: a run that is over by then says nothing; a faster line could not be read

_listener: Callable[[str], None] | None = None


class Line:
    """Shows progress on a terminal while it is the listener: `with Line(sys.stderr): ...`."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._begun = time.monotonic()
        self._next = self._begun + _AFTER
        self._shown = False

    def __enter__(self) -> Line:
        global _listener
        _listener = self.show
        return self

    def __exit__(self, *_: object) -> None:
        global _listener
        _listener = None
        if self._shown:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()

    def show(self, text: str) -> None:
        """Overwrites the line, not more often than can be read."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY
            self._shown = True
            self._terminal.write(f"\r\x1b[K{text[:78]}")
            self._terminal.flush()


def told(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The items, one by one, telling whoever listens how many are done: `reading 120/3,231 files`."""
    for number, item in enumerate(items, 1):
        if _listener:
            _listener(f"{what} {number:,}/{total:,}")
        yield item
