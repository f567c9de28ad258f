"""What a step can reach, and that a snapshot puts all of it back in place."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.profiling.world import World  # noqa: E402

nn = torch.nn


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.generator = torch.Generator().manual_seed(3)
        self.count = 0
        self.history: list[float] = []

    def step(self, x: Any) -> Any:
        self.count += 1
        self.optimizer.zero_grad()
        noise = torch.rand(x.shape, generator=self.generator)
        loss = self.model(x + noise).square().mean() * (1 + random.random())
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.history.append(loss.item())
        return loss.detach()


def test_a_method_reaches_what_its_object_holds() -> None:
    trainer = Trainer()
    world = World(trainer.step)
    assert list(world.modules) == ["model"] and list(world.optimizers) == ["optimizer"]
    assert world.schedulers == [trainer.scheduler] and world.generators == (trainer.generator,)


def test_plain_values_that_a_step_changes_are_named() -> None:
    trainer = Trainer()
    snapshot = World(trainer.step).snapshot()
    trainer.step(torch.randn(8, 4))
    assert {"count", "len(history)"} <= set(snapshot.changed())


def test_schedulers_in_closures_and_globals_are_found() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    @torch.no_grad()
    def step() -> None:
        scheduler.step()

    assert World(step).schedulers == [scheduler]


def test_closures_partials_and_decorators_are_seen_through() -> None:
    model, scale = nn.Linear(2, 2), torch.ones(1)

    def inner(x: Any, factor: Any) -> Any:
        return model(x) * factor

    @functools.wraps(inner)
    def outer(*args: Any) -> Any:
        return inner(*args)

    assert World(functools.partial(outer, factor=scale)).modules == {"model": model}


def test_a_module_of_another_one_is_no_root() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    layer = model[0]
    assert list(World(lambda x: model(layer(x))).modules) == ["model"]


def test_a_cycle_and_a_huge_list_end() -> None:
    ring: list[Any] = list(range(100_000))
    ring.append(ring)
    assert World(lambda: ring).modules == {}


def _trace(trainer: Trainer, x: Any, steps: int) -> list[float]:
    return [float(trainer.step(x)) for _ in range(steps)]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("before", [0, 3], ids=["fresh", "after some steps"])
def test_after_a_restore_training_repeats_to_the_last_bit(on_host: bool, before: int) -> None:
    trainer, x = Trainer(), torch.randn(8, 4)
    _trace(trainer, x, before)
    snapshot = World(trainer.step).snapshot(on_host)
    first = _trace(trainer, x, 5)
    snapshot.restore()
    assert trainer.count == before and len(trainer.history) == before
    assert len(trainer.optimizer.state) == (6 if before else 0)
    assert _trace(trainer, x, 5) == first


def test_a_restore_keeps_addresses() -> None:
    trainer, x = Trainer(), torch.randn(8, 4)
    _trace(trainer, x, 2)
    world = World(trainer.step)
    addresses = {name: tensor.data_ptr() for name, tensor in world.tensors().items()}
    snapshot = world.snapshot()
    _trace(trainer, x, 2)
    snapshot.restore()
    assert {name: tensor.data_ptr() for name, tensor in world.tensors().items()} == addresses
    assert any("exp_avg_sq" in name for name in addresses)
