"""When are two results the same? Bitwise, where nothing stands against it.

Two things do. Eager may differ from itself; that is measured. And the same arithmetic may be done by another kernel in
a capture than outside of one (libraries choose by workspace, torch's own code and others' ask whether a stream is
captured); that is rounding. It is allowed unless deterministic algorithms are asked for: relative to a result's size,
and for state relative to how far the call moved it, taken over all tensors of a kind. A sum over a kind is needed: Adam
turns a gradient that is nothing but rounding into a full step, but such parameters are few. A tensor that the graph did
not move at all is a difference whatever the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

_RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_EXACT_ARITHMETIC = 1e-4  # what float32 sums that are grouped otherwise come to


@dataclass(frozen=True)
class Tolerance:
    """How close a replay must come to eager.

    Args:
        exact: nothing but bitwise equality (or ten times what eager differs from itself) will do.
        rounding: the relative rounding of the coarsest arithmetic in the call: 1e-4 for float32, more for TF32 and
            half precision.
    """

    exact: bool
    rounding: float = _EXACT_ARITHMETIC

    def of_result(self, dtype: torch.dtype) -> float:
        """Allowed difference of a result, relative to its largest element."""
        return max(_RTOL.get(dtype, 0.0), self.rounding if self.rounding > _EXACT_ARITHMETIC else 0.0)

    @property
    def words(self) -> str:
        """What a result that is not bitwise equal came to, for the report."""
        return "within eager's own noise" if self.exact else "within rounding"

    @property
    def of_step(self) -> float:
        """Allowed difference of all state of a kind, relative to how far the call moved it."""
        return min(0.2, max(0.02, 5 * self.rounding))


@dataclass(frozen=True)
class Before:
    """State as it was when the call began, by label, and the kind of each label; what was not there counts as zero."""

    values: dict[str, torch.Tensor]
    kinds: dict[str, str]

    def of(self, label: str, like: torch.Tensor) -> torch.Tensor:
        """One tensor of it."""
        old = self.values.get(label)
        return old if old is not None and old.shape == like.shape else torch.zeros_like(like)


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


def difference(
    eager: Values,
    graph: Values,
    noise: dict[str, float],
    tolerance: Tolerance,
    before: Callable[[], Before] | None = None,
) -> tuple[Difference | None, bool]:
    """The first difference beyond what is allowed, and whether everything was bitwise equal.

    Args:
        eager, graph: tensors by label; a label that only one side has is a difference.
        noise: what eager differs from itself, by label.
        before: gives the state before the call; asked only where something differs and rounding is allowed.
    """
    unequal = [label for label, want in eager.items() if label not in graph or not same_bits(want, graph[label])]
    if not unequal:
        return None, True
    start = before() if before is not None and not tolerance.exact else Before({}, {})
    moved = [label for label in unequal if label in start.kinds and label in graph]
    for label in unequal:
        if label not in moved and (found := _result(label, eager, graph, noise, tolerance)) is not None:
            return found, False
    return _state(moved, eager, graph, noise, tolerance, start), False


def _result(
    label: str, eager: Values, graph: Values, noise: dict[str, float], tolerance: Tolerance
) -> Difference | None:
    """The difference of one tensor by its own size."""
    want, have = eager[label], graph.get(label)
    if have is None:
        return Difference(label, float("inf"), 0.0)
    scale = float(want.detach().abs().max()) if want.is_floating_point() and want.numel() else 1.0
    rounding = 0.0 if tolerance.exact else tolerance.of_result(want.dtype) * max(scale, 1e-6)
    allowed = 10 * noise.get(label, 0.0) + rounding
    apart = _distance(want, have)
    return None if apart <= allowed else Difference(label, apart, allowed)


def _state(
    labels: list[str], eager: Values, graph: Values, noise: dict[str, float], tolerance: Tolerance, start: Before
) -> Difference | None:
    """The difference of state, by kind and by how far the call moved all of that kind."""
    kinds: dict[str, list[str]] = {}
    for label in labels:
        want, have = eager[label], graph[label]
        if not want.is_floating_point() or want.shape != have.shape or bool((want.isnan() != have.isnan()).any()):
            return Difference(label, _distance(want, have), 0.0)
        if same_bits(have, start.of(label, have)):
            return Difference(label, _distance(want, have), 0.0)  # the graph left it as it was
        kinds.setdefault(start.kinds[label], []).append(label)
    for kind, mine in kinds.items():
        every = [k for k in eager if start.kinds.get(k) == kind and k in graph]
        moved = _norm([(eager[k], start.of(k, eager[k])) for k in every])
        apart = _norm([(eager[k], graph[k]) for k in mine])
        floor = sum(4 * torch.finfo(eager[k].dtype).eps * float(eager[k].double().norm()) for k in mine)
        allowed = tolerance.of_step * moved + floor + 10 * sum(noise.get(k, 0.0) for k in mine)
        if not apart <= allowed:
            worst = max(mine, key=lambda k: _norm([(eager[k], graph[k])]))
            return Difference(worst, apart, allowed)
    return None


def _norm(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """How far two sets of tensors are apart, as one vector; places where both are NaN count as equal."""
    return math.sqrt(sum(float((a.double() - b.double()).nan_to_num(0.0).square().sum()) for a, b in pairs))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if same_bits(a, b):
        return 0.0
    if a.shape != b.shape:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    apart = (a.to(wide) - b.to(wide)).abs()
    nan = (a != a) != (b != b)
    return float("inf") if bool(nan.any()) else float(apart.nan_to_num(0.0).max())
