"""After the first call, and after any number of replays, the world is what eager calls would have left: bitwise."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import CaptureError  # noqa: E402

STEPS = 50


class Run:
    """A little training run, guarded or not; `history` and `world` are compared."""

    def __init__(self, kit: Any, guarded: bool, make: Any, **options: Any) -> None:
        self.kit = kit
        torch.manual_seed(0)
        self.model, self.optimizer, step = make(kit)
        self.step = kit.guard(step, **options) if guarded else step
        self.history: list[float] = []
        kit.seed(7)

    def train(self, steps: int, scheduler: Any = None) -> Run:
        for i in range(steps):
            loss = self.step(self.kit.randn(4, 8, seed=i), self.kit.randn(4, 1, seed=1000 + i))
            self.history.append(loss.item())
            if scheduler is not None:
                scheduler.step()
        return self

    def world(self) -> dict[str, Any]:
        out: dict[str, Any] = {k: v.clone() for k, v in self.model.state_dict().items()}
        out |= {f"{k}.grad": p.grad for k, p in self.model.named_parameters()}
        for i, state in enumerate(self.optimizer.state.values()):
            out |= {f"{i}.{k}": v for k, v in state.items()}
        out["cpu rng"] = torch.get_rng_state()
        if self.kit.device == "cuda":
            out["cuda rng"] = torch.cuda.get_rng_state()
        return out


def same(a: Run, b: Run) -> None:
    """Asserts bitwise equality of losses and of everything else."""
    assert a.history == b.history
    left, right = a.world(), b.world()
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right[key]), key
        else:
            assert value == right[key], key


def model(kit: Any) -> torch.nn.Module:
    layers = [
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.25),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 1),
    ]
    return torch.nn.Sequential(*layers).to(kit.device)


def step_of(model: Any, optimizer: Any) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def sgd(kit: Any) -> Any:
    m = model(kit)
    o = torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, dampening=0.1)
    return m, o, step_of(m, o)


def adamw(kit: Any) -> Any:
    """AdamW with a tensor lr. A CPU has no capturable one, there a fused one stands in."""
    m = model(kit)
    lr = torch.tensor(0.01, device=kit.device)
    extra = {"capturable": True} if kit.device == "cuda" else {"fused": True}
    o = torch.optim.AdamW(m.parameters(), lr=lr, **extra)
    return m, o, step_of(m, o)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_one_call_is_one_eager_call(kit: Any, make: Any) -> None:
    same(Run(kit, False, make).train(1), Run(kit, True, make).train(1))


@pytest.mark.parametrize("make", [sgd, adamw])
def test_fifty_steps_are_fifty_eager_steps(kit: Any, make: Any) -> None:
    guarded = Run(kit, True, make).train(STEPS)
    same(Run(kit, False, make).train(STEPS), guarded)
    assert guarded.step.stats["graphs"] == 1
    assert guarded.step.stats["eager"] == 0


def test_a_scheduler_reaches_the_graph_through_a_tensor_lr(kit: Any) -> None:
    runs = []
    for guarded in (False, True):
        run = Run(kit, guarded, adamw)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
        runs.append(run.train(STEPS, scheduler))
    same(*runs)


def test_a_float_lr_is_turned_and_a_scheduler_reaches_it(kit: Any) -> None:
    def make(kit: Any) -> Any:
        m = model(kit)
        o = torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, fused=True)
        return m, o, step_of(m, o)

    runs = []
    for guarded in (False, True):
        run = Run(kit, guarded, make)
        if not guarded:
            run.optimizer.param_groups[0]["lr"] = torch.tensor(0.01, device=kit.device)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 20)
        runs.append(run.train(20, scheduler))
    same(*runs)
    assert any("device tensor now" in note for note in runs[1].step.report().notes)


def test_gradients_kept_outside_accumulate_as_in_eager(kit: Any) -> None:
    def make(kit: Any) -> Any:
        m = model(kit)
        o = torch.optim.SGD(m.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = ((m(x) - y) ** 2).mean()
            loss.backward()
            return loss

        return m, o, step

    runs = []
    for guarded in (False, True):
        run = Run(kit, guarded, make)
        for _ in range(4):
            run.train(3)
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)
        run.train(2)
        runs.append(run)
    same(*runs)


def test_gradients_zeroed_in_place_outside(kit: Any) -> None:
    def make(kit: Any) -> Any:
        m = model(kit)
        o = torch.optim.SGD(m.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = ((m(x) - y) ** 2).mean()
            loss.backward()
            o.step()
            return loss

        return m, o, step

    runs = []
    for guarded in (False, True):
        run = Run(kit, guarded, make)
        for _ in range(8):
            run.train(1)
            run.optimizer.zero_grad(set_to_none=False)
        runs.append(run)
    same(*runs)
    assert runs[1].step.stats["captures"] == 1


def test_host_state_is_touched_once(kit: Any) -> None:
    counter: dict[str, int] = {"calls": 0}
    seen: list[int] = []

    class Trainer:
        def __init__(self) -> None:
            self.calls = 0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            counter["calls"] += 1
            seen.append(self.calls)
            return x * 2

    trainer = Trainer()
    before = random.getstate()
    guard = kit.guard(trainer.step, on_violation="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard(kit.randn(3))
    assert (trainer.calls, counter["calls"], seen) == (1, 1, [1])
    assert random.getstate() == before
    assert any("unrepeated-effect" in note for note in guard.report().notes)


def test_a_tensor_the_guard_was_not_told_of_is_set_back(kit: Any) -> None:
    class Hidden:
        __slots__ = ("total",)  # no __dict__: discovery can't see it, the watched call does

    hidden = Hidden()
    hidden.total = torch.zeros(3, device=kit.device)

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden.total.add_(x)
        return hidden.total.sum()

    guard = kit.guard(step)
    for i in range(6):
        assert guard(torch.ones(3, device=kit.device)).item() == 3.0 * (i + 1)


def test_an_argument_changed_in_place_is_changed_for_the_caller(kit: Any) -> None:
    def push(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache.sum()

    guard = kit.guard(push)
    cache = torch.zeros(4, device=kit.device)
    for i in range(6):
        assert guard(cache, torch.full((4,), float(i), device=kit.device)).item() == cache.sum().item()
    assert cache.tolist() == [15.0] * 4


def test_batch_norm_counts_each_call_once(kit: Any) -> None:
    norm = torch.nn.BatchNorm1d(4).to(kit.device)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return norm(x)

    guard = kit.guard(run)
    twin = torch.nn.BatchNorm1d(4).to(kit.device)
    for i in range(7):
        x = kit.randn(8, 4, seed=i)
        with torch.no_grad():
            want = twin(x)
        assert torch.equal(guard(x), want)
    assert norm.num_batches_tracked.item() == 7
    assert torch.equal(norm.running_mean, twin.running_mean)
    assert torch.equal(norm.running_var, twin.running_var)


class Slotted:
    """Discovery can't see into it."""

    __slots__ = ("w",)

    def __init__(self, w: Any) -> None:
        self.w = w


