"""Random little programs, guarded and not, call by call: results, gradients, state, generators, and what was kept.

The seeds are fixed; to look further, raise SEEDS.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import GuardWarning  # noqa: E402

SEEDS = 20
CALLS = 14
QUIET = ["none"] * 6
SHARED = ["eval", "train", "zero", "forget", "scale", "load", "keep"]


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Program:
    """A module, an optimizer and a function over both, chosen by a seed; two of one seed are twins."""

    def __init__(self, kit: Any, seed: int, mode: str) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        middle = rng.choice(
            [
                torch.nn.Tanh(),
                torch.nn.Dropout(0.3),
                torch.nn.BatchNorm1d(6),
                torch.nn.LayerNorm(6),
                torch.nn.Identity(),
            ]
        )
        layers = torch.nn.Sequential(torch.nn.Linear(4, 6), middle, torch.nn.Linear(6, 2))
        self.model = layers.to(kit.device)
        self.total = torch.zeros(2, device=kit.device)
        self.last: Any = None
        momentum, lr = rng.choice([0.0, 0.9]), 0.05
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.call = rng.choice(FUNCTIONS[mode]).__get__(self)

    def train(self, x: torch.Tensor, by: float = 1.0) -> Any:
        self.optimizer.zero_grad()
        loss = (self.model(x) * by).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def accumulate(self, x: torch.Tensor, by: float = 1.0) -> Any:
        loss = (self.model(x) * by).square().mean()
        loss.backward()
        return loss, {"x": x}

    def predict(self, x: torch.Tensor, by: float = 1.0) -> Any:
        with torch.no_grad():
            y = self.model(x) * by
            self.total.add_(y.mean(0))
            return y, self.total.clone(), None, 3

    def draw(self, x: torch.Tensor, by: float = 1.0) -> Any:
        noise = torch.randn_like(x)
        self.last = x + noise * by
        return [self.last.mean(), torch.nn.functional.dropout(x, 0.5), x[:1]]

    def forward(self, x: torch.Tensor, by: float = 1.0) -> Any:
        y = self.model(x) * by
        return {"y": y, "norm": y.detach().square().sum(), "n": [3]}

    def world(self, kit: Any) -> list[Any]:
        state = [v for entry in self.optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
        grads = [p.grad for p in self.model.parameters()]
        rng = torch.get_rng_state() if kit.device == "cpu" else torch.cuda.get_rng_state()
        return [*self.model.state_dict().values(), *grads, *state, self.total, self.last, rng]

    def act(self, what: str) -> None:
        if what in ("eval", "train"):
            self.model.train(what == "train")
        elif what in ("zero", "forget"):
            self.model.zero_grad(set_to_none=what == "forget")
        elif what == "scale":
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(0.9)
        elif what == "load":
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))


FUNCTIONS: dict[str, list[Callable[..., Any]]] = {
    "step": [Program.train, Program.accumulate, Program.predict, Program.draw],
    "autograd": [Program.forward],
}


def same(mine: list[Any], want: list[Any]) -> None:
    assert len(mine) == len(want)
    for a, b in zip(mine, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a.detach(), b.detach())


@pytest.mark.parametrize("mode", ["step", "autograd"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_guarded_program_is_the_program(kit: Any, seed: int, mode: str) -> None:
    rng = random.Random(seed)
    mine, twin = Program(kit, seed, mode), Program(kit, seed, mode)
    watch = rng.choice(["sampled", "full", "off"])
    guard = kit.guard(
        mine.call, mode=mode, verify=rng.choice(["first", "off", 4]), watch=watch,
        max_graphs=rng.choice([1, 2, 8]), warmup=rng.choice([1, 3]),
    )  # fmt: skip
    kept: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GuardWarning)
        if rng.random() < 0.3:
            guard.capture(kit.randn(3, 4))
        for i in range(CALLS):
            x, by, what = (
                kit.randn(rng.choice([3, 3, 5]), 4, seed=i),
                rng.choice([1.0, 1.0, 2.0]),
                rng.choice(QUIET + SHARED),
            )
            sides = []
            for program, fn in ((mine, guard), (twin, twin.call)):
                program.act(what)
                kit.seed(i)
                result = fn(x.clone(), by=by)
                live = [t for t in leaves(result) if t.requires_grad]
                if mode == "autograd":
                    sum(t.square().sum() for t in live).backward()
                sides.append((leaves(result), program.world(kit)))
            same(sides[0][0], sides[1][0])
            same(sides[0][1], sides[1][1])
            if watch != "off" and (what == "keep" or seed % 2):  # without a watch only the first calls tell
                kept.append((sides[0][0], [t.detach().clone() for t in sides[1][0]]))
    for results, want in kept:
        same(results, want)
