"""What a call steps on the host: learning rate schedulers and iterators. A replay steps neither, so a call that does is
refused, with the line, and what it took from an iterator is put back.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from graphlint.runtime.errors import Where
from graphlint.runtime.found import Found, Plain
from graphlint.runtime.observe import user_line


@dataclass
class Stepped:
    """By label, the schedulers and the iterators that a call stepped, with the user's line."""

    schedulers: dict[str, Where | None] = field(default_factory=dict)
    iterators: dict[str, Where | None] = field(default_factory=dict)
    _taken: list[tuple[Plain, _Noted]] = field(default_factory=list)

    def put_back(self) -> None:
        """Has the iterators give again what was taken from them; after everything else is as it was."""
        for place, noted in self._taken:
            assert place.put is not None
            place.put(PutBack(noted.source, noted.taken))
        self._taken.clear()


class PutBack:
    """An iterator that gives back what was taken from it, first of all; anything else is asked of the iterator."""

    def __init__(self, source: Any, taken: list[Any]) -> None:
        self._source = source
        self._taken = deque(taken)

    def __iter__(self) -> PutBack:
        return self

    def __next__(self) -> Any:
        return self._taken.popleft() if self._taken else next(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_source"], name)


class _Noted(PutBack):
    """An iterator that writes down what is taken from it."""

    def __init__(self, source: Any, note: Callable[[], None]) -> None:
        super().__init__(source, [])
        self._note = note

    def __next__(self) -> Any:
        item = next(self._source)
        self._note()
        self._taken.append(item)
        return item

    @property
    def source(self) -> Any:
        """The iterator itself."""
        return self._source

    @property
    def taken(self) -> list[Any]:
        """The items, in order."""
        return list(self._taken)


@contextlib.contextmanager
def noting_steps(found: Found, stepped: Stepped) -> Iterator[None]:
    """Inside, steps of schedulers and of iterators are written down."""
    with contextlib.ExitStack() as stack:
        for label, scheduler in found.schedulers.items():
            stack.enter_context(_noting_scheduler(scheduler, functools.partial(_note, stepped.schedulers, label)))
        for place in found.iterators:
            stack.enter_context(_noting_iterator(place, stepped))
        yield


def _note(book: dict[str, Where | None], label: str) -> None:
    book.setdefault(label, user_line(sys._getframe()))


@contextlib.contextmanager
def _noting_scheduler(scheduler: Any, note: Callable[[], None]) -> Iterator[None]:
    own, step = scheduler.__dict__.get("step"), scheduler.step

    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return step(*args, **kwargs)

    scheduler.step = noted
    try:
        yield
    finally:
        del scheduler.step
        if own is not None:
            scheduler.step = own


@contextlib.contextmanager
def _noting_iterator(place: Plain, stepped: Stepped) -> Iterator[None]:
    noted = _Noted(place.look(place.key), functools.partial(_note, stepped.iterators, place.label))
    assert place.put is not None
    place.put(noted)
    try:
        yield
    finally:
        if place.look(place.key) is noted:
            place.put(noted.source)
        if noted.taken:
            stepped._taken.append((place, noted))
