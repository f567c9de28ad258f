"""One output under two names: the result of the replay before and that of this one are the same memory."""

from __future__ import annotations

import ast
import sys
from types import FrameType
from typing import Any

import torch

from graphlint.findings import Related
from graphlint.runtime.dryrun import sites, statements
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Session


class Aliases:
    """Looks at operators that get one output of a graph twice; `keep` takes the findings."""

    def __init__(self, session: Session, judge: Judge, lines: list[tuple[str, int]], keep: Keep) -> None:
        self._session, self._judge, self._lines, self._keep = session, judge, lines, keep
        self._outputs: set[int] = set()

    def replaying(self, graph: Captured, here: Site) -> None:
        """A graph is about to replay: from the second time on an earlier result may still be held."""
        if graph.replays > 1 and graph.watch is not None:
            self._outputs |= graph.watch.outputs

    def read(self, given: list[torch.Tensor], site: Site) -> None:
        """An operator outside every region reads."""
        seen: set[int] = set()
        for tensor in given if len(given) > 1 and self._outputs else ():
            if id(tensor) in seen and self._session.roles.identity(tensor) in self._outputs:
                self._told(tensor, site)
                return
            seen.add(id(tensor))

    def _told(self, tensor: torch.Tensor, site: Site) -> None:
        names = _written_names(site) & _names_of(tensor)
        if len(names) < 2:
            return  # `y * y`
        places = [place for name in sorted(names) if (place := statements.copied_name(self._lines, name, names))]
        at = statements.line_site(places[0]) if places else site
        words = f"is the same memory as the newest output: {' and '.join(f'`{name}`' for name in sorted(names))}"
        finding = self._judge.finding("kept-output", "an earlier output", words, at)
        self._keep(finding, Related(site.filename, site.row, "used together here"))


def _written_names(site: Site) -> set[str]:
    """The names in the statement on a line."""
    tree = sites.parsed(site.filename)
    return {
        node.id
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.Name) and site.row <= node.lineno <= max(site.end_row, site.row)
    }


def _names_of(tensor: torch.Tensor) -> set[str]:
    """The names that the running function of the user has for a tensor."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and sites.is_library(frame.f_code.co_filename):
        frame = frame.f_back
    values: dict[str, Any] = sites.locals_of(frame) if frame is not None else {}
    return {name for name, value in values.items() if value is tensor}
