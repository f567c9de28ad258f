"""Data-parallel modules: inside a guarded step they work, behind mode "autograd" they are refused. One process is
enough to see both; two processes are in tests/gpu.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import SignatureError  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


@pytest.fixture
def group(kit: Any) -> Iterator[None]:
    options: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if kit.device == "cuda" else {}
    kind = "nccl" if kit.device == "cuda" else "gloo"
    torch.distributed.init_process_group(kind, store=torch.distributed.HashStore(), rank=0, world_size=1, **options)
    yield
    torch.distributed.destroy_process_group()


def wrapped(kit: Any) -> Any:
    """A wrapped model, made on a side stream as torch asks for, and an unwrapped twin."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(kit.device)
    twin = copy.deepcopy(plain)
    if kit.device == "cpu":
        return DistributedDataParallel(plain), twin
    with torch.cuda.stream(torch.cuda.Stream()):
        model = DistributedDataParallel(plain)
    torch.cuda.synchronize()
    return model, twin


def step_of(model: Any, optimizer: Any) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_a_step_with_a_wrapped_model(kit: Any, group: None) -> None:
    model, twin = wrapped(kit)
    guard = kit.guard(step_of(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    eager = step_of(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(20):
            x = kit.randn(2, 4, seed=i)
            torch.testing.assert_close(guard(x), eager(x).detach())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert guard.stats["replays"] > 15
    assert not any("unrepeated-effect" in note for note in guard.report().notes)
    guard.reset()  # the graph holds the communicator: it goes before the group


def test_a_wrapped_model_is_warmed_up_longer(kit: Any, group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for model in wrapped(kit):
        eager_calls: list[int] = []
        guard = kit.guard(model, mode="forward", verify="off", warmup=3)
        monkeypatch.setattr(kit.backend, "on_stream", _counted(kit.backend.on_stream, eager_calls))
        with torch.no_grad():
            guard(kit.randn(2, 4))
        monkeypatch.undo()
        counts.append(len(eager_calls))
        guard.reset()
    assert counts[0] - counts[1] >= 11 - 3


def _counted(on_stream: Any, seen: list[int]) -> Any:
    def counting(stream: Any) -> Any:
        seen.append(1)
        return on_stream(stream)

    return counting


@pytest.mark.parametrize("inside", [False, True])
def test_behind_mode_autograd_it_is_refused(kit: Any, group: None, inside: bool) -> None:
    model, _ = wrapped(kit)
    guarded = torch.nn.Sequential(torch.nn.Linear(4, 4).to(kit.device), model) if inside else model
    with pytest.raises(SignatureError, match="DistributedDataParallel, which would not see") as caught:
        kit.guard(guarded, mode="autograd")(kit.randn(2, 4))
    assert 'mode="step"' in caught.value.cure
