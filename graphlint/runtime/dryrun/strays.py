"""Names that the captured code bound to its results and that eager code has bound to others since: a replay fills
memory that no name leads to, and whoever reads the name finds the eager result."""

from __future__ import annotations

import torch

from graphlint.findings import Related
from graphlint.runtime.dryrun import staleness
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Session


class Strays:
    """Follows the names of results in one program; `keep` takes the findings."""

    def __init__(self, session: Session, judge: Judge, keep: Keep) -> None:
        self._session, self._judge, self._keep = session, judge, keep
        self._strays: dict[int, tuple[str, Site, Site]] = {}
        self._results: set[int] = set()

    def closed(self, graph: Captured) -> None:
        """A capture has ended."""
        self._results |= graph.watch.outputs if graph.watch is not None else set()

    def replaying(self, graph: Captured, here: Site) -> None:
        """A graph is about to replay: which of its results' names lead elsewhere by now?"""
        for path, tensor in graph.watch.strayed() if graph.watch is not None else ():
            number = self._session.roles.identity(tensor)
            if number in self._results or path.isidentifier():
                continue  # the result of another graph; a local name is bound by the statements that one reads
            bound = staleness.assigned(graph.region.trace, path.rsplit(".", 1)[-1].split("[")[0])
            if bound is not None:
                self._strays[number] = (path, bound, here)

    def read(self, tensors: list[torch.Tensor], site: Site) -> None:
        """Values of these tensors are used, outside every region."""
        for tensor in tensors if self._strays else ():
            stray = self._strays.get(self._session.roles.identity(tensor))
            if stray is not None:
                path, bound, here = stray
                words = "was bound by the captured code and by eager code since; a replay binds nothing, and leaves it"
                finding = self._judge.finding("unrepeated-effect", path, words, bound)
                notes = (
                    Related(here.filename, here.row, "replayed here"),
                    Related(site.filename, site.row, "read here"),
                )
                self._keep(finding, *notes)
