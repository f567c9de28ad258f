"""The order of a program's work: reads before any replay, work on streams that nothing waits for, host writes too early."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphlint.findings import Related
from graphlint.runtime.dryrun import memory
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.records import Op, Site
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Region, Session

_WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")


class Ordering:
    """Follows who touched which memory on which stream; `keep` takes the findings."""

    def __init__(self, session: Session, judge: Judge, keep: Keep) -> None:
        self._session, self._judge, self._keep = session, judge, keep
        self.races = memory.Races(session)

    def operator(self, name: str, reads: set[int], writes: set[int], site: Site, on_device: bool) -> None:
        """An operator outside every region: on the device it is work of the current stream, on the host it writes
        pinned memory at once."""
        if on_device:
            self._session.streams.launch()
            self._conflicts(self.races.touch(reads, writes, site, name))
            if name in _WAITS:
                self.races.synchronized(self._session.streams.current)
            return
        for launched in self.races.host_writes(writes):
            words = "is written by the host while a replay may still copy from it"
            finding = self._judge.finding("early-host-write", "pinned memory", words, site)
            self._keep(finding, Related(launched.filename, launched.row, "replayed here"))

    def replaying(self, graph: Captured, site: Site) -> None:
        """A graph is about to replay."""
        if graph.watch is not None:
            writes = set(graph.watch.outputs) | _tape_writes(graph.region)
            self._conflicts(self.races.touch(set(graph.watch.inputs), writes, site, "replay"))

    def early(self, graphs: Iterable[Captured], reads: set[int], func: Any, site: Site) -> None:
        """Outputs that are read before any replay has filled them."""
        for graph in graphs:
            if (
                graph.replays == 0
                and graph.watch is not None
                and reads & graph.watch.outputs
                and func._schema.name != "aten::detach"
            ):
                made = self._made_by_region(graph, reads & graph.watch.outputs, site)
                if made is not None:
                    words = "is kept by code that eager runs too, and holds nothing before a replay"
                    self._keep(self._judge.finding("region-cache", made.call or made.name, words, made.site))
                elif graph.region.kind != "graphed-callable" and not func.is_view:
                    words = "reads an output of the graph before any replay has filled it"
                    self._keep(self._judge.finding("early-output-read", func._schema.name, words, site))

    @staticmethod
    def _made_by_region(graph: Captured, storages: set[int], site: Site) -> Op | None:
        """What made the memory, where the reader is the region's own code, run once more outside."""
        trace = graph.region.trace
        if site.place not in {op.site.place for op in trace.ops}:
            return None
        return next((trace.ops[graph.region.born[storage]] for storage in storages), None)

    def _conflicts(self, found: list[tuple[str, Site, str, Site, str]]) -> None:
        for _, before, was, now, what in found:
            if was == "replay":
                finding = self._judge.finding(
                    "unordered-replay", what, "uses memory of a replay on another stream without waiting for it", before
                )
                self._keep(finding, Related(now.filename, now.row, "used here"))
            elif what == "replay":
                finding = self._judge.finding(
                    "late-refill",
                    was,
                    "fills memory that the replay reads, on a stream that the replay does not wait for",
                    before,
                )
                self._keep(finding, Related(now.filename, now.row, "replayed here"))


def _tape_writes(region: Region) -> set[int]:
    """Outside memory that the region writes."""
    return {storage for op in region.trace.ops if op.name.endswith("_") for storage in op.outputs}
