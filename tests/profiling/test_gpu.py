"""On a GPU: the recorder, the measurement, and parity of real graphs. Each has its CPU counterpart beside it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; see test_analysis and test_parity"),
]
F = torch.nn.functional


class Task:
    """A small network with dropout, trained by Adam."""

    def __init__(self, scheduled: bool = False, tensor_lr: bool = False) -> None:
        torch.manual_seed(0)
        layers = [m for _ in range(12) for m in (torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU())]
        self.model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)).cuda()
        rate: Any = torch.tensor(1e-3, device="cuda") if tensor_lr else 1e-3
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate, capturable=True)
        self.scheduled, self.steps = scheduled, 0
        self.data = [(torch.randn(32, 64, device="cuda"),) for _ in range(8)]

    def step(self, x: Any) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(self.model(x), x[:, :1])
        loss.backward()
        self.optimizer.step()
        if self.scheduled:
            self.steps += 1
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-3 * 0.5 ** (self.steps // 10)
        return loss.detach()


def workload(name: str) -> Any:
    """One of those that `benchmarks/profile_gain.py` profiles."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return getattr(importlib.import_module("profile_workloads"), f"make_{name}")()


def test_a_small_network_is_launch_bound_and_the_projection_holds() -> None:
    from graphlint.runtime.profiling import profile

    task = Task()
    before = [p.detach().clone() for p in task.model.parameters()]
    report = profile(task.step, batches=task.data)
    assert report.advice.headline.startswith("Do this first.")
    assert report.whole.graphed is not None, report.whole.failed
    assert abs(report.whole.prediction_error or 1.0) < 0.15, str(report)
    assert report.whole.wall_range and report.whole.measured_range and report.whole.earlier
    assert report.modules[0].path == "model" and report.modules[0].gain and report.modules[0].gain > 1.5
    assert all(torch.equal(p, q) for p, q in zip(before, task.model.parameters(), strict=True))
    assert not task.optimizer.state


def test_a_large_product_is_not_worth_a_graph() -> None:
    from graphlint.runtime.profiling import profile

    weight = torch.nn.Linear(8192, 8192, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16384, 8192, device="cuda", dtype=torch.bfloat16)
    report = profile(lambda: weight(x).sum().backward(), measure=False)
    assert report.advice.headline.startswith("Not worth")


IN_STEP = 0.25  # the projected gain of one captured module may be off by that much


def test_one_captured_module_gains_the_step_what_was_projected() -> None:
    """A launch-bound head behind a compute-bound trunk; forward and backward of the head are graphs of the guard."""
    from graphlint.runtime.profiling import profile
    from graphlint.runtime.profiling.measure import measure_in_step
    from graphlint.runtime.profiling.record import Step
    from graphlint.runtime.profiling.world import World

    step, batches = workload("mixed")
    report = profile(step, batches=batches)
    (head,) = (m for m in report.modules if m.path == "model.head")
    assert head.step_measured is not None, report.notes
    assert head.step_measured > 2  # the trunk stays, and so does the optimizer
    assert head.step_gain == pytest.approx(head.step_measured, rel=IN_STEP), str(report)
    assert head.step_gain < report.whole.gain
    (trunk,) = (m for m in report.modules if m.path == "model.trunk")  # compute-bound: it gains next to nothing
    alone = measure_in_step(Step(step, batches=batches).held()[0], World(step), ["model.trunk"])["model.trunk"]
    assert alone.gain is not None, alone.reason
    assert trunk.step_gain == pytest.approx(alone.gain, rel=0.15)


def test_a_captured_module_without_gradients_gains_the_step_what_was_projected() -> None:
    from graphlint.runtime.profiling import profile

    step, batches = workload("mlp_inference")
    report = profile(step, batches=batches)
    (model,) = (m for m in report.modules if m.path == "model")
    assert model.step_measured is not None, report.notes
    assert model.step_gain == pytest.approx(model.step_measured, rel=IN_STEP), str(report)


def test_a_changing_batch_is_told_to_pad() -> None:
    from graphlint.runtime.profiling import profile

    task = Task()
    batches = [(torch.randn(n, 64, device="cuda"),) for n in (32, 17, 40)]
    report = profile(task.step, batches=batches)
    assert "Pad" in report.advice.points[0] and "17x64" in report.advice.points[0]
    assert report.whole.graphed is None  # nothing that can't hold is captured


def test_an_optimizer_that_refuses_a_capture_is_named_and_not_tried() -> None:
    from graphlint.runtime.profiling import profile

    task = Task()
    task.optimizer.param_groups[0]["capturable"] = False
    report = profile(task.step, batches=task.data)
    assert "capturable=True" in report.whole.failed


def test_a_plain_graph_trains_as_eager_does() -> None:
    from graphlint.runtime.parity import parity

    task = Task()
    report = parity(task.step, batches=task.data, steps=50, graphed="graph")
    assert report.ok, str(report)  # dropout draws the same numbers, too


def test_a_plain_graph_refills_tensors_at_any_depth_of_a_batch() -> None:
    from graphlint.runtime.parity import ParityFailed, parity

    task = Task()
    nested = [({"inputs": [x], "name": "a batch"},) for (x,) in task.data]

    def step(batch: Any) -> Any:
        return task.step(batch["inputs"][0])

    assert parity(step, batches=nested, steps=20, graphed="graph").ok
    with pytest.raises(ParityFailed, match="other shapes"):
        parity(step, batches=[*nested[:6], ({"inputs": [nested[0][0]["inputs"][0][:8]]},)], steps=8, graphed="graph")


def test_a_learning_rate_frozen_by_a_real_capture_is_found() -> None:
    from graphlint.runtime.parity import parity

    task = Task(scheduled=True)
    report = parity(task.step, batches=task.data, steps=30, graphed="graph", rtol=1e-5)
    assert not report.ok
    assert (
        report.diverged is not None and 7 <= report.diverged <= 12
    )  # the rate halves after ten steps, three of them warm
    assert any("frozen-lr" in reason for reason in report.reasons)
