"""When are two results the same? Bitwise if eager repeats itself bitwise, else within what eager differs from
itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs too much: its label, the largest difference and what was allowed."""

    label: str
    largest: float
    allowed: float

    def __str__(self) -> str:
        return f"`{self.label}` differs by {self.largest:.3g} (allowed {self.allowed:.3g})"


Values = dict[str, torch.Tensor]


def copies(values: Values) -> Values:
    """Clones outside autograd, so that a later call can't change them."""
    with torch.inference_mode(False), torch.no_grad():
        return {label: tensor.detach().clone() for label, tensor in values.items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit that counts: NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    return bool(((a == b) | ((a != a) & (b != b))).all())


def noise(a: Values, b: Values) -> dict[str, float]:
    """How far two eager runs from the same state are apart, by label; 0.0 is bitwise equality."""
    return {label: _distance(a[label], b[label]) for label in a if label in b}


def difference(eager: Values, graph: Values, noise: dict[str, float], exact: bool) -> tuple[Difference | None, bool]:
    """The first difference beyond the noise, and whether everything was bitwise equal.

    Args:
        eager, graph: tensors by label; a label that only one side has is a difference.
        noise: what eager differs from itself, by label.
        exact: whether nothing but bitwise equality (or ten times the noise) will do; False allows rounding.
    """
    bitwise = True
    for label, want in eager.items():
        have = graph.get(label)
        if have is None:
            return Difference(label, float("inf"), 0.0), False
        if same_bits(want, have):
            continue
        bitwise = False
        scale = float(want.detach().abs().max()) if want.is_floating_point() and want.numel() else 1.0
        rounding = 0.0 if exact else _RTOL.get(want.dtype, 0.0) * max(scale, 1e-6)
        allowed = 10 * noise.get(label, 0.0) + rounding
        apart = _distance(want, have)
        if not apart <= allowed:
            return Difference(label, apart, allowed), False
    return None, bitwise


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if same_bits(a, b):
        return 0.0
    if a.shape != b.shape:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    apart = (a.to(wide) - b.to(wide)).abs()
    nan = (a != a) != (b != b)
    return float("inf") if bool(nan.any()) else float(apart.nan_to_num(0.0).max())
