"""Refills that come behind the replay they are meant for.

A refill behind a replay may be a prefetch for the next one. It is none where the first replay of all found an input
that nobody had filled, and the function that replays copies its own argument there afterwards, every time.
"""

from __future__ import annotations

from typing import Any

import torch

from graphlint.findings import Related
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.handed import parameters, users_frames
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Session

_BLANK = ("zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like", "empty_strided")
_BLANK_NAMES = frozenset(f"aten::{prefix}{name}" for prefix in ("", "new_") for name in _BLANK)


class _Replayed:
    """The last replay of a graph, and which of its inputs were refilled behind it since: number -> line."""

    def __init__(self, site: Site, unfilled: set[int]) -> None:
        self.site, self.unfilled = site, unfilled
        self.behind: dict[int, Site] = {}
        self.before: dict[int, Site] = {}


class Late:
    """Follows blank inputs and their refills in one program; `keep` takes the findings."""

    def __init__(self, session: Session, judge: Judge, keep: Keep) -> None:
        self._session, self._judge, self._keep = session, judge, keep
        self._blank: set[int] = set()
        self._last: dict[int, _Replayed] = {}

    def made(self, func: Any, made: list[torch.Tensor]) -> None:
        """An operator outside every region has made these tensors."""
        if func._schema.name in _BLANK_NAMES:
            self._blank.update(self._session.roles.identity(tensor) for tensor in made)

    def copied(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """A tensor has been brought to the other side of the border."""
        if self._session.roles.identity(tensor) in self._blank:
            self._blank.add(self._session.roles.identity(copy))

    def written(self, func: Any, args: Any, tensors: list[torch.Tensor], site: Site) -> None:
        """An operator outside every region has written these tensors."""
        for number in {self._session.roles.identity(tensor) for tensor in tensors}:
            self._blank.discard(number)
            for replayed in self._last.values():
                if number in replayed.unfilled:
                    self._refilled(replayed, number, func, args, site)

    def _refilled(self, replayed: _Replayed, number: int, func: Any, args: Any, site: Site) -> None:
        here = replayed.site
        together = (site.filename, site.function, site.trace) == (here.filename, here.function, here.trace)
        if not together or number in replayed.behind or not self._of_argument(func, args):
            replayed.unfilled.discard(number)  # filled in another way too
            return
        replayed.behind[number] = site
        earlier = replayed.before.get(number)
        if earlier is not None and earlier.place == site.place:
            words = "fills what the replay above it was to read: every result answers the call before"
            finding = self._judge.finding("late-refill", "copy_", words, site)
            self._keep(finding, Related(here.filename, here.row, "replayed here"))

    def _of_argument(self, func: Any, args: Any) -> bool:
        """Whether the operator copies an argument of the function that is running."""
        if func._schema.name != "aten::copy_":
            return False
        frame = next(users_frames(), None)
        source = self._session.roles.identity(args[1])
        return frame is not None and any(
            isinstance(value, torch.Tensor) and self._session.roles.identity(value) == source
            for value in parameters(frame).values()
        )

    def replaying(self, graph: Captured, here: Site) -> None:
        """A graph is about to replay."""
        if graph.watch is None:
            return
        last = self._last.get(id(graph))
        unfilled = set(graph.watch.inputs & self._blank) if last is None else last.unfilled & set(last.behind)
        self._last[id(graph)] = _Replayed(here, unfilled)
        self._last[id(graph)].before = dict(last.behind) if last is not None else {}
