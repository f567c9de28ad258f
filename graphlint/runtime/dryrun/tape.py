"""A recorded region that can be run again, as a graph replays it: the same operators on the same memory with the same
numbers.

Memory made inside the region is kept alive (a graph owns its pool). Memory from outside is held weakly, exactly as a
graph holds a bare address: when its owner lets it go, the replay has nothing true to read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten


class Freed(Exception):
    """Memory that the recorded region reads was let go by its owner; `index` is the operator's place in the trace."""

    def __init__(self, index: int) -> None:
        super().__init__(f"operator {index} of the recorded region reads memory that was freed after the capture")
        self.index = index


class Slot:
    """A tensor argument by its memory: storage, dtype, offset, shape and strides."""

    __slots__ = ("dtype", "layout", "strong", "weak")

    def __init__(self, tensor: torch.Tensor, keep: bool) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        self.dtype = tensor.dtype
        with torch._C.DisableTorchFunction():  # the memory's real device, not the one that is played
            device = tensor.device
        self.layout = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), device)
        self.strong = storage if keep else None
        self.weak = None if keep else StorageWeakRef(storage)

    def storage(self) -> torch.UntypedStorage | None:
        """The memory, or None when it is gone."""
        if self.strong is not None or self.weak is None:
            return self.strong
        return None if self.weak.expired() else torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)

    def tensor(self) -> torch.Tensor | None:
        """The tensor on that memory, or None when the memory is gone."""
        storage = self.storage()
        if storage is None:
            return None
        offset, shape, stride, device = self.layout
        return torch.empty(0, dtype=self.dtype, device=device).set_(storage, offset, shape, stride)


class Tape:
    """The operators of one region, in order, ready to be replayed."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, Callable[..., Any], list[Any], Any, list[Slot | None]]] = []
        self.complete = True

    def record(
        self,
        index: int,
        func: Any,
        args: Any,
        kwargs: Any,
        outputs: Any,
        born: dict[int, int],
        identity: Callable[[torch.Tensor], int],
    ) -> None:
        """Adds one operator after it ran; `born` names the memory that was made inside the region."""
        leaves, spec = tree_flatten((args, kwargs))
        try:
            slots = [Slot(x, identity(x) in born) if isinstance(x, torch.Tensor) else x for x in leaves]
            given = {identity(x) for x in leaves if isinstance(x, torch.Tensor)}
            flat, _ = tree_flatten(outputs)
            results = [
                Slot(x, True) if isinstance(x, torch.Tensor) and identity(x) not in given else None for x in flat
            ]
        except (NotImplementedError, RuntimeError):
            self.complete = False
            return
        if any(result is not None for result in results) or func._schema.is_mutable:
            self._entries.append((index, func, slots, spec, results))

    def storages(self) -> list[torch.UntypedStorage]:
        """All living memory that the operators read or write, each once."""
        found: dict[int, torch.UntypedStorage] = {}
        for _, _, slots, _, results in self._entries:
            for slot in (*slots, *results):
                storage = slot.storage() if isinstance(slot, Slot) else None
                if storage is not None:
                    found[storage._cdata] = storage
        return list(found.values())

    def replay(self) -> None:
        """Runs every operator again on the memory it was recorded with, unseen by any mode. Raises `Freed` where
        outside memory is gone."""
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for index, func, slots, spec, results in self._entries:
                leaves = []
                for slot in slots:
                    value = slot.tensor() if isinstance(slot, Slot) else slot
                    if isinstance(slot, Slot) and value is None:
                        raise Freed(index)
                    leaves.append(value)
                args, kwargs = tree_unflatten(leaves, spec)
                fresh, _ = tree_flatten(func(*args, **kwargs))
                for new, old in zip(fresh, results, strict=False):
                    target = old.tensor() if old is not None else None
                    if target is not None and target.shape == new.shape:
                        target.copy_(new)
