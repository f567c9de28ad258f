"""`profile(fn)` without a GPU: timing, state and measurement are real, the recording and the graph are stand-ins."""

from __future__ import annotations

import contextlib
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
from build import Recorder

torch = pytest.importorskip("torch")

import graphlint.runtime.profiling.live as live  # noqa: E402
import graphlint.runtime.profiling.measure as measure  # noqa: E402
import graphlint.runtime.profiling.record as record  # noqa: E402
import graphlint.runtime.profiling.timing as timing  # noqa: E402
from graphlint.runtime import backend  # noqa: E402
from graphlint.runtime.backend import CaptureFailed  # noqa: E402
from graphlint.runtime.fake import FakeBackend  # noqa: E402
from graphlint.runtime.profiling import profile  # noqa: E402
from graphlint.runtime.profiling.costs import ReplayCosts  # noqa: E402
from graphlint.runtime.profiling.readings import Reading  # noqa: E402
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
    for check in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        monkeypatch.setattr(torch.optim.Optimizer, check, lambda _: None, raising=False)  # they ask the device
    monkeypatch.setattr(record, "trace_steps", timeline)
    monkeypatch.setattr(record, "calibrate", ReplayCosts)
    monkeypatch.setattr(timing, "_LOOP", 0.0005)
    monkeypatch.setattr(timing, "_TURNS", (3, 3))
    monkeypatch.setattr(timing, "_own_objects_aside", contextlib.nullcontext)  # a second for each reading
    monkeypatch.setattr(backend, "_default", FakeBackend())
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


def test_a_trace_that_can_not_be_kept_is_told_before_the_step_runs(captured: list[str], tmp_path: Path) -> None:
    task = Task()
    task.step = lambda x: pytest.fail("it ran")  # type: ignore[method-assign]
    with pytest.raises(OSError):
        profile(task.step, torch.randn(4, 8), trace=tmp_path / "no" / "trace.json")


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
    readings = iter([(Reading((1000.0, 1010.0)),), (Reading((1300.0, 1290.0)),)])
    monkeypatch.setattr(record, "turns", lambda _: next(readings))
    report = profile(Task().step, torch.randn(4, 8), measure=False)
    assert report.whole.wall == 1150 and report.whole.wall_range == pytest.approx((1003, 1297))
    (note,) = (n for n in report.notes if "not quiet" in n)
    assert "1.00 ms to 1.30 ms" in note
    low, high = report.whole.gain_range or (0, 0)
    assert low < report.whole.gain < high and f"{low:.2f} to {high:.2f}" in note


def test_a_quiet_machine_is_not_called_noisy(captured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "turns", lambda _: (Reading((1000.0, 1010.0, 1040.0)),))
    assert not any("quiet" in n for n in profile(Task().step, torch.randn(4, 8), measure=False).notes)


def test_the_gain_is_over_the_eager_time_read_beside_the_graph(
    captured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "uncapturable", lambda _: "")
    monkeypatch.setattr(record, "turns", lambda _: (Reading((1000.0,) * 3),))
    monkeypatch.setattr(
        measure, "turns", lambda *_: (Reading((1200.0, 1200.0, 1320.0)), Reading((100.0, 120.0, 110.0)))
    )
    whole = profile(Task().step, torch.randn(4, 8)).whole
    assert (whole.wall, whole.graphed, whole.earlier) == (1200.0, 110.0, 1000.0)
    assert whole.measured_gain == pytest.approx(1200 / 110)
    assert whole.measured_range == pytest.approx((10.4, 12.0))  # turn by turn: 12, 10, 12
    assert whole.prediction_error == pytest.approx(110 / whole.projected - 1)
    assert whole.earlier_error == pytest.approx(1000 / whole.projected / (1200 / 110) - 1)


def test_a_module_is_measured_with_the_rest_of_the_step_around_it(captured: list[str]) -> None:
    task = Task()
    report = profile(task.step, torch.randn(4, 8))
    assert report.modules[0].step_measured is not None, report.notes
    assert "step" in report.to_text() and "forward" not in task.model.__dict__  # the module is the user's again
    fake = backend.default()
    assert isinstance(fake, FakeBackend) and [g.replays > 0 for g in fake.graphs] == [True, True]  # forward, backward


def test_batches_are_fetched_once_and_are_no_part_of_the_step(captured: list[str]) -> None:
    asked: list[int] = []

    def batches(i: int) -> Any:
        asked.append(i)
        sleep(0.002)
        return (torch.randn(4, 8),)

    report = profile(Task().step, batches=batches, measure=False)
    assert asked == list(range(8))
    assert report.whole.fetch > 2000
    assert report.whole.wall < 2000 and any("Fetching a batch takes" in p for p in report.advice.points)


def test_shapes_of_all_batches_count_and_not_only_of_the_recorded_steps(captured: list[str]) -> None:
    batches = [(torch.randn(n, 8),) for n in (4, 4, 4, 4, 4, 9)]
    report = profile(Task().step, batches=batches)
    assert "Pad" in report.advice.points[0] and "9x8" in report.advice.points[0]


def test_batches_of_a_loader_and_batches_that_are_none(captured: list[str]) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 8)), batch_size=4)
    step = Task().step
    assert profile(lambda batch: step(*batch), batches=loader, measure=False).live
    for empty in ([], iter(())):
        with pytest.raises(record.StepFailed, match="there are no batches"):
            profile(step, batches=empty)
    with pytest.raises(record.StepFailed, match="batch 0 can't be had: KeyError"):
        profile(step, batches=lambda i: {}[i])
