"""The dry run of a step: everything that is wrong, at its line, and nothing that only a CPU does."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphlint.runtime.dryrun import CaptureUnsafe, DryRunReport, assert_capture_safe, dry_run, emulated_device


def rules(report: DryRunReport) -> list[str]:
    return sorted(finding.name for finding in report.findings)


def line_of(function: Callable[..., Any], text: str) -> int:
    """The row of the first source line of a function that holds the text."""
    lines, start = inspect.getsourcelines(function)
    return start + next(index for index, line in enumerate(lines) if text in line)


def x() -> torch.Tensor:
    return torch.randn(4, 4)


def test_goes_on_after_a_violation_and_reports_all() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        total = x.sum().item()
        rows = x[x > 0]
        host = x.cpu()
        fresh = torch.tensor([1.0, 2.0], device="cuda")
        torch.cuda.synchronize()
        return rows.sum() + host.sum() + fresh.sum() + total

    report = dry_run(step, x())
    assert rules(report) == ["dynamic-shape", "host-copy", "host-sync", "host-sync", "stream-sync"]
    expected = {line_of(step, text) for text in ("item", "x > 0", ".cpu()", "tensor([", "synchronize")}
    assert {finding.at.row for finding in report.findings} == expected
    assert all(finding.at.filename.endswith("test_step.py") for finding in report.findings)


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        if grad.sum() > 1e9:
            return grad
        return 2 * saved * grad


def test_backward_names_the_forward_line() -> None:
    weight = torch.ones(4, 4, requires_grad=True)

    def step(x: torch.Tensor) -> None:
        y = Checked.apply(x @ weight)
        y.sum().backward()

    (finding,) = dry_run(step, x()).findings
    assert finding.name == "data-dependent-branch"
    assert finding.at.row == line_of(Checked, "grad.sum()")
    assert [note.row for note in finding.related] == [line_of(step, "Checked.apply")]


HARMLESS: list[Callable[[torch.Tensor], object]] = [
    lambda x: nn.functional.one_hot(x.argmax(-1), num_classes=4),
    lambda x: x.masked_fill(x > 0, 0.0),
    lambda x: x.clone().__setitem__(x > 0, 1.0),
    lambda x: x.clone().__setitem__(0, 1.0),
    lambda x: x.clone().__setitem__((slice(0, 1), 0), 1.0),
    lambda x: torch.tensor(2.0).item() * x,
    lambda x: torch.tensor(3.0) * x,
    lambda x: x * len(x) + x.shape[0],
    lambda x: torch.zeros(3, device="cuda") + x[0, :3],
    lambda x: torch.tensor([], device="cuda"),
    lambda x: x.to("cuda") + x.cuda(),
    lambda x: torch.tensor([1.0, 2.0]).sum().item() * x,
    lambda x: x.repeat_interleave((x[:, 0] * 0).long() + 2, dim=0, output_size=8),
    lambda x: torch.histc(x, 10, min=-1, max=1),
    lambda x: x.quantile(torch.linspace(0, 1, 3, device=x.device)),
    lambda x: nn.functional.cross_entropy(x, (x[:, 0] * 0).long()),
    lambda x: torch.nonzero_static(x > 0, size=4),
    lambda x: nn.functional.dropout(x),
    lambda x: torch.where(x > 0, x, -x),
    lambda x: [row + 1 for row in x],
    lambda x: f"{x.shape} {x.dtype} {x.device}",
    lambda x: x.pin_memory() if False else torch.empty(4, pin_memory=True).to("cuda", non_blocking=True),
]


@pytest.mark.parametrize("harmless", HARMLESS)
def test_harmless(harmless: Callable[[torch.Tensor], object]) -> None:
    assert rules(dry_run(harmless, x(), target_torch="2.11")) == []


HARMFUL: list[tuple[str, Callable[[torch.Tensor], object]]] = [
    ("host-sync", lambda x: float(x.sum())),
    ("host-sync", lambda x: x.tolist()),
    ("host-sync", lambda x: x.cpu().numpy()),
    ("host-sync", lambda x: 1.0 in x),
    ("host-sync", lambda x: torch.equal(x, x)),
    ("data-dependent-branch", lambda x: x + 1 if x.sum() > 0 else x),
    ("data-dependent-branch", lambda x: x.sum() > 0 and x),
    ("data-dependent-branch", lambda x: not x.sum()),
    ("data-dependent-branch", lambda x: [r for r in x if r.sum() > 0]),
    ("data-dependent-loop", lambda x: range((x * 0).sum().long())),
    ("scalar-index", lambda x: x[: (x.sum() * 0).long() + 2]),
    ("scalar-index", lambda x: torch.arange(9)[(x * 0).long()]),
    ("scalar-index", lambda x: [1, 2, 3][(x.sum() * 0).long()]),
    ("host-index", lambda x: x[[0, 1]]),
    ("host-index", lambda x: x[torch.tensor([0, 1])]),
    ("host-index", lambda x: x.clone().__setitem__((0, 0), 1.0)),
    ("host-index", lambda x: x.flatten().__setitem__(0, 1.0)),
    ("host-index", lambda x: x.clone().__setitem__(x[0].long(), 1.0)),
    ("printed-tensor", lambda x: f"{x.sum():.3f}"),
    ("printed-tensor", lambda x: repr(x)),
    ("dynamic-shape", lambda x: x.nonzero()),
    ("dynamic-shape", lambda x: torch.where(x > 0)),
    ("dynamic-shape", lambda x: torch.unique(x)),
    ("dynamic-shape", lambda x: x.clone().__setitem__(x[:, 0] > -100, x)),
    ("dynamic-shape", lambda x: nn.functional.one_hot((x * 0).long())),
    ("dynamic-shape", lambda x: torch.histc(x, 10)),
    ("dynamic-shape", lambda x: torch.bincount((x * 0).long().flatten(), minlength=10)),
    ("dynamic-shape", lambda x: x.repeat_interleave((x[:, 0] * 0).long() + 2, dim=0)),
    ("checked-linalg", lambda x: torch.linalg.inv(x + 9 * torch.eye(4, device="cuda"))),
    ("checked-linalg", lambda x: torch.linalg.eigh(x @ x.T)),
    ("hidden-check", lambda x: torch.normal(x, x.abs())),
    ("hidden-check", lambda x: torch.distributions.Normal(x.mean(), x.std() + 1).sample()),
    ("host-copy", lambda x: torch.zeros(4).to("cuda", non_blocking=True)),
    ("host-copy", lambda x: torch.zeros(4).pin_memory().to("cuda")),
    ("host-copy", lambda x: x.new_tensor([1.0])),
    ("host-copy", lambda x: x.copy_(torch.zeros(4, 4))),
    ("host-rng", lambda x: x * random.random()),
    ("unregistered-generator", lambda x: torch.rand(4, device="cuda", generator=torch.Generator("cuda"))),
    ("stream-sync", lambda x: torch.cuda.Event().synchronize()),
    ("stream-sync", lambda x: torch.cuda.current_stream().query()),
    ("default-stream", lambda x: torch.cuda.stream(torch.cuda.default_stream()).__enter__()),
    ("cond-operator", lambda x: torch.cond(x.sum() > 0, lambda: x + 1, lambda: x - 1)),
]


@pytest.mark.parametrize(("rule", "harmful"), HARMFUL)
def test_harmful(rule: str, harmful: Callable[[torch.Tensor], object]) -> None:
    assert rule in rules(dry_run(harmful, x(), runs=1, target_torch="2.11"))


def test_copies_are_told_by_role() -> None:
    def step(x: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(x, non_blocking=True)
        x.cpu()

    with emulated_device():
        device, pinned = torch.ones(4, device="cuda"), torch.empty(4, pin_memory=True)
        report = dry_run(step, device, pinned)
    assert [(copy.direction, copy.pinned, copy.non_blocking) for copy in report.copies] == [
        ("device-to-host", True, True),
        ("device-to-host", False, False),
    ]
    assert rules(report) == ["host-sync"]


def test_an_emulated_device_answers_as_a_device() -> None:
    with emulated_device():
        net = nn.Linear(4, 4).to("cuda")
        host = torch.zeros(4)
        assert net.weight.is_cuda and net.weight.device == torch.device("cuda", 0)
        assert not host.is_cuda and host.device.type == "cpu"
        assert torch.zeros_like(net.weight).is_cuda and (net(torch.ones(1, 4, device="cuda"))).is_cuda
        assert torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()
        assert not host.cuda().cpu().is_cuda
    assert not hasattr(torch.cuda, "_played")
    assert torch.zeros(1).device.type == "cpu"


def train(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (x @ weight).square().mean().backward()
        optimizer.step()

    return step


def test_optimizers_that_may_and_may_not() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    report = dry_run(train(torch.optim.SGD([weight], lr=0.1, momentum=0.9), weight), x())
    assert rules(report) == []
    assert [(o.name, o.capturable, o.lr) for o in report.optimizers] == [("SGD", None, "Python number")]
    assert rules(dry_run(train(torch.optim.Adam([weight]), weight), x(), runs=1)) == ["not-capturable"]
    assert rules(dry_run(train(torch.optim.Adam([weight], capturable=True), weight), x())) == []


def test_a_scheduler_that_moves_a_number_freezes_it() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = train(optimizer, weight)
    (finding,) = dry_run(step, x(), between=lambda *_: scheduler.step()).findings
    assert finding.name == "frozen-lr" and "-0.1 at capture, -0.09 now" in finding.message
    assert finding.at.row == line_of(train, "optimizer.step()")


def test_a_scaler_needs_a_fused_optimizer() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor) -> None:
        scaler.scale((x @ weight).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    assert "unfused-scaler" in rules(dry_run(step, x(), runs=1))


class Model:
    """One object whose plain state decides what the step computes."""

    def __init__(self) -> None:
        self.scale, self.calls, self.training, self.table = 2.0, 0, True, torch.ones(4, 4)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + 1

    def moded(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return x.relu()
        return x.sigmoid()

    def looked_up(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table


def test_a_number_that_changes_is_frozen() -> None:
    model = Model()
    (finding,) = dry_run(model.scaled, x(), between=lambda *_: setattr(model, "scale", model.scale + 1)).findings
    assert (finding.name, finding.at.row) == ("frozen-scalar", line_of(Model.scaled, "return"))


def test_a_counter_is_not_repeated() -> None:
    (finding,) = dry_run(Model().counted, x()).findings
    assert (finding.name, finding.at.row) == ("unrepeated-effect", line_of(Model.counted, "+= 1"))


def test_a_branch_is_told_at_its_test() -> None:
    model = Model()
    (finding,) = dry_run(model.moded, x(), between=lambda *_: setattr(model, "training", False)).findings
    assert (finding.name, finding.at.row) == ("frozen-mode", line_of(Model.moded, "if self.training"))


def test_replaced_memory_is_told_where_it_was_replaced() -> None:
    model = Model()

    def between(*_: object) -> None:
        model.table = torch.ones(4, 4)

    (finding,) = dry_run(model.looked_up, x(), between=between).findings
    assert (finding.name, finding.at.row) == ("rebound-input", line_of(between, "model.table ="))


def test_refilling_in_place_is_fine() -> None:
    model, data = Model(), x()
    assert rules(dry_run(model.looked_up, data, between=lambda *_: data.normal_())) == []


def test_a_stream_must_be_joined() -> None:
    def unjoined(x: torch.Tensor) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    def joined(x: torch.Tensor) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)

    assert rules(dry_run(unjoined, x())) == ["unjoined-stream"]
    assert rules(dry_run(joined, x())) == []


def test_an_exception_of_the_step_is_reported_not_raised() -> None:
    def step(x: torch.Tensor) -> None:
        x.sum().item()
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("boom")

    report = dry_run(step, x())
    assert report.error == "ValueError: boom" and rules(report) == ["host-sync"] and not report.ok


def test_versions_decide() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(4, pin_memory=True)

    assert rules(dry_run(step, x(), target_torch="2.10")) == ["pinned-alloc"]
    assert rules(dry_run(step, x(), target_torch="2.11")) == []


def test_assert_capture_safe_reads_well() -> None:
    def step(x: torch.Tensor) -> float:
        return x.sum().item()

    with pytest.raises(CaptureUnsafe) as caught:
        assert_capture_safe(step, x())
    text = str(caught.value)
    assert "CG101 host-sync" in text and "return x.sum().item()" in text and "help:" in text
    assert assert_capture_safe(step, x(), ignore=["CG101"]).ok


def test_json_has_the_linters_keys() -> None:
    data = json.loads(dry_run(lambda x: x.sum().item(), x()).to_json())
    (finding,) = data["findings"]
    assert finding["code"] == "CG101" and finding["location"]["row"] > 0
    assert any(name.endswith("test_step.py") for name in data["executed"])


@pytest.mark.parametrize(
    ("read", "kept"),
    [
        (lambda x, v: x.masked_fill(x > 0, v), lambda x, v: x.masked_fill(x > 0, 2.0)),
        (lambda x, v: x.masked_fill_(x > 0, v), lambda x, v: torch.where(x > 0, v, x)),
        (lambda x, v: x.index_fill(0, torch.zeros(1, dtype=torch.long, device="cuda"), v), lambda x, v: x.fill_(v)),
        (lambda x, v: torch.linspace(0, v, 5, device="cuda"), lambda x, v: torch.linspace(0, 1, 5, device="cuda")),
        (lambda x, v: torch.logspace(v, v, 5, device="cuda"), lambda x, v: torch.logspace(0, 1, 5, device="cuda")),
        (lambda x, v: torch.full((3,), v, device="cuda"), lambda x, v: torch.full((3,), 2.0, device="cuda")),
    ],
)
def test_a_value_on_the_device_where_an_operator_wants_a_number(
    read: Callable[..., Any], kept: Callable[..., Any]
) -> None:
    value = torch.tensor(2.0)
    assert rules(dry_run(read, x(), value, runs=1)) == ["host-sync"]
    assert rules(dry_run(kept, x(), value, runs=1)) == []
