"""The graph's own input buffers: how they are laid out, and how a call's tensors get into them.

The caller's tensors are never captured: a graph that did would write into them at every later replay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from graphlint.runtime.buckets import BucketPlan
from graphlint.runtime.errors import SignatureError
from graphlint.runtime.spec import Spec, TensorSpec, unflatten_call


def collapsed(leaf: TensorSpec) -> tuple[int | slice, ...] | None:
    """An index that takes broadcast dimensions (stride 0) down to size 1; None when there are none."""
    if not any(step == 0 and size > 1 for size, step in zip(leaf.shape, leaf.stride, strict=True)):
        return None
    return tuple(
        slice(0, 1) if step == 0 and size > 1 else slice(None)
        for size, step in zip(leaf.shape, leaf.stride, strict=True)
    )


def overlaps(leaf: TensorSpec) -> bool:
    """Whether two indices of the tensor share memory in another way than by broadcasting."""
    dims = sorted((step, size) for size, step in zip(leaf.shape, leaf.stride, strict=True) if size > 1 and step != 0)
    extent = 1
    for step, size in dims:
        if step < extent:
            return True
        extent += (size - 1) * step
    return False


def span(leaf: TensorSpec) -> int:
    """Elements of memory from the first to the last of the tensor; broadcast dimensions take none."""
    return 1 + sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride, strict=True))


def empty_like_spec(leaf: TensorSpec) -> torch.Tensor:
    """New memory with the shape and strides of the spec; broadcast dimensions share memory as they did."""
    index = collapsed(leaf)
    if index is None:
        stride = tuple(1 if size <= 1 else step for size, step in zip(leaf.shape, leaf.stride, strict=True))
        return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device)
    small = tuple(1 if isinstance(i, slice) and i.stop == 1 else n for i, n in zip(index, leaf.shape, strict=True))
    return torch.empty(small, dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


class StaticInputs:
    """One buffer per distinct tensor argument.

    Args:
        spec: the call that the graph serves; with buckets, already widened to the bucket.
        leaves: the call's leaves; plain values are kept as they are.
        plan, size: the bucket, if the call has one.
        differentiable: buffers require grad where the arguments do (mode "autograd").
    """

    def __init__(
        self, spec: Spec, leaves: Sequence[Any], plan: BucketPlan | None, size: int, differentiable: bool
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.size = size
        self.filled = size  # up to where a bucketed buffer may hold data of an earlier call
        self.leaves: list[Any] = list(leaves)
        self.unique = [i for i in spec.tensor_indices if spec.aliases[i] == i]
        self.copied = [i for i in self.unique if _leaf(spec, i).shape.count(0) == 0]
        with torch.inference_mode(False), torch.no_grad():
            for i in self.unique:
                self.leaves[i] = empty_like_spec(_leaf(spec, i))
        for i in spec.tensor_indices:
            self.leaves[i] = self.leaves[spec.aliases[i]]
        self.targets = [self._target(i) for i in self.copied]
        if differentiable:
            for i in self.unique:
                if _leaf(spec, i).requires_grad:
                    self.leaves[i].requires_grad_(True)

    def _target(self, i: int) -> torch.Tensor:
        """Where the copy of leaf i goes: the buffer without its broadcast dimensions."""
        index = collapsed(_leaf(self.spec, i))
        buffer: torch.Tensor = self.leaves[i].detach()
        return buffer if index is None else buffer[index]

    def source(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """What is copied for leaf i: the caller's tensor without its broadcast dimensions, outside autograd."""
        index = collapsed(_leaf(self.spec, i))
        tensor = tensor.detach() if tensor.requires_grad else tensor
        return tensor if index is None else tensor[index]

    def load(self, leaves: Sequence[Any]) -> None:
        """Copies a call's tensors into the buffers; a shorter call is padded up to the bucket."""
        if self.plan is not None:
            self._load_padded(leaves, self.plan)
            return
        pairs = [
            (t, leaves[i]) for t, i in zip(self.targets, self.copied, strict=True) if leaves[i] is not self.leaves[i]
        ]
        if pairs:
            sources = [self.source(i, leaves[i]) for i in self.copied if leaves[i] is not self.leaves[i]]
            with torch.no_grad():
                torch._foreach_copy_([t for t, _ in pairs], sources)

    def _load_padded(self, leaves: Sequence[Any], plan: BucketPlan) -> None:
        length = plan.length(leaves)
        with torch.no_grad():
            for i in self.copied:
                buffer, dim = self.leaves[i].detach(), plan.dims.get(i)
                source = leaves[i].detach()
                if dim is None:
                    buffer.copy_(source)
                    continue
                if source is not self.leaves[i]:
                    buffer.narrow(dim, 0, length).copy_(source)
                if self.filled > length:
                    buffer.narrow(dim, length, self.filled - length).fill_(plan.pads.get(i, 0))
        self.filled = length

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the body is captured with."""
        return unflatten_call(self.spec.tree, self.leaves)

    def poison(self) -> None:
        """Fills floating-point buffers with NaN: a replay that does not copy an input will show it."""
        self.filled = self.size
        with torch.no_grad():
            for i in self.copied:
                buffer = self.leaves[i].detach()
                if buffer.is_floating_point() and collapsed(_leaf(self.spec, i)) is None:
                    buffer.fill_(float("nan"))

    @property
    def nbytes(self) -> int:
        """Bytes in the buffers."""
        return sum(self.leaves[i].untyped_storage().nbytes() for i in self.unique)


def check_inputs(spec: Spec, leaves: Sequence[Any], device_type: str, mode: str) -> torch.device | None:
    """The device of the arguments, or None when no tensor is among them.

    Raises:
        SignatureError: tensors on the host or on two devices, memory that overlaps itself, or a gradient that would be
            lost.
    """
    device: torch.device | None = None
    for i in spec.tensor_indices:
        leaf, name = _leaf(spec, i), spec.names[i]
        if leaf.device.type != device_type:
            raise SignatureError(
                f"argument `{name}` is a tensor on {leaf.device}; a graph reads device memory",
                rule="unsupported-argument" if leaf.shape else "cpu-scalar-tensor",
                stage="preflight",
                cure=f"Move it with `.to('{device_type}', non_blocking=True)` before the call.",
            )
        if device is not None and leaf.device != device:
            raise SignatureError(
                f"argument `{name}` is on {leaf.device}, an earlier one on {device}",
                rule="two-devices",
                stage="preflight",
            )
        device = leaf.device
        if overlaps(leaf):
            raise SignatureError(
                f"argument `{name}` (strides {leaf.stride}) overlaps itself, so a copy can't be laid out alike",
                rule="overlapping-input",
                stage="preflight",
            )
        if leaf.requires_grad and spec.context.grad and mode != "autograd":
            raise SignatureError(
                f"argument `{name}` requires grad; in mode {mode!r} its gradient would land in the graph's own buffer",
                rule="live-autograd-output",
                stage="preflight",
                cure='Use mode="autograd", or pass `.detach()`.',
            )
    return device


def shared_memory(spec: Spec, leaves: Sequence[Any], written: set[int]) -> str:
    """The name of an argument that shares memory with another one (not the very same tensor) and is written; else
    empty.
    """
    spans: list[tuple[int, int, int]] = []
    for i in spec.tensor_indices:
        tensor = leaves[i]
        if spec.aliases[i] == i and tensor.numel():
            size = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            spans.append((tensor.data_ptr(), tensor.data_ptr() + size * tensor.element_size(), i))
    spans.sort()
    for (_, end, i), (start, _, j) in itertools.pairwise(spans):
        if start < end and leaves[i].untyped_storage().data_ptr() in written:
            return spec.names[j]
    return ""


def _leaf(spec: Spec, i: int) -> TensorSpec:
    leaf = spec.leaves[i]
    assert isinstance(leaf, TensorSpec)
    return leaf
