"""A replay aside: what would a graph compute, were one of its inputs another? Everything is put back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphlint.runtime.dryrun.session import Region, Session
from graphlint.runtime.dryrun.tape import Freed
from graphlint.runtime.dryrun.undo import Undo

_LIMIT = 1 << 28  # bytes; a region that holds more is not run aside

Memory = dict[int, torch.UntypedStorage]


def outcome(session: Session, region: Region, change: Callable[[], None] | None = None) -> Memory:
    """The memory of a region after a replay that finds it as it is now, or as `change` leaves it: number of the memory
    -> a copy of its content. Empty where it can't be told."""
    storages = region.tape.storages()
    if sum(storage.nbytes() for storage in storages) > _LIMIT:
        return {}
    undo = Undo()
    with session.silence(), torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        try:
            for storage in storages:
                undo.keep(storage)
            if change is not None:
                change()
            region.tape.replay()
            return {session.roles.identity(content(storage)): storage.clone() for storage in storages}
        except Freed:
            return {}
        finally:
            undo.restore()


def content(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage as a tensor of uint8, without copying."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """What `tensor` would be, were its memory that other storage."""
    made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def parted(one: Memory, other: Memory, among: set[int]) -> set[int]:
    """The memory among those numbers whose content differs bit by bit."""
    return {
        number
        for number in among & set(one) & set(other)
        if not torch.equal(content(one[number]), content(other[number]))
    }
