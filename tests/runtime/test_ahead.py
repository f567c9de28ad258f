"""`guard.capture(...)`: the graph stands before the first call, and nothing has happened."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import CaptureError, NoDeviceError  # noqa: E402
from graphlint.runtime.guard import capture_safe  # noqa: E402

STEPS = 8


def adamw(params: Any, kit: Any) -> Any:
    extra = {"capturable": True} if kit.device == "cuda" else {"fused": True}
    return torch.optim.AdamW(params, lr=torch.tensor(0.01, device=kit.device), **extra)


def momentum(params: Any, kit: Any) -> Any:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.1)


def plain(params: Any, kit: Any) -> Any:
    return torch.optim.SGD(params, lr=0.01)


class Training:
    def __init__(self, kit: Any, make: Any) -> None:
        torch.manual_seed(0)
        self.kit = kit
        layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.25), torch.nn.Linear(16, 1)]
        self.model = torch.nn.Sequential(*layers).to(kit.device)
        self.optimizer = make(self.model.parameters(), kit)
        kit.seed(7)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = ((self.model(x) - y) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def batch(self, i: int, size: int = 4) -> Any:
        return self.kit.randn(size, 8, seed=i), self.kit.randn(size, 1, seed=1000 + i)

    def world(self) -> dict[str, Any]:
        out: dict[str, Any] = {k: v.clone() for k, v in self.model.state_dict().items()}
        out |= {f"grad {k}": None if p.grad is None else p.grad.clone() for k, p in self.model.named_parameters()}
        out |= {f"{i}.{k}": copy.deepcopy(v) for i, s in enumerate(self.optimizer.state.values()) for k, v in s.items()}
        out["rng"] = torch.get_rng_state() if self.kit.device == "cpu" else torch.cuda.get_rng_state()
        return out


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key], key


@pytest.mark.parametrize("make", [adamw, momentum, plain])
@pytest.mark.parametrize("options", [{}, {"verify": "off"}, {"verify": "off", "outputs": "clone", "watch": "off"}])
def test_nothing_has_happened_and_training_is_eager_training(kit: Any, make: Any, options: Any) -> None:
    twin, run = Training(kit, make), Training(kit, make)
    kit.seed(7)
    before = run.world()
    guard = kit.guard(run.step, **options)
    x, y = run.batch(99)
    kept = x.clone()
    assert guard.capture(x, y) is True
    same(before, run.world())
    assert torch.equal(x, kept)
    assert guard.stats["graphs"] == guard.stats["captures"] == 1
    mine = [guard(*run.batch(i)).item() for i in range(STEPS)]
    kit.seed(7)
    assert mine == [twin.step(*twin.batch(i)).item() for i in range(STEPS)]
    after = run.world()
    kit.seed(7)
    again = Training(kit, make)
    for i in range(STEPS):
        again.step(*again.batch(i))
    same(again.world(), after)
    assert guard.stats["captures"] == 1
    assert guard.stats["replays"] > 0
    assert guard.stats["eager"] == 0


def test_two_signatures_ahead_share_the_state_that_is_born(kit: Any) -> None:
    twin, run = Training(kit, adamw), Training(kit, adamw)
    kit.seed(7)
    guard = kit.guard(run.step)
    for size in (4, 6):
        guard.capture(*run.batch(50, size))
    kit.seed(7)
    mine = [guard(*run.batch(i, 4 + 2 * (i % 2))).item() for i in range(STEPS)]
    kit.seed(7)
    assert mine == [twin.step(*twin.batch(i, 4 + 2 * (i % 2))).item() for i in range(STEPS)]
    assert guard.stats["captures"] == 2


def test_another_signature_comes_first(kit: Any) -> None:
    twin, run = Training(kit, adamw), Training(kit, adamw)
    guard = kit.guard(run.step)
    guard.capture(*run.batch(50, 6))
    kit.seed(7)
    mine = [guard(*run.batch(i, 4 + 2 * (i % 2))).item() for i in range(STEPS)]
    kit.seed(7)
    assert mine == [twin.step(*twin.batch(i, 4 + 2 * (i % 2))).item() for i in range(STEPS)]


def test_a_function_without_state_replays_at_once(kit: Any) -> None:
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x * 2

    guard = kit.guard(fn, verify="off")
    guard.capture(kit.randn(3))
    assert seen == []
    for i in range(STEPS):
        x = kit.randn(3, seed=i)
        assert torch.equal(guard(x), x * 2)
    assert seen == []
    assert guard.capture(kit.randn(3)) is True
    assert guard.stats["captures"] == 1


def test_all_buckets_ahead(kit: Any) -> None:
    guard = kit.guard(lambda x: x * 2, buckets={"x": (0, [4, 8])})
    guard.capture(kit.randn(3))
    assert guard.stats["captures"] == 2
    for n in (3, 8, 1, 5, 4, 7, 2):
        x = kit.randn(n, seed=n)
        assert torch.equal(guard(x), x * 2)
    assert guard.stats["captures"] == 2


def test_an_argument_that_is_changed_is_as_before(kit: Any) -> None:
    def push(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache.sum()

    guard = kit.guard(push)
    cache = torch.zeros(4, device=kit.device)
    guard.capture(cache, torch.ones(4, device=kit.device))
    assert cache.tolist() == [0.0] * 4
    for i in range(STEPS):
        assert guard(cache, torch.ones(4, device=kit.device)).item() == 4.0 * (i + 1)


def test_an_attribute_that_is_bound_anew(kit: Any) -> None:
    class Keeps(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x * 2
            return x + 1

    m = Keeps()
    guard = kit.guard(m)
    guard.capture(kit.randn(3))
    assert not hasattr(m, "last")
    for i in range(STEPS):
        x = kit.randn(3, seed=i)
        assert torch.equal(guard(x), x + 1)
        assert torch.equal(m.last, x * 2)


def test_gradients_across_the_call(kit: Any) -> None:
    m = torch.nn.Linear(4, 2).to(kit.device)
    twin = copy.deepcopy(m)
    guard = kit.guard(m, mode="autograd")
    guard.capture(kit.randn(3, 4))
    assert m.weight.grad is None
    for i in range(STEPS):
        for run in (guard, twin):
            run(kit.randn(3, 4, seed=i)).square().sum().backward()
        assert torch.equal(m.weight.grad, twin.weight.grad)
    assert guard.stats["captures"] == 1


def test_what_can_not_be_captured_ahead(kit: Any) -> None:
    bad = lambda x: x * x.sum().item()  # noqa: E731
    with pytest.raises(CaptureError, match="host-sync"):
        kit.guard(bad).capture(kit.randn(3))
    guard = kit.guard(bad, on_violation="eager")
    with pytest.warns(UserWarning, match="can't be captured ahead"):
        assert guard.capture(kit.randn(3)) is False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = kit.randn(3)
        assert torch.equal(guard(x), bad(x))


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphlint.runtime.fake import FakeBackend

    backend = FakeBackend()
    monkeypatch.setattr(backend, "unavailable", lambda: "no CUDA device is visible")
    with pytest.raises(NoDeviceError):
        capture_safe(lambda x: x, backend=backend).capture(torch.ones(2))


def test_inside_another_guards_phases_nothing_is_captured(kit: Any) -> None:
    inner = kit.guard(lambda x: x * 2)
    answers = []

    def outer(x: torch.Tensor) -> torch.Tensor:
        answers.append(inner.capture(x))
        return inner(x) + 1

    guard = kit.guard(outer)
    x = kit.randn(3)
    assert torch.equal(guard(x), x * 2 + 1)
    assert inner.stats["captures"] == 0


def test_profile_measures_the_function_itself(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphlint.runtime.profiling.record import NoDevice

    guard = kit.guard(lambda x: x * 2)
    if kit.device == "cuda":
        assert guard.profile(kit.randn(64), steps=1).whole.nodes == 1
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(NoDevice):
            guard.profile(kit.randn(64), steps=1)
    assert guard.stats["captures"] == 0
