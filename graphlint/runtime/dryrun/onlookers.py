"""All that look on while a program runs, between captures and replays; told in one go."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphlint.runtime.dryrun.aliases import Aliases
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.handed import Handed, statics
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.late import Late
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Region, Session
from graphlint.runtime.dryrun.sharing import Sharing
from graphlint.runtime.dryrun.stepping import Stepping
from graphlint.runtime.dryrun.strays import Strays
from graphlint.runtime.dryrun.tails import Tails
from graphlint.runtime.dryrun.workspaces import Workspaces

_SHOWING = ("tolist", "numpy", "__array__", "__repr__", "__format__")


class Use(NamedTuple):
    """One operator outside every region: the tensors on the device (or pinned) that it was given, those that it made
    there and those that it wrote in place."""

    func: Any
    args: Any
    kwargs: Any
    result: Any
    given: list[torch.Tensor]
    made: list[torch.Tensor]
    written: list[torch.Tensor]
    site: Site


class Onlookers:
    """Hands what happens in a program on to each onlooker that cares."""

    def __init__(self, session: Session, judge: Judge, lines: list[tuple[str, int]], keep: Keep) -> None:
        self._session = session
        self.stepping, self._sharing = Stepping(session, judge, keep), Sharing(session, judge, keep)
        self._strays, self._handed = Strays(session, judge, keep), Handed(session, judge, lines, keep)
        self._tails, self._late = Tails(session, judge, keep), Late(session, judge, keep)
        self._aliases = Aliases(session, judge, lines, keep)
        self.workspaces = Workspaces(session, judge, keep)

    def opened(self, graph: Captured) -> None:
        """A capture begins."""
        self._handed.opened(graph)

    def made(self, region: Region, result: Any) -> None:
        """An operator in a region has a result."""
        self._sharing.made(region, result)

    def closed(self, graph: Captured, roots: dict[str, Any]) -> None:
        """A capture has ended; `roots` are the names that its source uses."""
        graph.statics = statics(roots)
        self.stepping.closed(roots)
        self._sharing.closed(graph)
        self._strays.closed(graph)
        self.workspaces.closed(graph)

    def operator(self, use: Use) -> None:
        """An operator outside every region."""
        roles, func = self._session.roles, use.func
        overwritten = {roles.identity(tensor) for tensor in use.written}
        self.stepping.written(use.written, use.site)
        self._handed.written(use.written, use.site)
        self._late.made(func, use.made)
        self._late.written(func, use.args, use.written, use.site)
        if not func.is_view:
            self._aliases.read(use.given, use.site)
            self._read([tensor for tensor in use.given if roles.identity(tensor) not in overwritten], use.site)
        on_device = [tensor for tensor in use.written if roles.of(tensor) == "device"]
        self._tails.written(func, use.args, on_device, use.site)
        self.workspaces.launched(func._schema.name)

    def values(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator outside every region, on the host or the device."""
        self._tails.read(func, args, kwargs, result)

    def used(self, name: str, given: list[torch.Tensor]) -> None:
        """A torch function was called outside every region."""
        self._handed.used(name, given)
        if name.rsplit(".", 1)[-1] in _SHOWING and given:
            self._tails.shown(given[0])
            self._read(given[:1], self._session.site())

    def copied(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """A tensor was brought to the device or to the host."""
        self._tails.copied(tensor, copy)
        self._late.copied(tensor, copy)
        self._read([tensor], self._session.site())

    def _read(self, tensors: list[torch.Tensor], site: Site) -> None:
        self._sharing.read(tensors, site)
        self._strays.read(tensors, site)

    def replaying(self, graph: Captured, here: Site) -> None:
        """A graph is about to replay."""
        with self._session.silence(), torch._C.DisableTorchFunction():
            self.stepping.replaying(graph, here)
            self._handed.replaying(graph, here)
            self._late.replaying(graph, here)
            self._tails.replaying(graph, here)
            self._sharing.replaying(graph, here)
            self._strays.replaying(graph, here)
            self._aliases.replaying(graph, here)
            self.workspaces.replaying(graph, here)

    def settle(self) -> None:
        """The program has ended."""
        self._handed.settle()
