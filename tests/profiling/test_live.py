"""`profile(fn)` without a GPU: timing, state and measurement are real, the recording and the graph are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from build import Recorder

torch = pytest.importorskip("torch")

import graphlint.runtime.profiling.live as live  # noqa: E402
import graphlint.runtime.profiling.measure as measure  # noqa: E402
import graphlint.runtime.profiling.record as record  # noqa: E402
from graphlint.runtime.backend import CaptureFailed  # noqa: E402
from graphlint.runtime.profiling import profile  # noqa: E402
from graphlint.runtime.profiling.costs import ReplayCosts  # noqa: E402
from graphlint.runtime.profiling.timeline import Timeline  # noqa: E402
from graphlint.runtime.profiling.world import World  # noqa: E402


def timeline(*_: Any) -> Timeline:
    recorder = Recorder()
    for number in range(3):
        begin = recorder.host
        for _ in range(20):
            recorder.launch(0.1, host=10)
        recorder.module("model", "Linear", begin)
        recorder.step(number, begin)
    return recorder.timeline()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine that seems to have a GPU; the list says what was captured."""
    done: list[str] = []

    def capture(run: Any, generators: Any = ()) -> Any:
        run()
        done.append(run.__qualname__)
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    monkeypatch.setattr(record, "trace_steps", timeline)
    monkeypatch.setattr(record, "calibrate", ReplayCosts)
    monkeypatch.setattr(record, "_SECONDS", 0.002)
    monkeypatch.setattr(measure, "capture", capture)
    return done


class Task:
    def __init__(self, **adam: Any) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters(), **adam)
        self.calls = 0

    def step(self, x: Any) -> Any:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_a_profile_leaves_no_trace_in_the_step(captured: list[str]) -> None:
    task = Task()
    before = [p.clone() for p in task.model.parameters()]
    report = profile(task.step, torch.randn(4, 8), measure=False)
    assert report.live and report.steps == 3
    assert task.calls == 0 and not task.optimizer.state
    assert all(torch.equal(p, q) for p, q in zip(before, task.model.parameters(), strict=True))
    assert captured == []


def test_modules_are_measured_before_the_step(captured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "uncapturable", lambda _: "")
    report = profile(Task().step, torch.randn(4, 8))
    assert report.modules[0].eager is not None and report.modules[0].gain is not None
    assert report.whole.graphed is not None
    assert [name.split(".")[0] for name in captured] == ["_measure_module", "measure_step"]


def test_an_optimizer_that_can_not_be_captured_is_named(captured: list[str]) -> None:
    report = profile(Task().step, torch.randn(4, 8))
    assert report.whole.graphed is None and "optimizer (Adam) was built without capturable=True" in report.whole.failed
    assert not any("measure_step" in name for name in captured)


def test_changing_batches_are_not_captured_unless_asked(captured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "uncapturable", lambda _: "")
    batches = [(torch.randn(n, 8),) for n in (4, 5, 6)]
    report = profile(Task().step, batches=batches)
    assert captured == [] and "Pad" in report.advice.points[0]
    profile(Task().step, batches=lambda i: batches[i % 3], measure=True)
    assert captured


def test_a_capture_that_fails_is_told_with_its_first_error(
    captured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(run: Any, generators: Any = ()) -> Any:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nsearch for it")
        except RuntimeError as first:
            raise CaptureFailed(first, invalidated=True) from first

    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(live, "uncapturable", lambda _: "")
    report = profile(Task().step, torch.randn(4, 8))
    assert report.whole.failed.startswith("CG") and "(test_live.py:" in report.whole.failed
    assert any("model could not be captured alone: CG" in note for note in report.notes)


def test_a_step_that_raises_keeps_its_own_error(captured: list[str]) -> None:
    with pytest.raises(record.StepFailed, match="the step raises ValueError: no more data") as raised:
        profile(lambda: (_ for _ in ()).throw(ValueError("no more data")))
    assert isinstance(raised.value.__cause__, ValueError)


def test_modules_are_measured_in_the_modes_of_the_step(captured: list[str]) -> None:
    seen: list[bool] = []
    model = torch.nn.Linear(8, 8)
    model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))

    @torch.no_grad()
    def step(x: Any) -> Any:
        for _ in range(50):
            x = model(x)
        return x

    assert profile(step, torch.randn(4, 8)).modules[0].gain is not None
    assert set(seen) == {False}


def test_marks_name_the_modules_by_their_path() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Tanh()))
    world = World(lambda x: net(x))
    with torch.profiler.profile() as profiler, record._marked(world):
        net(torch.randn(2, 4))
    names = {e.name for e in profiler.events()}
    assert {"graphlint.module::net|Sequential", "graphlint.module::net.1.0|Tanh"} <= names
    with torch.profiler.profile() as after:
        net(torch.randn(2, 4))
    assert not any(e.name.startswith("graphlint") for e in after.events())  # the hooks are gone


def test_a_machine_that_is_not_quiet_is_told(captured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1000.0, 1300.0])
    monkeypatch.setattr(record, "wall_time", lambda _: next(readings))
    report = profile(Task().step, torch.randn(4, 8), measure=False)
    assert report.whole.wall == 1150
    assert any("1.00 ms in one loop and 1.30 ms in another:" in note for note in report.notes)
