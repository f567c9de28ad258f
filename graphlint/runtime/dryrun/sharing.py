"""Graphs of one memory pool: outputs that the replay of another graph has written over, replays that overlap in time."""

from __future__ import annotations

from typing import Any

import torch

from graphlint.findings import Related
from graphlint.runtime.dryrun import memory, pools
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.modes import tensors
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Region, Session


class Sharing:
    """Follows the pools of one program; `keep` takes the findings."""

    def __init__(self, session: Session, judge: Judge, keep: Keep) -> None:
        self._session, self._judge, self._keep = session, judge, keep
        self._spaces: dict[object, pools.Space] = {}
        self._blocks: dict[int, dict[int, pools.Block]] = {}
        self._members: dict[object, list[Captured]] = {}
        self._rivals: dict[int, list[tuple[Captured, set[int], int]]] = {}
        self._races = memory.Races(session)
        self._lost: dict[int, Site] = {}

    def made(self, region: Region, result: Any) -> None:
        """An operator in a region has a result: new memory gets a block of the region's pool."""
        if region.pool is None or not hasattr(torch._C, "_storage_Use_Count"):
            return
        blocks = self._blocks.setdefault(id(region), {})
        space = self._spaces.setdefault(region.pool, pools.Space())
        for tensor in tensors(result):
            number = self._session.roles.identity(tensor)
            if number in region.born and number not in blocks and self._session.roles.of(tensor) == "device":
                with torch._C.DisableTorchFunction():
                    storage = tensor.untyped_storage()
                block = space.take(number, storage.nbytes(), _Unused(storage))
                if block is not None:
                    blocks[number] = block

    def closed(self, graph: Captured) -> None:
        """A capture has ended: which memory does it have in common with earlier ones of its pool?"""
        if graph.region.pool is None:
            return
        blocks = self._blocks.get(id(graph.region), {})
        for earlier in self._members.setdefault(graph.region.pool, []):
            theirs = self._blocks.get(id(earlier.region), {})
            mine, hit = pools.common(blocks.items(), theirs.items())
            if mine:
                meeting = -1 - len(self._rivals)
                self._rivals.setdefault(id(earlier), []).append((graph, mine, meeting))
                self._rivals.setdefault(id(graph), []).append((earlier, hit, meeting))
        self._members[graph.region.pool].append(graph)

    def replaying(self, graph: Captured, here: Site) -> None:
        """A graph is about to replay: it fills its own outputs and writes over what others left in the same memory."""
        for number in self._blocks.get(id(graph.region), ()):
            self._lost.pop(number, None)
        for rival, numbers, meeting in self._rivals.get(id(graph), ()):
            if rival.replays:
                self._lost.update(dict.fromkeys(numbers, here))
            for _, before, _, now, _ in self._races.touch(set(), {meeting}, here, "replay"):
                words = "runs at the same time as another graph of its pool, whose memory it uses too"
                note = Related(before.filename, before.row, "the other replay")
                self._keep(self._judge.finding("shared-pool-output", "CUDAGraph.replay", words, now), note)

    def read(self, tensors: list[torch.Tensor], site: Site) -> None:
        """Values of these tensors are used, outside every region."""
        for tensor in tensors if self._lost else ():
            over = self._lost.get(self._session.roles.identity(tensor))
            if over is not None:
                words = "reads an output whose memory the replay of another graph of the same pool has written over"
                finding = self._judge.finding("shared-pool-output", self._session.call or "the program", words, site)
                self._keep(finding, Related(over.filename, over.row, "replayed here"))


class _Unused:
    """Whether no tensor uses a storage any more; the recorded region itself holds it as a storage, not as a tensor."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def __call__(self) -> bool:
        return bool(torch._C._storage_Use_Count(self._storage._cdata) <= 1)
