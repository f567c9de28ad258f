"""A whole program on a played device: what it captures is recorded, what it replays is compared with what eager would do at that moment.

`CUDAGraph.replay` here runs the recorded operators on the memory of the capture, so a program that a graph would break prints the same wrong numbers.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any

from graphlint.findings import Finding, Related
from graphlint.runtime import differential
from graphlint.runtime.dryrun import body as region_body
from graphlint.runtime.dryrun import hoststate, lines, sites, staleness
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.records import Site, Trace
from graphlint.runtime.dryrun.session import Region, Session
from graphlint.runtime.dryrun.tape import Freed
from graphlint.runtime.dryrun.undo import Undo

_COMPARED_REPLAYS = 12
_MANY_CAPTURES = 4
_MANY_GRAPHS = 9


class Watch:
    """Follows the graphs of one program: the session calls it when a region opens and closes and before a graph replays."""

    def __init__(self, session: Session, judge: Judge) -> None:
        self._session, self._judge = session, judge
        self._bodies: dict[int, region_body.Body] = {}
        self._labels: dict[int, differential.Labels] = {}
        self._lines: dict[int, Any] = {}
        self._captures: dict[tuple[str, int], list[Any]] = {}
        self.found: list[Finding] = []
        session.observer = self

    def opened(self, region: Region) -> None:
        """A capture begins: remember how to run its body again, and that nothing of it is executed on a device."""
        region.undo = Undo()
        body = region_body.of(sys._getframe(2))
        if body is not None:
            self._bodies[id(region)] = body
        tracing = lines.recorded(region.trace.lines)
        tracing.__enter__()
        self._lines[id(region)] = tracing

    def closed(self, region: Region) -> None:
        """The capture ends: judge it and name the memory it uses."""
        tracing = self._lines.pop(id(region), None)
        if tracing is not None:
            tracing.__exit__(None, None, None)
        if region.undo is not None:
            region.undo.restore()
        body = self._bodies.get(id(region))
        bound = body.bind() if body else None
        if bound is not None:
            self._labels[id(region)] = hoststate.labels(bound.roots, self._session.roles.identity)  # type: ignore[attr-defined]
        self._count(region)

    def _count(self, region: Region) -> None:
        """Captures at one line: again and again, or ever more of them alive."""
        graph = region.owner() if region.owner else None
        if graph is None:
            return
        graphs = self._captures.setdefault(region.site.place, [])
        graphs.append(weakref.ref(graph))
        alive = [g for ref in graphs if (g := ref()) is not None]
        if len(alive) >= _MANY_GRAPHS and len({_shape(g.region) for g in alive if g.region}) == len(alive):
            self._add("unbounded-graphs", "torch.cuda.graph", f"has captured {len(alive)} graphs that are all alive, one for every shape", region.site)
        elif len(graphs) >= _MANY_CAPTURES and len(alive) * 2 <= len(graphs):
            self._add("capture-in-loop", "torch.cuda.graph", f"captures again and again: {len(graphs)} captures so far, {len(alive)} alive", region.site)

    def replaying(self, graph: Any) -> None:
        """Before a replay: runs the region eagerly, compares, and takes everything back."""
        region: Region = graph.region
        body = self._bodies.get(id(region))
        if body is None or graph.replays > _COMPARED_REPLAYS or self._session.region is not None:
            return
        bound = body.bind()
        if bound is None:
            return
        roots = bound.roots  # type: ignore[attr-defined]
        now = hoststate.labels(roots, self._session.roles.identity)
        later, effects = self._eager(bound, roots, region)
        if later is None:
            return
        differences = differential.compare(region.trace, later, self._labels.get(id(region)), now)
        site = self._session.site()
        for finding in staleness.findings(self._judge, region.trace, differences, effects if graph.replays >= 1 else []):
            self._keep(finding, Related(site.filename, site.row, "replayed here"))

    def _eager(self, bound: Any, roots: dict[str, Any], region: Region) -> tuple[Trace | None, list[hoststate.Effect]]:
        """One eager run of the region that leaves nothing behind."""
        session = self._session
        state, streams = hoststate.HostState(roots), copy.deepcopy(session.streams.clocks)
        current = session.streams.current
        shadow = Region("shadow", region.site, region.error_mode)
        shadow.generators, shadow.undo = region.generators, Undo()
        session.region = shadow
        session.streams.current = session.streams.new()
        session.streams.begin(region.error_mode)
        failed = False
        try:
            with lines.recorded(shadow.trace.lines):
                bound()
        except Exception:
            failed = True
        finally:
            session.region = None
            session.streams.finish()
            session.streams.clocks, session.streams.current = streams, current
            effects = state.effects()
            state.restore()
            shadow.undo.restore()
        return (None if failed else shadow.trace), effects

    def freed(self, graph: Any, error: Freed) -> None:
        """The graph reads memory that nobody owns any more."""
        op = graph.region.trace.ops[error.index]
        names = self._labels.get(id(graph.region), {})
        kind, path = next((names[x.storage] for x in op.operands if x.born < 0 and x.storage in names), ("", ""))
        rule = {"parameter": "replaced-parameter", "buffer": "replaced-buffer"}.get(kind, "dead-input")
        self._add(rule, path or op.call or op.name, "reads memory whose owner let it go after the capture", op.site)

    def _add(self, rule: str, call: str, why: str, site: Site) -> None:
        self._keep(self._judge.finding(rule, call, why, site))

    def _keep(self, finding: Finding, *notes: Related) -> None:
        import msgspec

        key = (finding.code, finding.at.filename, finding.at.row)
        if key not in {(f.code, f.at.filename, f.at.row) for f in self.found}:
            self.found.append(msgspec.structs.replace(finding, related=(*finding.related, *notes)))

    def verdicts(self) -> list[Finding]:
        """All findings of the program: of its regions, of its replays."""
        found = [finding for region in self._session.regions for finding in self._judge.judge(region.trace)]
        gc.collect(0)
        keys = {(f.code, f.at.filename, f.at.row) for f in found}
        return found + [f for f in self.found if (f.code, f.at.filename, f.at.row) not in keys]


def _shape(region: Region) -> tuple[Any, ...]:
    return tuple(operand.shape for op in region.trace.ops[:4] for operand in op.operands)


def script_site(path: str) -> Site:
    """A site for a whole script."""
    return Site(sites.relative(path), 1)
