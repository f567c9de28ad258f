"""A graph per declared length: which bucket a call goes to, what its padding holds, and which outputs are cut back.

capture_safe(fn, buckets={"tokens": (1, [512, 1024, 2048]), "mask": (1, [512, 1024, 2048])}, pad={"mask": False})
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphlint.runtime.errors import OutOfBucketError, SignatureError
from graphlint.runtime.spec import Spec, TensorSpec

Buckets = Mapping[str, tuple[int, Sequence[int]]]


@dataclass(frozen=True)
class Declared:
    """What the user declared: for each argument name the dimension that varies, the sizes, and what padding holds."""

    dims: dict[str, int]
    sizes: tuple[int, ...]
    pads: dict[str, float | int | bool]

    @classmethod
    def of(cls, buckets: Buckets, pad: Mapping[str, float | int | bool] | None) -> Declared:
        """Checks a declaration. Raises ValueError when sizes are missing, not positive, or differ between arguments."""
        sizes: tuple[int, ...] = ()
        for name, (_, wanted) in buckets.items():
            mine = tuple(sorted(set(wanted)))
            if not mine or mine[0] < 1:
                raise ValueError(f"buckets[{name!r}]: give at least one positive size")
            if sizes and mine != sizes:
                raise ValueError(
                    f"buckets[{name!r}]: all arguments of a call go by one length, so they share their sizes"
                )
            sizes = mine
        if not sizes:
            raise ValueError("buckets: name at least one argument")
        unknown = set(pad or ()) - set(buckets)
        if unknown:
            raise ValueError(f"pad: {sorted(unknown)} are not among the bucketed arguments")
        return cls({name: dim for name, (dim, _) in buckets.items()}, sizes, dict(pad or {}))

    def plan(self, spec: Spec) -> BucketPlan:
        """The declaration as leaf numbers of a call. Raises SignatureError when an argument is missing or too flat."""
        dims, pads = {}, {}
        for name, dim in self.dims.items():
            if name not in spec.names:
                raise SignatureError(
                    f"the bucketed argument `{name}` is not in this call ({', '.join(spec.names)})",
                    stage="preflight",
                    cure="Name it as the function does; nested tensors by their path, `batch['ids']`.",
                )
            i = spec.names.index(name)
            leaf = spec.leaves[i]
            if not isinstance(leaf, TensorSpec) or not -len(leaf.shape) <= dim < len(leaf.shape):
                raise SignatureError(f"the bucketed argument `{name}` has no dimension {dim}", stage="preflight")
            dims[i] = dim % len(leaf.shape)
            pads[i] = self.pads.get(name, 0)
        return BucketPlan(dims, pads, self.sizes, tuple(spec.names[i] for i in dims))


@dataclass(frozen=True)
class BucketPlan:
    """Buckets of one kind of call: `dims[i]` is the dimension of leaf i that varies, `pads[i]` what fills its tail."""

    dims: dict[int, int]
    pads: dict[int, Any]
    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def length(self, leaves: Sequence[Any]) -> int:
        """The length of a call. Raises SignatureError when the bucketed arguments disagree."""
        lengths = {leaves[i].shape[dim] for i, dim in self.dims.items()}
        if len(lengths) != 1:
            raise SignatureError(f"the bucketed arguments {', '.join(self.names)} have lengths {sorted(lengths)}")
        return int(lengths.pop())

    def choose(self, length: int) -> int:
        """The smallest size that holds the length. Raises OutOfBucketError when none does."""
        at = bisect.bisect_left(self.sizes, length)
        if at == len(self.sizes):
            raise OutOfBucketError(
                f"a call of length {length} is longer than the largest bucket ({self.sizes[-1]})", stage="replay"
            )
        return self.sizes[at]

    def widen(self, spec: Spec, size: int) -> Spec:
        """The spec of the padded call: contiguous tensors of the bucket's size."""
        leaves = list(spec.leaves)
        for i, dim in self.dims.items():
            leaf = leaves[i]
            assert isinstance(leaf, TensorSpec)
            shape = tuple(size if d == dim else n for d, n in enumerate(leaf.shape))
            leaves[i] = leaf._replace(shape=shape, stride=contiguous(shape))
        return spec._replace(leaves=tuple(leaves))

    def shorten(self, leaves: Sequence[Any], length: int) -> list[Any]:
        """The same call cut to a shorter length."""
        return [leaf.narrow(self.dims[i], 0, length) if i in self.dims else leaf for i, leaf in enumerate(leaves)]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, 0 where the size is 1 (as in `TensorSpec`)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(0 if size <= 1 else step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass
class Unpad:
    """Which dimension of each output carries the length; found by comparing calls of two lengths, or declared."""

    dims: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def compare(cls, short: Sequence[Any], length: int, long: Sequence[Any], size: int) -> Unpad:
        """Outputs of a call of `length` beside those of a call of `size` (not equal): where the shapes follow the
        length.
        """
        dims: dict[int, tuple[int, ...]] = {}
        for i, (a, b) in enumerate(zip(short, long, strict=False)):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dim() == b.dim():
                found = tuple(d for d in range(a.dim()) if a.shape[d] == length and b.shape[d] == size)
                if found:
                    dims[i] = found
        return cls(dims)

    def cut(self, outputs: Sequence[Any], length: int) -> list[Any]:
        """Views of the outputs without their padding."""
        out = list(outputs)
        for i, dims in self.dims.items():
            for dim in dims:
                out[i] = out[i].narrow(dim, 0, length)
        return out
