"""What eager would do now: before a replay the source of the region is run once more, compared with what was recorded,
and taken back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from graphlint.findings import Related
from graphlint.runtime import differential
from graphlint.runtime.dryrun import hoststate, sites, staleness, statements
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.modes import tensors
from graphlint.runtime.dryrun.records import Site, Trace
from graphlint.runtime.dryrun.session import Region, Session
from graphlint.runtime.dryrun.undo import Undo, gradients

_COMPARED_REPLAYS = 12

Keep = Callable[..., None]


class Reference:
    """Eager runs of captured regions, as they would begin at a replay; `keep` takes the findings."""

    def __init__(self, session: Session, judge: Judge, lines: list[tuple[str, int]], keep: Keep) -> None:
        self._session, self._judge, self._lines, self._keep = session, judge, lines, keep
        self.compared = 0

    def compare(self, graph: Captured, site: Site) -> None:
        """Runs the region of a graph that is about to replay, and tells what the replay will get wrong."""
        if graph.body is None or graph.replays > _COMPARED_REPLAYS:
            return
        bound = graph.body.bind()
        if bound is None:
            return
        roots = bound.roots  # type: ignore[attr-defined]
        with self._session.unwatched():
            self._asks_capturing(graph, bound, roots)
        later, effects = self._eager(bound, roots, graph)
        self.compared += 1
        if later is None or graph.explained:
            return
        named = {change.path for change in graph.watch.changes.values()} if graph.watch else set()
        now = hoststate.labels(roots, self._session.roles.identity)
        differences = [
            d
            for d in differential.compare(graph.region.trace, later, graph.labels, now)
            if not (named and d.kind == "address")
        ]
        if named:
            differences = [d for d in differences if d.kind not in ("branch", "shape")]
        if self._key(graph, differences):
            differences = [d for d in differences if d.kind in ("address", "state-born")]
        effects = [e for e in effects if not ("entries" in e.after and graph.body.appends(e.name))]
        for finding in staleness.findings(self._judge, graph.region.trace, differences, effects):
            self._keep(finding, Related(site.filename, site.row, "replayed here"))

    def _key(self, graph: Captured, differences: list[differential.Difference]) -> bool:
        """Whether the graph was fetched by a key that lacks a value which it froze."""
        body = graph.body
        frozen = next((d for d in differences if d.kind in ("scalar", "shape", "branch")), None)
        row = body.key_row() if body is not None and body.otherwise and frozen is not None else 0
        if body is None or frozen is None or not row:
            return False
        names = ", ".join(f"`{name}`" for name in body.otherwise)
        words = f"finds a graph that froze other values of {names}: {frozen.before} at capture, {frozen.after} now"
        finding = self._judge.finding(
            "incomplete-graph-key", "the key", words, statements.line_site((sites.relative(body.filename), row))
        )
        self._keep(finding, Related(frozen.site.filename, frozen.site.row, "used here"))
        return True

    def _asks_capturing(self, graph: Captured, bound: Any, roots: dict[str, Any]) -> None:
        """A region that asks whether it is being captured must compute the same either way."""
        asked = next((event for event in graph.region.trace.events if event.kind == "asks-capturing"), None)
        if asked is None or graph.replays > 1:
            return
        results = []
        for answer in (True, False):
            self._session.answers_capturing = answer
            try:
                self._eager(bound, roots, graph)
            finally:
                self._session.answers_capturing = True
            results.append(self._session.last)
        if not all(isinstance(x, torch.Tensor) for x in results) or results[0].shape != results[1].shape:
            return
        if not torch.allclose(results[0].double(), results[1].double(), equal_nan=True):
            words = "chooses other arithmetic in a capture than outside of one, and its result differs"
            self._keep(self._judge.finding("frozen-flag", asked.call, words, asked.site))

    def _eager(self, bound: Any, roots: dict[str, Any], graph: Captured) -> tuple[Trace | None, list[hoststate.Effect]]:
        """One eager run of the region, as it would begin now, that leaves nothing behind."""
        session, region = self._session, graph.region
        state, clocks, current = (
            hoststate.HostState(roots),
            copy.deepcopy(session.streams.clocks),
            session.streams.current,
        )
        shadow = Region("shadow", region.site, region.error_mode)
        shadow.generators, shadow.undo = region.generators, Undo()
        before = gradients(roots)
        for parameter, gradient in before.values():
            if (
                gradient is not None
                and session.roles.identity(gradient) in region.born
                and graph.gradients.get(id(parameter), (0, 0))[1] is None
            ):
                parameter.grad = None  # the captured run found none, and the graph makes its own
        start = len(self._lines)
        session.region = shadow
        session.streams.current = session.streams.new()
        session.streams.begin(region.error_mode)
        failed = False
        try:
            with graph.modes():
                result = bound()
            session.last = next(tensors(result), None)
            session.last = session.last.detach().clone() if session.last is not None else shadow.last
        except Exception:
            failed = True
        finally:
            session.region = None
            session.streams.finish()
            session.streams.clocks, session.streams.current = clocks, current
            shadow.trace.lines = self._lines[start:]
            del self._lines[start:]
            effects = state.effects()
            state.restore()
            with session.silence():
                shadow.undo.restore()
            for parameter, gradient in before.values():
                parameter.grad = gradient
        return (None if failed else shadow.trace), effects
