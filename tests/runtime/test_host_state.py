"""What a call changes on the host: put back after warm-up, told, and refused where a replay could not be right."""

from __future__ import annotations

import collections
import gc
import itertools
import warnings
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import CaptureError, StaleScalarError  # noqa: E402

CALLS = 6


class Training:
    """A model, an optimizer with a tensor lr, and a scheduler that is stepped inside or outside."""

    def __init__(self, kit: Any, make: Any, inside: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1).to(kit.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), torch.tensor(0.1, device=kit.device), fused=True)
        self.scheduler = make(self.optimizer)
        self.inside = inside

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        if self.inside:
            self.scheduler.step()  # the fault
        return loss


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [3],
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_stepped_inside_is_refused_and_set_back(kit: Any, make: str) -> None:
    run = Training(kit, SCHEDULERS[make], True)
    weight = run.model.weight.detach().clone()
    before, rate = run.scheduler.state_dict(), float(run.optimizer.param_groups[0]["lr"])
    with pytest.raises(StaleScalarError) as caught:
        kit.guard(run.step)(kit.randn(2, 4))
    assert caught.value.rule == "scheduler-in-region"
    assert caught.value.code == "CG305"
    assert "the fault" in caught.value.source_line
    assert "`self.scheduler.step()`" in caught.value.reason
    assert run.scheduler.state_dict().keys() == before.keys()
    assert run.scheduler.last_epoch == before["last_epoch"]
    assert float(run.optimizer.param_groups[0]["lr"]) == rate
    assert torch.equal(run.model.weight, weight)
    assert "step" not in run.scheduler.__dict__


def test_a_scheduler_stepped_inside_runs_eagerly_when_asked(kit: Any) -> None:
    runs = []
    for guarded in (False, True):
        run = Training(kit, SCHEDULERS["step"], True)
        step = kit.guard(run.step, on_violation="eager") if guarded else run.step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [step(kit.randn(2, 4, seed=i)).item() for i in range(CALLS)]
        runs.append((losses, run.scheduler.last_epoch, float(run.optimizer.param_groups[0]["lr"])))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_stepped_outside_reaches_the_graph(kit: Any, make: str) -> None:
    runs = []
    for guarded in (False, True):
        run = Training(kit, SCHEDULERS[make], False)
        step = kit.guard(run.step) if guarded else run.step
        losses = []
        for i in range(8):
            losses.append(step(kit.randn(2, 4, seed=i)).item())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.scheduler.step()
        runs.append(losses)
    assert runs[0] == runs[1]


def test_a_scheduler_argument(kit: Any) -> None:
    run = Training(kit, SCHEDULERS["step"], False)

    def step(x: torch.Tensor, scheduler: Any) -> torch.Tensor:
        loss = run.step(x)
        scheduler.step()
        return loss

    with pytest.raises(StaleScalarError, match="counts on the host"):
        kit.guard(step)(kit.randn(2, 4), run.scheduler)


# ---- iterators ----


def batches(kit: Any) -> Any:
    for i in range(40):
        yield torch.full((2,), float(i), device=kit.device)


def test_an_iterator_that_is_advanced_inside_is_refused_and_loses_nothing(kit: Any) -> None:
    source = batches(kit)

    def step() -> torch.Tensor:
        return next(source) * 2  # the fault

    guard = kit.guard(step)
    with pytest.raises(StaleScalarError) as caught:
        guard()
    assert caught.value.rule == "unrepeated-effect"
    assert "`next(source)`" in caught.value.reason
    assert "the fault" in caught.value.source_line
    assert [float(next(source)[0]) for _ in range(3)] == [0.0, 1.0, 2.0]


def test_an_iterator_of_an_object(kit: Any) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.batches = batches(kit)
            self.calls = itertools.count()

        def step(self) -> torch.Tensor:
            next(self.calls)
            return next(self.batches) * 2

    trainer = Trainer()
    guard = kit.guard(trainer.step, on_violation="eager")
    with pytest.warns(UserWarning, match="unrepeated-effect"):
        assert guard().tolist() == [0.0, 0.0]
    assert guard().tolist() == [2.0, 2.0]
    assert next(trainer.calls) == 2
    trainer.batches.close()  # still the generator's


def test_an_iterator_that_is_only_held(kit: Any) -> None:
    source = batches(kit)
    own = source

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if source is not None else x

    guard = kit.guard(step)
    for i in range(CALLS):
        guard(kit.randn(2, seed=i))
    assert source is own
    assert guard.stats["replays"] > 0


# ---- containers ----


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (list, lambda c: c.append(1)),
        (set, lambda c: c.add(len(c))),
        (lambda: collections.deque(maxlen=3), lambda c: c.append(1)),
        (collections.Counter, lambda c: c.update("a")),
        (collections.OrderedDict, lambda c: c.__setitem__(len(c), 1)),
        (lambda: collections.defaultdict(list), lambda c: c["k"].append(1)),
        (dict, lambda c: c.setdefault("k", []).append(1)),
    ],
)
def test_a_container_is_changed_once(kit: Any, make: Any, change: Any) -> None:
    mine, twin = make(), make()
    change(twin)

    def fn(x: torch.Tensor) -> torch.Tensor:
        change(mine)
        return x * 2

    guard = kit.guard(fn)
    guard(kit.randn(2))
    assert mine == twin
    assert type(mine) is type(twin)


def test_an_interrupt_in_the_watched_call_leaves_no_trace(kit: Any) -> None:
    total, counter = torch.zeros(2, device=kit.device), {"calls": 0}

    def fn(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        counter["calls"] += 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kit.guard(fn)(torch.ones(2, device=kit.device))
    assert total.tolist() == [0.0, 0.0]
    assert counter == {"calls": 0}


def test_warn_raises_where_there_is_no_graph_to_go_on_with(kit: Any) -> None:
    for choice in ("warn", "recapture"):
        guard = kit.guard(lambda x: x * x.sum().item(), on_violation=choice)
        for _ in range(2):
            with pytest.raises(CaptureError, match="host-sync"):
                guard(kit.randn(2))
        assert guard.stats["eager"] == 0


def test_a_refusal_keeps_no_tensor_alive(kit: Any) -> None:
    held = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        held.append(weakref.ref(y))
        return y * y.sum().item()

    guard = kit.guard(fn, on_violation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(3):
            guard(kit.randn(3, seed=i))
    gc.collect()
    assert all(ref() is None for ref in held)


class Configured:
    """Settings as large libraries keep them: sets, frozen sets, deques and tuples of plain values."""

    def __init__(self, kit: Any) -> None:
        self.net = torch.nn.Linear(4, 4).to(kit.device)
        self.net.config = self
        self.ignored, self.tied = {1, 2, "keys"}, frozenset({"a", 3})
        self.window, self.shape = collections.deque([1, 2, 3], maxlen=3), (4, 4)
        self.nested = {"sets": [{1.5, 2.5}], "empty": set()}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * len(self.ignored) * self.window[0] + self.shape[0]


def test_containers_of_every_kind_can_be_looked_at(kit: Any) -> None:
    run = Configured(kit)
    guard = kit.guard(run.step)
    with torch.no_grad():
        for i in range(CALLS):
            x = kit.randn(2, 4, seed=i)
            assert torch.equal(guard(x), run.step(x))
    assert guard.stats["replays"] >= CALLS - 3
