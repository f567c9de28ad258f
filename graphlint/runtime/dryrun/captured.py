"""One captured region of a program, as long as the program runs."""

from __future__ import annotations

from types import CodeType
from typing import Any

from graphlint.runtime import differential
from graphlint.runtime.dryrun import body as region_body
from graphlint.runtime.dryrun import memory
from graphlint.runtime.dryrun.session import Region, Session
from graphlint.runtime.dryrun.undo import modes_of_now


class Captured:
    """What a program's watch knows of one captured region."""

    def __init__(self, region: Region, body: region_body.Body | None, start: int) -> None:
        self.region, self.body, self.start = region, body, start
        self.modes = modes_of_now()
        self.gradients: dict[int, Any] = {}
        self.labels: differential.Labels = {}
        self.watch: memory.Watch | None = None
        self.outputs: list[Any] = []
        self.holders: dict[int, set[tuple[int, str]]] = {}
        self.counts: list[int] = []
        self.replays = 0
        self.explained = False  # a finding says already why eager runs other operators
        self.statics: list[tuple[tuple[str, ...], Any]] = []  # tensors that refills may be meant for, by their words
        self.handed: dict[tuple[CodeType, tuple[str, ...]], Any] = {}  # arguments of the functions that captured
        self.seen = 0  # lines executed up to the last replay

    def shown(self, session: Session) -> set[int]:
        """The memory that a replay writes and the program can see: outputs that are kept, memory from outside."""
        kept = {session.roles.identity(tensor) for ref in self.outputs if (tensor := ref()) is not None}
        born = self.region.born
        return kept | {number for op in self.region.trace.ops for number in op.outputs if number not in born}
