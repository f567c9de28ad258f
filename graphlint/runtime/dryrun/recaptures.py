"""Captures at one line: again and again, or ever more of them alive."""

from __future__ import annotations

import weakref
from typing import Any

from graphlint.runtime.dryrun import statements
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Region

_LATE_CAPTURES = 3
_MANY_ALIVE = 7
_FEW_REPLAYS = 3


class Recaptures:
    """Counts the captures of one program by line; `keep` takes the findings."""

    def __init__(self, judge: Judge, keep: Keep) -> None:
        self._judge, self._keep = judge, keep
        self._captures: dict[tuple[str, int], list[Any]] = {}

    def closed(self, region: Region, known: list[Captured]) -> None:
        """Captures at one line: again and again, or ever more of them alive."""
        owner = region.owner() if region.owner else None
        if owner is None:
            return
        graphs = self._captures.setdefault(region.site.place, [])
        begun = any(graph.replays for graph in known)
        graphs.append((weakref.ref(owner), begun))
        late = sum(after for _, after in graphs)
        alive = sum(ref() is not None for ref, _ in graphs)
        if late < _LATE_CAPTURES:
            return
        if alive >= _MANY_ALIVE:
            words = f"keeps every graph that it captures: {alive} are alive, and captures go on between replays"
            self._keep(self._judge.finding("unbounded-graphs", "torch.cuda.graph", words, region.site))
        replays = sum(g.replays for g in known if g.region.site.place == region.site.place)
        if alive <= 2 and replays <= _FEW_REPLAYS * len(graphs):
            words = f"captures again and again between replays: {len(graphs)} captures so far"
            site = statements.looped(region.site)
            self._keep(self._judge.finding("capture-in-loop", "torch.cuda.graph", words, site))