@pytest.mark.parametrize("where", ["closure", "hidden"])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("mode", ["step", "autograd"])
def test_gradients_of_tensors_that_belong_to_no_module(kit: Any, where: str, kept: bool, mode: str) -> None:
    runs = []
    for guarded in (False, True):
        w = torch.nn.Parameter(torch.ones(3, device=kit.device))
        box = Slotted(w)

        def step(x: torch.Tensor, w: Any = w, box: Any = box) -> torch.Tensor:
            loss = ((box.w if where == "hidden" else w) * x).square().sum()
            if mode == "step":
                loss.backward()
            return loss

        fn = (lambda x, step=step, w=w: step(x)) if where == "closure" else (lambda x, step=step, box=box: step(x))
        run = kit.guard(fn, mode=mode) if guarded else fn
        history = []
        for i in range(8):
            if not kept:
                w.grad = None
            loss = run(kit.randn(3, seed=i))
            if mode == "autograd":
                loss.backward()
            history.append((loss.item(), w.grad.tolist()))
        runs.append(history)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("filename", ["<string>", "<stdin>", "<python-input-3>"])
def test_a_step_that_was_typed_finds_its_globals(kit: Any, filename: str) -> None:
    text = """
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss
"""
    runs = []
    for guarded in (False, True):
        torch.manual_seed(0)
        m = torch.nn.Linear(4, 1).to(kit.device)
        rate = torch.tensor(0.1, device=kit.device)
        space: dict[str, Any] = {
            "model": m,
            "optimizer": torch.optim.SGD(m.parameters(), lr=rate, fused=True),
            "scaler": torch.amp.GradScaler(kit.device, init_scale=8.0, growth_interval=2),
        }
        exec(compile(text, filename, "exec"), space)
        step = kit.guard(space["step"]) if guarded else space["step"]
        history = []
        for i in range(10):
            x = kit.randn(2, 4, seed=i)
            if i in (5, 7):
                x[0, 0] = float("inf")
            step(x)
            history.append((space["scaler"]._scale.item(), m.weight.tolist()))
        runs.append(history)
    assert runs[0] == runs[1]


