"""cuBLAS keeps a workspace for each stream; `torch.compile` frees them all before it records a graph."""

from __future__ import annotations

from graphlint.findings import Related
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Session

PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "addmv"))


class Workspaces:
    """Follows which streams have a workspace in ordinary memory; `keep` takes the findings."""

    def __init__(self, session: Session, judge: Judge, keep: Keep) -> None:
        self._session, self._judge, self._keep = session, judge, keep
        self._warm: set[int] = set()
        self._cleared: list[Site] = []
        self._captured: dict[int, int] = {}

    def launched(self, operator: str) -> None:
        """An operator ran outside every region, on the current stream."""
        if operator in PRODUCTS:
            self._warm.add(self._session.streams.current)

    def records(self, site: Site) -> None:
        """A compiled function is about to record a graph of its own."""
        self._cleared.append(site)
        self._warm.clear()

    def closed(self, graph: Captured) -> None:
        """A capture has ended: does it write into a workspace that lies outside its pool?"""
        if self._session.streams.main in self._warm and any(op.name in PRODUCTS for op in graph.region.trace.ops):
            self._captured[id(graph)] = len(self._cleared)

    def replaying(self, graph: Captured, here: Site) -> None:
        """A graph is about to replay."""
        seen = self._captured.get(id(graph), len(self._cleared))
        for site in self._cleared[seen : seen + 1]:
            words = (
                "records a graph and frees all cuBLAS workspaces for that, one of which the captured graph writes to"
            )
            finding = self._judge.finding("cleared-workspace", "the compiled function", words, site)
            self._keep(finding, Related(here.filename, here.row, "replayed here"))
