"""Where a tensor lives: on the device, on the host, in pinned host memory. On a CPU-only torch this is remembered,
not read.

Memory is named by its storage; a weak reference to the storage keeps its address from being given out again while we
remember it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from graphlint.runtime.dryrun.records import Role


def generator_identity(generator: Any) -> int:
    """Names a generator: torch wraps the same one in new Python objects."""
    return int(getattr(generator, "_cdata", id(generator)))


class Roles(Protocol):
    """Answers where tensors live."""

    def of(self, tensor: torch.Tensor) -> Role:
        """The role of a tensor's memory."""

    def mark(self, tensor: torch.Tensor, role: Role) -> None:
        """Remembers a role (a no-op where the device itself can be asked)."""

    def identity(self, tensor: torch.Tensor) -> int:
        """A number that names the tensor's memory as long as this object lives."""

    def living(self, numbers: set[int]) -> list[tuple[int, Any]]:
        """Weak references to the memory behind those numbers."""


class _Identities:
    """Storage -> number, never given out twice."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[object, int]] = {}
        self._next = 0

    def identity(self, tensor: torch.Tensor) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without one storage
            return -id(tensor)
        key = storage._cdata
        found = self._kept.get(key)
        if found is None:
            from torch.multiprocessing.reductions import StorageWeakRef

            self._next += 1
            found = self._kept[key] = (StorageWeakRef(storage), self._next)
        return found[1]

    def living(self, numbers: set[int]) -> list[tuple[int, Any]]:
        return [(number, ref) for ref, number in self._kept.values() if number in numbers]


class DeviceRoles(_Identities):
    """Roles on a machine with a device: the tensor says it itself."""

    def of(self, tensor: torch.Tensor) -> Role:
        """`device` for anything that is no CPU tensor."""
        if tensor.device.type != "cpu":
            return "device"
        return "pinned" if tensor.is_pinned() else "host"

    def mark(self, tensor: torch.Tensor, role: Role) -> None:
        """Nothing to remember."""


class RememberedRoles(_Identities):
    """Roles on a CPU-only machine, kept by storage; memory made outside the emulation is `unknown` until something
    shows where it belongs."""

    def __init__(self) -> None:
        super().__init__()
        self._roles: dict[int, Role] = {}

    def of(self, tensor: torch.Tensor) -> Role:
        """The remembered role, or `unknown`."""
        return self._roles.get(self.identity(tensor), "unknown")

    def mark(self, tensor: torch.Tensor, role: Role) -> None:
        """Sets the role of the tensor's memory."""
        self._roles[self.identity(tensor)] = role
