"""Inputs that a program refills in part: does the rest, which is of an earlier batch, reach what the program reads?"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from graphlint.findings import Finding, Related
from graphlint.runtime.dryrun import aside
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.modes import tensors
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Session
from graphlint.runtime.dryrun.tape import Slot

_VALUES = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item")
_OVERWRITES = ("aten::fill_", "aten::zero_")


class _Fill:
    """How far one memory has been filled from its beginning, in elements: since the last replay, and ever before."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, int]] = []
        self.high = 0
        self.site: Site | None = None
        self.memory: Slot | None = None
        self.scattered = False

    def add(self, first: int, last: int) -> None:
        """Elements from `first` up to `last` have been written."""
        before = self.pending[-1] if self.pending else (-1, -1)
        if before[0] <= first <= before[1]:
            self.pending[-1] = (before[0], max(before[1], last))
        else:
            self.pending.append((first, last))

    def head(self) -> int:
        """The end of the head that the writes since the last replay cover; 0 for none, or where they leave holes."""
        end = 0
        for first, last in sorted(self.pending):
            if first > end:
                self.scattered = True  # slots, rings and caches are filled here and there on purpose
                return 0
            end = max(end, last)
        return end


class Tails:
    """Follows partial refills of one program; `keep` takes the findings."""

    def __init__(self, session: Session, judge: Judge, keep: Keep) -> None:
        self._session, self._judge, self._keep = session, judge, keep
        self._fills: dict[int, _Fill] = {}
        #: number of memory -> its content, what it would be with another tail, the finding
        self._suspects: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage, Finding]] = {}

    def written(self, func: Any, args: Any, written: list[torch.Tensor], site: Site) -> None:
        """An operator outside every region has written these tensors on the device."""
        name = func._schema.name
        cleared = name in _OVERWRITES or (name == "aten::copy_" and self._of(args[1]) is None)
        for tensor in written:
            number = self._session.roles.identity(tensor)
            if cleared:
                self._suspects.pop(number, None)
            fill = self._fills.setdefault(number, _Fill())
            first = tensor.storage_offset() if tensor.is_contiguous() else 0
            last = first + tensor.numel() if tensor.is_contiguous() else _elements(tensor)
            fill.add(first, last)
            fill.site, fill.memory = site, Slot(tensor, keep=False)

    def replaying(self, graph: Captured, here: Site) -> None:
        """A graph is about to replay: which of its inputs hold a head of now and a tail of before?"""
        if graph.watch is None:
            return
        for number in graph.watch.outputs:
            self._suspects.pop(number, None)
        for number in graph.watch.inputs & set(self._fills):
            fill = self._fills[number]
            head, fill.pending = fill.head(), []
            if 0 < head < fill.high and not fill.scattered:
                self._suspect(graph, number, fill, head, here)
            fill.high = max(fill.high, head)

    def _suspect(self, graph: Captured, number: int, fill: _Fill, head: int, here: Site) -> None:
        like, high = fill.memory.tensor() if fill.memory is not None else None, fill.high
        if like is None or fill.site is None:
            return

        def other_tail() -> None:
            whole = like.as_strided((high,), (1,), 0)
            if bool(whole[head:].any()):
                whole[head:].zero_()
            else:
                whole[head:].fill_(1)

        now = aside.outcome(self._session, graph.region)
        other = aside.outcome(self._session, graph.region, other_tail)
        words = f"refills {head} of {high} elements; the rest is of an earlier batch, and the results depend on it"
        finding = self._judge.finding("partial-refill", "copy_", words, fill.site, related=[_note(here)])
        for output in aside.parted(now, other, graph.shown(self._session) - {number}):
            self._suspects[output] = (now[output], other[output], finding)

    def read(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator outside every region, on either side of the border: what it computes from a suspect is followed;
        what it hands to Python or adds to other memory is told."""
        suspects = {id(tensor): suspect for tensor in tensors((args, kwargs)) if (suspect := self._of(tensor))}
        if not suspects or func.is_view or "nondeterministic_seeded" in {str(tag).split(".")[-1] for tag in func.tags}:
            return
        finding = next(iter(suspects.values()))[2]
        if func._schema.name == "aten::copy_":
            self.copied(args[1], args[0])
        elif func._schema.name in _VALUES or func._schema.is_mutable:
            self._keep(finding)
        else:
            self._compute(func, args, kwargs, suspects, result, finding)

    def _compute(self, func: Any, args: Any, kwargs: Any, suspects: Any, result: Any, finding: Finding) -> None:
        """Runs an operator with the other tail too."""

        def swapped(value: Any) -> Any:
            suspect = suspects.get(id(value))
            return aside.like(value, suspect[1]) if suspect is not None else value

        with self._session.silence(), torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            others = func(*tree_map(swapped, args), **tree_map(swapped, kwargs))
            for made, other in zip(tensors(result), tensors(others), strict=False):
                if made.shape != other.shape:
                    self._keep(finding)
                elif not torch.equal(made, other):
                    self._follow(made, other, finding)

    def _follow(self, tensor: torch.Tensor, other: torch.Tensor, finding: Finding) -> None:
        now, then = (tensor.detach().untyped_storage().clone() for _ in range(2))
        aside.like(tensor, then).copy_(other)
        self._suspects[self._session.roles.identity(tensor)] = (now, then, finding)

    def _of(self, tensor: torch.Tensor) -> Any:
        """What is suspected of a tensor whose own part of the memory the tail reaches."""
        suspect = self._suspects.get(self._session.roles.identity(tensor)) if self._suspects else None
        return suspect if suspect is not None and self._parted(tensor, suspect) else None

    def copied(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """A tensor has been copied: what its copy would be with the other tail."""
        suspect = self._of(tensor)
        if suspect is not None:
            with self._session.silence(), torch._C.DisableTorchFunction(), torch.no_grad():
                self._follow(copy, aside.like(tensor, suspect[1]), suspect[2])

    def shown(self, tensor: torch.Tensor) -> None:
        """A tensor's values are used: told, if the tail reaches them."""
        suspect = self._of(tensor)
        if suspect is not None:
            self._keep(suspect[2])

    def _parted(self, tensor: torch.Tensor, suspect: tuple[Any, Any, Finding]) -> bool:
        with self._session.silence(), torch._C.DisableTorchFunction():
            return not torch.equal(aside.like(tensor, suspect[0]), aside.like(tensor, suspect[1]))


def _elements(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1))


def _note(here: Site) -> Related:
    return Related(here.filename, here.row, "replayed here")
