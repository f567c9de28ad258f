"""Parity against twins that err as captured graphs do. On the CPU: the twin is a function."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.parity import ParityFailed, parity  # noqa: E402
from graphlint.runtime.parity_report import Curves, compare, plot  # noqa: E402

F = torch.nn.functional


class Task:
    """A small regression; `scheduled` changes the learning rate every ten steps."""

    def __init__(self, scheduled: bool = False, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.1) if scheduled else None
        self.data = [(torch.randn(16, 8),) for _ in range(8)]

    def step(self, x: Any) -> Any:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), 2 * x[:, :1])
        loss.backward()
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        return loss.detach()


def same(fn: Callable[..., Any], batch: Any) -> Callable[..., Any]:
    return fn


def kept_forever(fn: Callable[..., Any], batch: Any) -> Callable[..., Any]:
    kept = fn(*batch)
    return lambda *_: kept


def test_a_faithful_twin_is_equal_to_the_last_bit() -> None:
    task = Task(scheduled=True, dropout=0.3)
    report = parity(task.step, batches=task.data, steps=25, graphed=same)
    assert report.ok and report.bitwise == 25 and report.noise == 0
    assert "to the last bit" in report.to_text()


def test_the_state_is_put_back_afterwards() -> None:
    task = Task()
    task.step(*task.data[0])
    one = parity(task.step, batches=task.data, steps=5, graphed=same)
    two = parity(task.step, batches=task.data, steps=5, warmup=1, graphed=same)
    assert one.eager != two.eager  # the warm-up is real
    state = [p.clone() for p in task.model.parameters()]
    parity(task.step, batches=task.data, steps=5, warmup=0, graphed=same)
    assert all(torch.equal(p, q) for p, q in zip(state, task.model.parameters(), strict=True))


def test_stale_inputs_are_found_at_the_first_other_batch() -> None:
    task = Task()
    report = parity(task.step, batches=task.data, steps=20, graphed=lambda fn, batch: lambda *_: fn(*batch))
    assert report.diverged == 1 and report.bitwise == 1
    assert report.first_state is not None and report.first_state[0] == 1


def test_a_frozen_learning_rate_is_found_and_named() -> None:
    task = Task(scheduled=True)

    def frozen(fn: Callable[..., Any], batch: Any) -> Callable[..., Any]:
        rate = task.optimizer.param_groups[0]["lr"]

        def twin(*args: Any) -> Any:
            task.optimizer.param_groups[0]["lr"] = rate
            return fn(*args)

        return twin

    report = parity(task.step, batches=task.data, steps=30, warmup=3, graphed=frozen)
    # three warm-up steps: the schedule changes the rate after the tenth, which is step 7 here; its loss shows at 8
    assert report.diverged == 8 and report.first_state is not None and report.first_state[0] == 7
    assert any("frozen-lr" in reason for reason in report.reasons)


def test_batches_of_a_loader_and_none_at_all() -> None:
    task = Task()
    asked: list[int] = []

    def endless() -> Any:
        for i in itertools.count():
            asked.append(i)
            yield task.data[i % 8]

    report = parity(task.step, batches=endless(), steps=10, warmup=2, graphed=same)
    assert report.ok and report.steps == 10 and asked == list(range(12))  # each once, the same for all three runs
    with pytest.raises(ParityFailed, match="there are no batches"):
        parity(task.step, batches=[], steps=10, graphed=same)


def test_a_loss_that_is_no_number_is_said_so() -> None:
    task = Task()
    report = parity(lambda x: task.step(x) * math.nan, batches=task.data, steps=4, graphed=same)
    assert "the eager loss itself is nan at step 0" in report.to_text()


def test_an_eager_run_that_does_not_repeat_itself_is_said_so() -> None:
    report = compare(Curves((1.0, 1.0)), Curves((1.0, 1.2)), Curves((1.0, 1.1)), rtol=1e-3)
    assert report.ok and "two eager runs differ by 0.2 themselves" in report.to_text()
    quiet = compare(Curves((1.0, 1.0)), Curves((1.0, 1.0)), Curves((1.0, 1.0)), rtol=1e-3)
    assert "note:" not in quiet.to_text()


def test_both_curves_are_printed_along_the_run() -> None:
    losses = tuple(1.0 / (i + 1) for i in range(50))
    report = compare(Curves(losses), Curves(losses), Curves((*losses[:33], *[9.0] * 17)), rtol=1e-3)
    rows = [
        int(words[0]) for line in report.to_text().splitlines() if len(words := line.split()) > 3 and words[0].isdigit()
    ]
    assert rows == [0, 5, 10, 15, 20, 25, 30, 32, 33, 34, 35, 40, 45, 49]


def test_a_loss_that_never_changes() -> None:
    task = Task()
    report = parity(task.step, batches=task.data, steps=10, graphed=kept_forever)
    assert not report.ok and any("never changes" in reason for reason in report.reasons)


def test_a_python_number_of_the_capture() -> None:
    task = Task()

    def step(x: Any) -> float:
        return float(task.step(x))

    report = parity(step, batches=task.data, steps=10, graphed=kept_forever)
    assert any("Python number" in reason for reason in report.reasons)


def test_a_counter_on_the_host_is_named() -> None:
    task, seen = Task(), {"steps": 0}

    def step(x: Any) -> Any:
        seen["steps"] += 1
        return task.step(x) * seen["steps"]

    def frozen(fn: Callable[..., Any], batch: Any) -> Callable[..., Any]:
        return lambda *args: task.step(*args) * 4

    report = parity(step, batches=task.data, steps=10, graphed=frozen)
    assert any("seen['steps']" in reason for reason in report.reasons)


def test_noise_of_eager_itself_is_allowed() -> None:
    task = Task()
    noise = random.Random(1)  # out of the snapshot's reach: an unrepeatable kernel

    def step(x: Any) -> Any:
        return task.step(x) * (1 + 0.01 * box[0].random())

    class Hidden:
        __slots__ = ("source",)

        def __init__(self) -> None:
            self.source = noise

        def random(self) -> float:
            return self.source.random()

    box = (Hidden(),)
    report = parity(step, batches=task.data, steps=30, graphed=same, rtol=0.0)
    assert report.noise > 0 and report.ok


def test_no_number_equals_no_number() -> None:
    run = Curves((1.0, math.nan, math.nan))
    assert compare(run, run, run, rtol=1e-3).ok
    assert compare(run, run, Curves((1.0, math.nan, 2.0)), rtol=1e-3).diverged == 2
    assert json.loads(compare(run, run, run, rtol=1e-3).to_json())["eager"][1] is None


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda: None, "returns no loss"),
        (lambda: torch.ones(3), "returns no loss"),
        (lambda: 1 / 0, "the eager step raises ZeroDivisionError"),
    ],
)
def test_what_can_not_be_compared(step: Any, said: str) -> None:
    with pytest.raises(ParityFailed, match=said):
        parity(step, steps=3, graphed=same)


def test_a_capture_that_fails_points_to_the_dry_run() -> None:
    def broken(fn: Any, batch: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    with pytest.raises(ParityFailed, match="not permitted when stream is capturing; `graphlint dry-run`"):
        parity(lambda: torch.ones(()), steps=3, graphed=broken)


def test_the_plot_marks_where_the_curves_part() -> None:
    eager, graphed = [10.0 - i for i in range(10)], [10.0 - min(i, 5) for i in range(10)]
    lines = plot(eager, graphed, diverged=6)
    assert sum(line.count("*") for line in lines[:14]) == 6
    caret = next(line for line in lines if "^" in line)
    assert caret.index("^") - 12 == 6  # the sixth column behind the axis
    assert plot([math.nan], [math.inf]) == ["(no finite loss to draw)"]


def test_under_the_guard_with_its_cpu_backend() -> None:
    from graphlint.runtime.fake import FakeBackend
    from graphlint.runtime.guard import capture_safe

    task = Task(dropout=0.2)
    task.optimizer = torch.optim.SGD(task.model.parameters(), lr=1e-2, momentum=0.9)

    def guarded(fn: Any, batch: Any) -> Any:
        return capture_safe(fn, verify="off", backend=FakeBackend())

    report = parity(task.step, batches=task.data, steps=12, graphed=guarded)
    assert report.ok, str(report)


def test_the_guards_own_error_keeps_place_and_cure() -> None:
    from graphlint.runtime.fake import FakeBackend
    from graphlint.runtime.guard import capture_safe

    task = Task()  # Adam without capturable=True
    with pytest.raises(ParityFailed, match=r"(?s)graphed step 0 raises .*self.optimizer.step\(\).*capturable=True"):
        parity(
            task.step,
            batches=task.data,
            steps=3,
            graphed=lambda fn, _: capture_safe(fn, verify="off", backend=FakeBackend()),
        )


def test_a_guarded_step_is_compared_with_what_it_guards() -> None:
    from graphlint.runtime.fake import FakeBackend
    from graphlint.runtime.guard import capture_safe

    task = Task()
    guard = capture_safe(task.step, verify="off", backend=FakeBackend())
    assert parity(guard, batches=task.data, steps=5, graphed=same).ok
    assert guard.stats["graphs"] == 0  # the eager runs never entered the guard
