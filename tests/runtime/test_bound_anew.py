"""Places that a call has hold a new tensor: attributes, variables, elements of dicts. After a replay they hold what an
eager call would have left there.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import AddressChangedError, SignatureError  # noqa: E402

CALLS = 12


class Holder:
    def __init__(self) -> None:
        self.last: Any = None


class Module(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return x + 1


def by_object() -> tuple[Any, Any]:
    holder = Holder()

    def fn(x: torch.Tensor) -> torch.Tensor:
        holder.last = x * 2
        return x + 1

    return fn, lambda: holder.last


def by_module() -> tuple[Any, Any]:
    module = Module()
    return module, lambda: module.last


def by_dict() -> tuple[Any, Any]:
    cache: dict[str, Any] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        cache["last"] = x * 2
        return x + 1

    return fn, lambda: cache["last"]


def by_variable() -> tuple[Any, Any]:
    last: Any = None

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = x * 2
        return x + 1

    return fn, lambda: last


WAYS = {"object": by_object, "module": by_module, "dict": by_dict, "variable": by_variable}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [[3], [2, 3, 4], [2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("verify", ["first", "off"])
def test_it_holds_what_the_last_call_left(kit: Any, way: str, sizes: list[int], verify: str) -> None:
    fn, last = WAYS[way]()
    guard = kit.guard(fn, verify=verify)
    for i in range(CALLS * len(sizes)):
        x = torch.full((sizes[i % len(sizes)],), float(i), device=kit.device)
        assert torch.equal(guard(x), x + 1)
        assert torch.equal(last(), x * 2)
    assert guard.stats["captures"] == len(sizes)
    assert guard.stats["replays"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_somebody_else_binds_it_between_two_calls(kit: Any, way: str) -> None:
    fn, last = WAYS[way]()
    guard = kit.guard(fn)
    for i in range(CALLS):
        x = torch.full((3,), float(i), device=kit.device)
        guard(x)
        guard.eager(x + 5)
        assert torch.equal(last(), (x + 5) * 2)
    guard(x)
    assert torch.equal(last(), x * 2)
    assert guard.stats["captures"] == 1


def test_the_argument_itself_is_stored(kit: Any) -> None:
    holder = Holder()

    def fn(x: torch.Tensor) -> torch.Tensor:
        holder.last = x
        return x + 1

    guard = kit.guard(fn)
    for i in range(CALLS):
        x = torch.full((3,), float(i), device=kit.device)
        guard(x)
        assert torch.equal(holder.last, x)


def test_a_view_of_state_is_stored(kit: Any) -> None:
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, 2))
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache.add_(x)
            self.head, self.turned = self.cache[:2], self.inner.weight.t()
            return self.head + self.turned

    m = Cached().to(kit.device).requires_grad_(False)
    guard = kit.guard(m)
    for i in range(CALLS):
        out = guard(kit.randn(4, 2, seed=i))
        if i % 4 == 3:
            guard.eager(kit.randn(4, 2, seed=i))
        else:
            assert torch.equal(out, m.cache[:2] + m.inner.weight.t())
        assert torch.equal(m.head, m.cache[:2])
    assert guard.stats["captures"] == 1


def test_exchanged_buffers_are_refused_and_keep_their_values(kit: Any) -> None:
    class Pair:
        def __init__(self) -> None:
            self.front, self.back = torch.ones(2, device=kit.device), torch.zeros(2, device=kit.device)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.back.copy_(x)
            self.front, self.back = self.back, self.front
            return self.front.sum()

    pair = Pair()
    with pytest.raises(AddressChangedError, match=r"hold another tensor that exists outside|binds another tensor"):
        kit.guard(pair.step)(torch.full((2,), 7.0, device=kit.device))
    assert pair.front.tolist() == [1.0, 1.0]
    assert pair.back.tolist() == [0.0, 0.0]


def test_behind_gradients_an_attribute_without_one_follows(kit: Any) -> None:
    class Stats(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.norm = y.detach().norm()
            return y

    m = Stats().to(kit.device)
    guard = kit.guard(m, mode="autograd")
    for i in range(CALLS):
        y = guard(kit.randn(3, 2, seed=i))
        assert torch.equal(m.norm, y.detach().norm())
        y.sum().backward()


def test_behind_gradients_an_attribute_with_one_is_refused(kit: Any) -> None:
    class Balanced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.extra_loss = y.square().mean()
            return y

    m = Balanced().to(kit.device)
    with pytest.raises(SignatureError, match=r"leaves `module\.extra_loss` behind, which requires grad") as caught:
        kit.guard(m, mode="autograd")(kit.randn(3, 2))
    assert caught.value.rule == "live-autograd-output"
    assert "further result" in caught.value.cure
