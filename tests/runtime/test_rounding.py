"""Rounding is no wrong replay, and a wrong replay is no rounding."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.compare import Before, Tolerance, difference  # noqa: E402
from graphlint.runtime.errors import ReplayMismatchError  # noqa: E402

EXACT, ROUNDED = Tolerance(exact=True), Tolerance(exact=False)
HALF = Tolerance(exact=False, rounding=3e-2)


def found(eager: Any, graph: Any, tolerance: Tolerance, before: Any = None, kinds: Any = None) -> str:
    """The label of the first difference, empty for none."""
    first, _ = difference(eager, graph, {}, tolerance, lambda: Before(before or {}, kinds or {}))
    return first.label if first is not None else ""


def test_results_are_compared_by_their_own_size() -> None:
    x = torch.tensor([1.0, 100.0])
    near, far = {"output": x + 1e-3}, {"output": x + 1.0}
    assert found({"output": x}, near, EXACT) == "output"
    assert found({"output": x}, near, ROUNDED) == ""
    assert found({"output": x}, far, ROUNDED) == "output"
    assert found({"output": x}, far, HALF) == ""
    assert found({"output": x.long()}, {"output": x.long() + 1}, HALF) == "output"
    assert found({"output": x}, {}, HALF) == "output"
    assert found({"output": x}, {"output": torch.tensor([1.0, float("nan")])}, HALF) == "output"


def training(seed: int = 0) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """State before and after a step of Adam: a matrix, and a bias whose gradient is nothing but rounding."""
    gen = torch.Generator().manual_seed(seed)
    old = {"weight": torch.randn(64, 64, generator=gen), "bias": torch.randn(16, generator=gen)}
    new = {k: v + 1e-3 * torch.randn(v.shape, generator=gen).sign() for k, v in old.items()}
    return old, new, dict.fromkeys(old, "parameter")


def test_a_parameter_whose_gradient_is_rounding_is_no_difference() -> None:
    old, new, kinds = training()
    other = dict(new, bias=old["bias"] - (new["bias"] - old["bias"]))  # a full step the other way
    assert found(new, other, HALF, old, kinds) == ""
    assert found(new, other, EXACT, old, kinds) != ""


def test_what_a_graph_left_alone_is_a_difference() -> None:
    old, new, kinds = training()
    assert found(new, dict(new, bias=old["bias"].clone()), HALF, old, kinds) == "bias"


@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0])
def test_another_learning_rate_is_a_difference(factor: float) -> None:
    old, new, kinds = training()
    other = {k: old[k] + factor * (new[k] - old[k]) for k in old}
    assert found(new, other, HALF, old, kinds) == "weight"


def test_a_corrupted_element_and_a_counter_are_differences() -> None:
    old, new, kinds = training()
    spoilt = new["weight"].clone()
    spoilt[3, 3] = 5.0
    assert found(new, dict(new, weight=spoilt), HALF, old, kinds) == "weight"
    seen = {"n": torch.tensor(4)}
    assert found(seen, {"n": torch.tensor(5)}, HALF, {"n": torch.tensor(3)}, {"n": "buffer"}) == "n"


def otherwise_in_a_capture(kit: Any) -> Any:
    """Sums in another order while a capture runs, as libraries do that ask for it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        if kit.backend.capturing():
            return x.flip(0).cumsum(0)[-1] * (1 + 2**-22)
        return x.cumsum(0)[-1]

    return fn


def test_other_arithmetic_in_a_capture_is_rounding_unless_determinism_is_asked_for(kit: Any) -> None:
    x = kit.randn(4096).abs()
    with pytest.raises(ReplayMismatchError):
        kit.guard(otherwise_in_a_capture(kit))(x)
    torch.use_deterministic_algorithms(False)
    guard = kit.guard(otherwise_in_a_capture(kit))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(5):
            y = guard(x + i)
            assert torch.allclose(y, (x + i).sum(), rtol=1e-5)
    assert "within rounding" in str(guard.report())


def test_half_precision_inside_is_known_by_its_operators(kit: Any) -> None:
    torch.use_deterministic_algorithms(False)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.bfloat16().float()
        return y * (1.01 if kit.backend.capturing() else 1.0)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x * (1.01 if kit.backend.capturing() else 1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kit.guard(fn)(kit.randn(8))
    with pytest.raises(ReplayMismatchError):
        kit.guard(whole)(kit.randn(8))