def test_state_in_another_module_of_the_users(kit: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    (tmp_path / "shared_state_of_a_test.py").write_text(
        "import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(4, 1)\nsteps = 0\nlast = None\n", encoding="utf-8"
    )
    (tmp_path / "step_of_a_test.py").write_text(
        "import torch\n"
        "import shared_state_of_a_test as state\n\n"
        "def step(x):\n"
        "    state.optimizer.zero_grad()\n"
        "    loss = state.model(x).square().mean()\n"
        "    loss.backward()\n"
        "    state.optimizer.step()\n"
        "    state.steps += 1\n"
        "    state.last = loss.detach() * 2\n"
        "    return loss\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    runs = []
    for guarded in (False, True):
        for name in ("shared_state_of_a_test", "step_of_a_test"):
            sys.modules.pop(name, None)
        step = importlib.import_module("step_of_a_test").step
        state = importlib.import_module("shared_state_of_a_test")
        state.model.to(kit.device)
        state.optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1, momentum=0.9)
        run = kit.guard(step) if guarded else step
        runs.append([])
        for i in range(6):
            loss = run(kit.randn(2, 4, seed=i)).item()
            runs[-1].append((loss, state.model.weight.tolist(), state.last.item()))
        if guarded:
            assert state.steps == 1  # Python runs at the first call only; the report says so
            assert any("state.steps" in note for note in run.report().notes)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("how", ["mismatch", "interrupt", "error"])
def test_a_compared_call_that_fails_has_no_effect(kit: Any, how: str) -> None:
    """Integer inputs are not varied by the guard: that this function branches on one shows at the second real call."""
    total = torch.zeros(3, device=kit.device)
    calls = {"real": 0}

    def fn(cache: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        cache.add_(n)
        if calls["real"] == 1 and not kit.backend.capturing():
            if how == "interrupt":
                raise KeyboardInterrupt
            if how == "error":
                raise ValueError("mine")
            return cache * 3
        return cache * 2

    guard = kit.guard(fn, watch="off")
    cache = torch.zeros(3, device=kit.device)
    one = torch.ones(3, dtype=torch.int64, device=kit.device)
    guard(cache, one)
    calls["real"] = 1
    with pytest.raises({"mismatch": CaptureError, "interrupt": KeyboardInterrupt, "error": ValueError}[how]):
        guard(cache, one)
    assert cache.tolist() == [1.0] * 3
    assert total.tolist() == [1.0] * 3
    calls["real"] = 0
    guard.invalidate("fixed")
    for _ in range(5):
        guard(cache, one)
    assert cache.tolist() == total.tolist() == [6.0] * 3
