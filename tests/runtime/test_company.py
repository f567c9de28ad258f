"""What a guard meets in a real program: hooks, checkpointing, loaders, saved states, a guard as a part of other things."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from graphlint.runtime.errors import StaleScalarError  # noqa: E402
from graphlint.runtime.guard import capture_safe  # noqa: E402

CALLS = 8


def net(kit: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return layers.to(kit.device)


def train(kit: Any, forward: Any, m: torch.nn.Module, guarded: bool) -> list[float]:
    """Losses of a few steps with `forward(m, x)`."""
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(m, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = kit.guard(step) if guarded else step
    losses = [run(kit.randn(3, 4, seed=i)).item() for i in range(CALLS)]
    if guarded:
        assert run.stats["replays"] > 0
    return losses


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(kit: Any, reentrant: bool) -> None:
    def forward(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(reentrant)
        return checkpoint(m, x, use_reentrant=reentrant, preserve_rng_state=False)

    assert train(kit, forward, net(kit), True) == train(kit, forward, net(kit), False)


def test_hooks_of_modules_and_tensors_run_at_capture_and_their_work_is_replayed(kit: Any) -> None:
    def hooked() -> torch.nn.Module:
        m = net(kit)
        m[0].register_forward_pre_hook(lambda mod, args: (args[0] * 2,))
        m[0].register_forward_hook(lambda mod, args, out: out + 1)
        m[2].register_full_backward_hook(lambda mod, grads, outs: tuple(None if g is None else g * 3 for g in grads))
        m[2].weight.register_hook(lambda g: g * 0.5)
        return m

    forward = lambda m, x: m(x)  # noqa: E731
    assert train(kit, forward, hooked(), True) == train(kit, forward, hooked(), False)


@pytest.mark.parametrize("where", ["module", "pre", "parameter"])
def test_a_hook_that_comes_after_the_capture_is_noticed(kit: Any, where: str) -> None:
    m = net(kit)

    def step(x: torch.Tensor) -> torch.Tensor:
        m.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        return loss

    guard = kit.guard(step)
    x = kit.randn(3, 4)
    for _ in range(CALLS):
        guard(x)
    if where == "module":
        handle = m[2].register_forward_hook(lambda mod, args, out: out * 2)
    elif where == "pre":
        handle = m[0].register_forward_pre_hook(lambda mod, args: (args[0] * 2,))
    else:
        handle = m[0].weight.register_hook(lambda g: g * 2)
    with pytest.raises(StaleScalarError, match="hook") as caught:
        for _ in range(400):
            guard(x)
    assert caught.value.rule == "python-hook"
    handle.remove()
    guard(x)


def test_saved_tensor_hooks_and_custom_functions(kit: Any) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return g * 2 + x * 0

    def forward(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return Twice.apply(m(x))

    assert train(kit, forward, net(kit), True) == train(kit, forward, net(kit), False)


def test_a_loader_and_a_validation_loop_with_the_same_model(kit: Any) -> None:
    runs = []
    for guarded in (False, True):
        m = net(kit)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        data = [(torch.full((3, 4), float(i) / 8), torch.full((3, 1), float(i) / 8)) for i in range(CALLS)]
        loader = torch.utils.data.DataLoader(data, batch_size=None)

        def step(x: Any, y: Any, m: Any = m, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(m(x), y)
            loss.backward()
            optimizer.step()
            return loss

        def score(x: Any, m: Any = m) -> Any:
            return m(x)

        step, score = (kit.guard(step), kit.guard(score, mode="forward")) if guarded else (step, score)
        history: list[Any] = []
        for _ in range(3):
            m.train()
            losses = [step(x.to(kit.device), y.to(kit.device), m, optimizer) for x, y in loader]
            m.eval()
            with torch.no_grad():
                scores = [score(x.to(kit.device), m) for x, _ in loader]
            history += [t.sum().item() for t in (*losses, *scores)]
        runs.append(history)
    assert runs[0] == runs[1]


def test_a_guarded_method_is_no_part_of_the_saved_state(kit: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        @capture_safe(backend=kit.backend)
        def predict(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).detach()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    m = Model().to(kit.device)
    x = kit.randn(1, 2)
    for _ in range(CALLS):
        m.predict(x)
    assert list(m.state_dict()) == ["inner.weight", "inner.bias"]
    other = copy.deepcopy(m)
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})
    for model in (m, other):
        for _ in range(CALLS):
            assert torch.equal(model.predict(x), model(x))
    assert m.predict is not other.predict


def test_a_guard_inside_a_module_that_is_guarded(kit: Any) -> None:
    inner = kit.guard(net(kit).requires_grad_(False))

    class Outer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return inner(x) * 2

    outer = kit.guard(Outer())
    for i in range(CALLS):
        x = kit.randn(3, 4, seed=i)
        assert torch.equal(outer(x), inner.eager(x) * 2)
    assert inner.stats["graphs"] == 0
    assert torch.equal(inner(x), inner.eager(x))


def test_inference_results_that_are_kept(kit: Any) -> None:
    m = net(kit)
    guard = kit.guard(m)
    with torch.inference_mode():
        for _ in range(CALLS):
            guard(kit.randn(3, 4))
        kept = [guard(kit.randn(3, 4, seed=i)) for i in range(CALLS)]
        for i, y in enumerate(kept):
            assert torch.equal(y, m(kit.randn(3, 4, seed=i)))


class Task(torch.nn.Module):
    """A module that is its own trainer: optimizer, scaler, books and helpers are attributes."""

    def __init__(self, kit: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net(kit)
        rate = torch.tensor(0.01, device=kit.device)
        extra = {"capturable": True} if kit.device == "cuda" else {"fused": True}
        self.tools = {"optimizer": torch.optim.AdamW(self.net.parameters(), lr=rate, **extra)}
        self.logged: dict[str, Any] = {}
        self.teacher = [copy.deepcopy(self.net).requires_grad_(False)]  # in a list, so that it is no submodule

    def training_step(self, batch: Any) -> Any:
        loss = (self.net(batch["x"]) - self.teacher[0](batch["x"]) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def log(self, name: str, value: Any) -> None:
        self.logged[name] = value.detach()

    def fit(self, batch: Any) -> Any:
        self.tools["optimizer"].zero_grad()
        loss = self.training_step(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.tools["optimizer"].step()
        with torch.no_grad():
            for p, q in zip(self.teacher[0].parameters(), self.net.parameters(), strict=True):
                p.lerp_(q, 0.1)
        return {"loss": loss}


def test_a_module_that_is_its_own_trainer(kit: Any) -> None:
    mine, twin = Task(kit), Task(kit)
    guard = kit.guard(mine.fit)
    for i in range(CALLS):
        batch = {"x": kit.randn(3, 4, seed=i)}
        assert torch.equal(guard(batch)["loss"], twin.fit(batch)["loss"].detach())
        assert torch.equal(mine.logged["loss"], twin.logged["loss"])
        for p, q in zip(mine.teacher[0].parameters(), twin.teacher[0].parameters(), strict=True):
            assert torch.equal(p, q)
    assert guard.stats["replays"] > 0
    state = guard._service.maker.state
    assert list(state.found.optimizers) == ["self.tools['optimizer']"]


def test_globals_of_a_method_that_the_guarded_one_calls(kit: Any) -> None:
    class Scaled:
        def __init__(self) -> None:
            self.w = torch.ones(3, device=kit.device)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w * FACTOR["by"]

        def outer(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    guard = kit.guard(Scaled().outer)
    x = kit.randn(3)
    for _ in range(CALLS):
        assert torch.equal(guard(x), x * 2 + 1)
    FACTOR["by"] = 3.0
    with pytest.raises(StaleScalarError, match="FACTOR"):
        for _ in range(60):
            guard(x)
    FACTOR["by"] = 2.0


FACTOR = {"by": 2.0}
