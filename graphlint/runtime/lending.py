"""Does the caller keep results? A replay overwrites the last one, so a result that outlives the next call must be a
copy.

`loss = step(x)` in a loop lets go of each result; `losses.append(step(x))` does not, and looks the same from inside one
call. So the first calls of a graph hand out copies, and see which of them are still held two calls later: then results
are copies from the start, and nothing was overwritten. Else the graph's own memory is handed out, and each replay looks
first whether a result is held where none was before: by another name, by a view of it, or at another place of the
program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch

LESSONS = 2  # calls that get copies
MOST_LESSONS = 6  # with those that are added while it stays unclear whether a result is let go
PLACES = 4  # places learned before results are copies for good
ENTRIES: set[CodeType] = set()  # the functions by which a guard is called


def _unknown(address: int) -> int:
    return 0


storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _unknown)
"""How many tensors and views share the memory of a storage, by the address of its C++ object."""


def nobody(tensor: torch.Tensor) -> int:
    """No holders in C++ beside those that count as names."""
    return 0


def _count_of_autograd() -> Callable[[torch.Tensor], int]:
    """What counts the holders of a tensor in C++ (autograd, which saved it), where they do not count as names."""
    with torch.inference_mode(False), torch.enable_grad():
        saved, weight = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu", requires_grad=True)
        before = sys.getrefcount(saved)
        product = saved * weight
        seen = sys.getrefcount(saved) > before
        del product
    return nobody if seen else getattr(torch.Tensor, "_use_count", nobody)


autograd_uses = _count_of_autograd()


class Holders(NamedTuple):
    """What holds a result: Python names, and tensors and views of its memory."""

    names: int
    views: int
    hot: int = 0  # both, as the fast path counts them
    path: int = 1  # how many of the names are the fast path's


class Place(NamedTuple):
    """Where a call comes from: bytecode offset and code of the caller, and of its caller, who may be absent."""

    at: int
    code: CodeType
    back_at: int | None
    back_code: CodeType | None

    @classmethod
    def of(cls, frame: Any) -> Place:
        """The place of a frame as it is now."""
        back = frame.f_back
        return cls(frame.f_lasti, frame.f_code, back and back.f_lasti, back and back.f_code)


class Loan:
    """Copies of results that were handed out once, with what held each before the caller did."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._tensors = [tensor.detach().clone() for tensor in tensors]
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._before = [self._count(i) for i in range(len(self._tensors))]
        self.place: Place | None = None  # of the next call, where the copies were held when it came

    @property
    def copies(self) -> list[torch.Tensor]:
        """The copies, in the order of the results."""
        return list(self._tensors)

    def _count(self, i: int) -> int:
        tensor, storage = self._tensors[i], self._storages[i]
        return sys.getrefcount(tensor) + autograd_uses(tensor) + storage_uses(storage._cdata)

    @property
    def holders(self) -> int:
        """The largest number of names and views that hold one of the tensors now."""
        return max((self._count(i) - before for i, before in enumerate(self._before)), default=0)


@dataclass
class Lending:
    """What a graph has learned of its caller.

    Attributes:
        fresh: the outputs that lie in the graph's own memory (and not in an argument or in state).
        lessons: calls that still get copies.
        allowed: how many holders a result may have when the next call comes: 0, or 1 at the known places.
        places: where a result was held when the next call came, and was let go: bytecode offset -> code, of the
            caller; `beyond` of the caller's caller, for the caller may be a wrapper.
        taught: how often lessons were given.
        base: holders of each output that are the graph's own, filled when the fast path is made for the first time.
        late: the same for the later outputs in one sum, -1 where it was not counted.
        pinned: a view holds the graph's memory, so that only another graph can give it back its own.
    """

    fresh: list[int]
    lessons: int = LESSONS
    allowed: int = 0
    places: dict[int | None, CodeType | None] = field(default_factory=dict)
    beyond: dict[int | None, CodeType | None] = field(default_factory=dict)
    taught: int = 1
    base: dict[int, Holders] = field(default_factory=dict)
    late: int = -1
    pinned: bool = False
    _loans: list[Loan] = field(default_factory=list)
    _lent: int = 0

    @property
    def learning(self) -> bool:
        """Whether results are still copies, or the last of those copies was not judged yet."""
        return self.lessons > 0 or bool(self._loans)

    def lend(self, outputs: Sequence[Any]) -> list[Any]:
        """Copies of the fresh outputs, the other ones as they are."""
        loan = Loan([outputs[i] for i in self.fresh])
        self._loans.append(loan)
        self._lent += 1
        self.lessons -= 1
        lent = list(outputs)
        for i, copy in zip(self.fresh, loan.copies, strict=True):
            lent[i] = copy
        return lent

    def kept(self) -> bool:
        """Called when the next call comes: whether the caller keeps results. After the last lesson the rest is
        learned; a result that is held by then gets one lesson more, which shows whether it is let go.
        """
        if not self._loans:
            return False
        *older, last = self._loans
        if any(loan.holders > 0 for loan in older) or last.holders > 1:
            self._loans.clear()
            return True
        for loan in older:
            if loan.place is not None:
                self._learn(loan.place)
        del self._loans[:-1]  # they were let go
        last.place = Place.of(caller()) if last.holders == 1 else None
        if self.lessons > 0:
            return False
        known = last.place is None or self.knows(last.place)
        if known or self._lent >= MOST_LESSONS:
            self._loans.clear()
            return not known
        self.lessons = 1
        return False

    def _learn(self, place: Place) -> None:
        """A result was held when a call came from there, and was let go since."""
        self.allowed = 1
        self.places[place.at] = place.code
        self.beyond[place.back_at] = place.back_code

    def forget_holders(self) -> None:
        """The outputs are other tensors now."""
        self.base.clear()
        self.late = -1

    def knows(self, place: Place) -> bool:
        """Whether a result may be held when a call comes from there; the fast path spells this out."""
        return self.places.get(place.at) is place.code and self.beyond.get(place.back_at) is place.back_code

    def again(self) -> bool:
        """Lessons once more, since results are held where none were before; False when that happens too often."""
        self.taught += 1
        self.lessons, self._lent = LESSONS, 0
        self.forget_holders()
        return self.taught <= PLACES


def fresh_outputs(outputs: Sequence[Any], outside: Sequence[torch.Tensor]) -> list[int]:
    """Which outputs lie in memory that only the graph has: not in an argument, a parameter or a buffer."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in outside if tensor.layout is torch.strided}
    return [
        i for i, out in enumerate(outputs)
        if isinstance(out, torch.Tensor) and out.numel() and out.untyped_storage().data_ptr() not in theirs
    ]  # fmt: skip


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return bool(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())


def caller() -> Any:
    """The frame that called the guard."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code not in ENTRIES:
        frame = frame.f_back
    return frame.f_back or frame
