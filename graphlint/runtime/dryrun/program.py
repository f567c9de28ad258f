"""A whole program on a played device: what it captures is recorded, what it replays is compared with what eager would
do at that moment.

`CUDAGraph.replay` here runs the recorded operators on the memory of the capture, so a program that a graph would
break prints the same wrong numbers.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import msgspec
import torch

from graphlint.findings import Finding, Related
from graphlint.runtime.dryrun import body as region_body
from graphlint.runtime.dryrun import hoststate, lines, memory, sites, staleness, statements
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.modes import tensors
from graphlint.runtime.dryrun.onlookers import Onlookers, Use
from graphlint.runtime.dryrun.ordering import Ordering
from graphlint.runtime.dryrun.recaptures import Recaptures
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.reference import Reference
from graphlint.runtime.dryrun.session import Region, Session
from graphlint.runtime.dryrun.tape import Freed
from graphlint.runtime.dryrun.undo import Undo, gradients

_CASTS = ("to", "half", "bfloat16", "float", "double", "type", "type_as", "cuda", "cpu", "clone")


class Program:
    """Follows one program: the session calls it when a region opens and closes, before a graph replays, and with
    every operator outside."""

    def __init__(self, session: Session, judge: Judge) -> None:
        self._session, self._judge = session, judge
        self._graphs: dict[int, Captured] = {}
        self._origins: dict[int, Site] = {}
        self._lines: list[tuple[str, int]] = []
        self._busy = False
        self._frames: dict[int, tuple[str, int]] = {}
        self._casts: set[int] = set()
        self.found: list[Finding] = []
        self._ordering = Ordering(session, judge, self._keep)
        self._recaptures = Recaptures(judge, self._keep)
        self._onlookers = Onlookers(session, judge, self._lines, self._keep)
        self._reference = Reference(session, judge, self._lines, self._keep)
        session.observer = self

    @property
    def compared(self) -> int:
        """How many replays were compared with an eager run."""
        return self._reference.compared

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The program runs inside; `os._exit` ends it like `sys.exit`, so that its report is not lost."""
        leave = os._exit
        os._exit = sys.exit  # type: ignore[assignment]
        try:
            with lines.recorded(self._lines, self._line), self._steps():
                yield
        finally:
            os._exit = leave

    @contextlib.contextmanager
    def _steps(self) -> Iterator[None]:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def about_to_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._session.region is None:
                self._onlookers.stepping.steps(optimizer)

        handle = register_optimizer_step_pre_hook(about_to_step)
        try:
            yield
        finally:
            handle.remove()

    def _line(self, place: tuple[str, int]) -> None:
        """Before a line runs: whatever changed since was changed by the line before."""
        if self._busy or not self._graphs or self._session.region is not None or not self._lines:
            return
        self._busy = True
        number = id(_users_frame())
        before, self._frames[number] = self._frames.get(number), place
        try:
            with torch._C.DisableTorchFunction():
                for graph in self._graphs.values():
                    if graph.watch is not None:
                        self._look(graph.watch, before)
        finally:
            self._busy = False

    def _look(self, watch: memory.Watch, before: tuple[str, int] | None) -> None:
        """What changed was changed by the line before this one, or by the statement `before` it in the same frame,
        whose call has just come back."""
        last, known = self._lines[-1], set(watch.changes)
        watch.look(last)
        for path in set(watch.changes) - known if before is not None and before != last else ():
            name = path.rsplit(".", 1)[-1].split("[")[0]
            if before is not None and statements.assigns(before, name) and not statements.assigns(last, name):
                watch.changes[path] = msgspec.structs.replace(watch.changes[path], place=before)

    def opened(self, region: Region) -> None:
        """A capture begins: remember how to run its body again, and that nothing of it is executed on a device."""
        region.undo = Undo()
        graph = Captured(region, region_body.of(sys._getframe(2)), len(self._lines))
        bound = graph.body.bind() if graph.body else None
        if bound is not None:
            region.trace.cold = _cold(bound.roots)  # type: ignore[attr-defined]
            graph.gradients = gradients(bound.roots)  # type: ignore[attr-defined]
            graph.labels = hoststate.labels(bound.roots, self._session.roles.identity)  # type: ignore[attr-defined]
        self._onlookers.opened(graph)
        self._graphs[id(region)] = graph

    def closed(self, region: Region) -> None:
        """The capture ends: its writes are taken back, and its memory is followed from now on."""
        graph = self._graphs[id(region)]
        region.trace.lines = self._lines[graph.start :]
        if region.undo is not None:
            with self._session.silence():
                region.undo.restore()
            region.undo = None
        bound = graph.body.bind() if graph.body else None
        if bound is not None:
            roots = bound.roots  # type: ignore[attr-defined]
            names = graph.body.names() if graph.body else {}
            graph.watch = memory.Watch(self._session, region, roots, names)
            for storage, label in hoststate.labels(roots, self._session.roles.identity).items():
                graph.labels.setdefault(storage, label)
        self._onlookers.closed(graph, bound.roots if bound is not None else {})  # type: ignore[attr-defined]
        self._recaptures.closed(region, list(self._graphs.values()))

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator outside every region: does it touch a graph's memory too early, or unordered?"""
        session, identity = self._session, self._session.roles.identity
        self._onlookers.values(func, args, kwargs, result)
        given = [tensor for tensor in tensors((args, kwargs)) if session.roles.of(tensor) in ("device", "pinned")]
        made = [tensor for tensor in tensors(result) if session.roles.of(tensor) == "device"]
        if not given and not made:
            return
        written = _written(func, args, kwargs)
        reads, writes = {identity(t) for t in given}, {identity(t) for t in written}
        writes |= {identity(t) for t in made} - reads
        site = session.site()
        for storage in writes - reads:
            self._origins.setdefault(storage, site)
        if _autocast(func, args, session.call):
            self._casts |= writes
        self._ordering.early(self._graphs.values(), reads - writes, func, site)
        self._onlookers.operator(Use(func, args, kwargs, result, given, made, written, site))
        on_device = any(session.roles.of(t) == "device" for t in (*given, *made))
        self._ordering.operator(func._schema.name, reads, writes, site, on_device)

    def used(self, name: str, given: Iterator[torch.Tensor]) -> None:
        """A torch function was called outside every region."""
        self._onlookers.used(name, list(given))

    def copied(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """A tensor was brought to the device or to the host, outside every region."""
        self._onlookers.copied(tensor, copy)

    def records(self, site: Site) -> None:
        """A compiled function records a graph of its own."""
        self._onlookers.workspaces.records(site)

    def synchronized(self, stream: int | None) -> None:
        """The host has waited for a stream, or for all."""
        self._ordering.races.synchronized(stream)

    def replaying(self, owner: Any) -> None:
        """Before a replay: what was replaced, what is kept, and what eager would do now."""
        graph = self._graphs.get(id(owner.region))
        if graph is None or self._session.region is not None:
            return
        graph.replays += 1
        site = self._session.site()
        self._session.streams.launch()
        self._onlookers.replaying(graph, site)
        if graph.watch is not None:
            self._ordering.replaying(graph, site)
            with torch._C.DisableTorchFunction():
                graph.watch.look(self._lines[-1] if self._lines else site.place)
            self._replaced(graph, site)
            self._kept(graph)
        self._reference.compare(graph, site)

    def _replaced(self, graph: Captured, site: Site) -> None:
        assert graph.watch is not None
        for change in graph.watch.changes.values():
            self._keep(staleness.replaced(self._judge, change), Related(site.filename, site.row, "replayed here"))
        for storage in graph.watch.dead:
            self._lost(graph, storage)

    def _lost(self, graph: Captured, storage: int) -> None:
        """Memory that no name led to was let go: the value of a cached function, or a local of the code that
        captured."""
        origin = self._origins.get(storage)
        op = next((op for op in graph.region.trace.ops if any(x.storage == storage for x in op.operands)), None)
        if op is None:
            return
        if origin is not None and statements.cached_function(origin):
            self._add(
                "evicted-cache",
                origin.function,
                "was the only owner of memory that the graph reads, and has dropped it",
                origin,
            )
        else:
            inside = graph.body
            step = next(((f, r, n) for f, r, n in op.site.trace if inside and inside.row <= r <= inside.end_row), None)
            site = statements.line_site((step[0], step[1])) if step else op.site
            rule, words = "dead-input", "reads memory that nobody owns any more after the capture"
            if storage in self._casts:
                rule, words = "frozen-mode", "reads the copy of a weight that autocast had made before the capture"
                graph.explained = True
            self._add(rule, op.call or op.name, words, site)

    def _kept(self, graph: Captured) -> None:
        """Names that came to hold an output since the last replay: this replay overwrites what they hold."""
        living = [(index, tensor) for index, ref in enumerate(graph.outputs) if (tensor := ref()) is not None]
        counts = [sys.getrefcount(tensor) for _, tensor in living]
        if counts == graph.counts:
            return  # nobody new holds any
        graph.counts = counts
        holders = memory.holders(tuple(tensor for _, tensor in living))
        for index, tensor in living:
            now = holders[id(tensor)]
            fresh = now - graph.holders.setdefault(index, now if graph.replays == 1 else set())
            if graph.replays > 1 and fresh:
                name = min(key for _, key in fresh)
                place = statements.last_assigned(self._lines, name) or statements.last_assigned(self._lines, "[")
                if place is not None:
                    words = "keeps an output of the graph, which the next replay overwrites"
                    self._keep(
                        self._judge.finding(
                            "kept-output",
                            name if name.isidentifier() else "a container",
                            words,
                            statements.line_site(place),
                        )
                    )

    def freed(self, owner: Any, error: Freed) -> None:
        """The graph reads memory that nobody owns any more; where the names have not told it already, say so."""
        graph = self._graphs.get(id(owner.region))
        if graph is not None and graph.watch is not None and (graph.watch.changes or graph.watch.dead):
            return
        op = owner.region.trace.ops[error.index]
        self._add("dead-input", op.call or op.name, "reads memory whose owner let it go after the capture", op.site)

    def made(self, region: Region, result: Any) -> None:
        """Outputs of operators in a region, to see later who keeps them."""
        self._onlookers.made(region, result)
        graph = self._graphs.get(id(region))
        if graph is not None:
            graph.outputs.extend(weakref.ref(tensor) for tensor in tensors(result))

    def _add(self, rule: str, call: str, why: str, site: Site) -> None:
        self._keep(self._judge.finding(rule, call, why, site))

    def _keep(self, finding: Finding, *notes: Related) -> None:
        key = (finding.code, finding.at.filename, finding.at.row)
        if key not in {(f.code, f.at.filename, f.at.row) for f in self.found}:
            self.found.append(msgspec.structs.replace(finding, related=(*finding.related, *notes)))

    def verdicts(self) -> list[Finding]:
        """All findings of the program: of its regions, of its replays."""
        self._onlookers.settle()
        found = [finding for region in self._session.regions for finding in self._judge.judge(region.trace)]
        found += self._judge.judge(self._session.setup)
        crashes = {(f.at.filename, f.at.row) for f in found}
        result: dict[tuple[str, str, int], Finding] = {}
        for finding in [*found, *(f for f in self.found if (f.at.filename, f.at.row) not in crashes)]:
            result.setdefault((finding.code, finding.at.filename, finding.at.row), finding)
        return list(result.values())


def _cold(roots: dict[str, Any]) -> bool:
    """Whether an optimizer or scaler below the roots has not made its state yet."""
    for _, value in hoststate.reachable(roots):
        if isinstance(value, torch.optim.Optimizer) and not value.state:
            return True
        if isinstance(value, torch.amp.GradScaler) and value._scale is None:
            return True
    return False


def _users_frame() -> FrameType | None:
    """The innermost frame that is not graphlint's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and sites.is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _autocast(func: Any, args: Any, call: str) -> bool:
    """Whether an operator is a cast that autocast makes of a weight on its own, and keeps as long as it is open."""
    if func._schema.name != "aten::_to_copy" or call.rsplit(".", 1)[-1] in _CASTS or not args:
        return False
    return isinstance(args[0], torch.Tensor) and args[0].is_leaf and args[0].requires_grad


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes in place."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.extend(tensors((kwargs.get(argument.name, args[index] if index < len(args) else None),)))
    return found
