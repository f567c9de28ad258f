"""The report in three shapes, copies of guards, threads, and what the watched call sees."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import CaptureError  # noqa: E402
from graphlint.runtime.guard import CaptureSafe, capture_safe  # noqa: E402
from graphlint.runtime.observe import Observer  # noqa: E402


def proofs(guard: CaptureSafe) -> dict[str, str]:
    """Stage -> verdict of the guard's first graph."""
    return {proof.stage: proof.verdict for proof in guard.report().graphs[0].proofs}


def test_the_report_tells_what_was_proved(kit: Any) -> None:
    guard = kit.guard(lambda x: torch.nn.functional.dropout(x, 0.5))
    for _ in range(5):
        guard(kit.randn(64))
    assert proofs(guard)["replay against eager"] == "proved"
    assert proofs(guard)["random numbers"] == "proved"
    assert proofs(guard)["fresh inputs"] == "proved"
    report = guard.report()
    assert report.proved
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["stats"]["replays"] == report.graphs[0].replays > 0
    text = str(report)
    assert "x: float32[64]" in text
    assert "replay against eager: 3 step(s) equal, bitwise" in text
    assert "replay()" in report.source


def test_a_report_without_verification_proves_nothing(kit: Any) -> None:
    guard = kit.guard(lambda x: x + 1, verify="off")
    guard(kit.randn(3))
    assert not guard.report().proved
    assert proofs(guard) == {"verification": "skipped"}


def test_the_report_tells_what_was_refused(kit: Any) -> None:
    guard = kit.guard(lambda x: x * x.sum().item())
    for _ in range(2):
        with pytest.raises(CaptureError):
            guard(kit.randn(3))
    (fault,) = guard.report().faults
    assert fault["code"] == "CG101"
    assert fault["filename"] == __file__
    assert "refused: CG101 host-sync" in str(guard.report())


def test_refusals_as_sarif_without_the_static_half() -> None:
    pytest.importorskip("msgspec")  # the linter's; a machine that only runs guards may lack it
    from graphlint.runtime.fake import FakeBackend

    def fn(x: Any) -> Any:
        return x * x.sum().item()  # here

    guard = capture_safe(fn, backend=FakeBackend(), on_violation="eager")
    with pytest.warns(UserWarning):
        guard(torch.ones(2))
    run = json.loads(guard.report().to_sarif(str(Path(__file__).parent)))["runs"][0]
    (result,) = run["results"]
    assert result["ruleId"] == "CG101"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == Path(__file__).name
    row = place["region"]["startLine"]
    assert Path(__file__).read_text(encoding="utf-8").splitlines()[row - 1].endswith("# here")
    code = "import sys, graphlint.runtime.sarif as s; s.sarif_of([]); sys.exit('libcst' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_memory_counts_buffers_and_outputs(kit: Any) -> None:
    guard = kit.guard(lambda x: x.double())
    guard(kit.randn(100))
    assert guard.memory()["inputs"] >= 400
    assert guard.memory()["outputs"] >= 800
    guard.reset()
    assert guard.memory() == {"inputs": 0, "outputs": 0, "pool": 0}


@pytest.mark.parametrize("mode", ["step", "autograd"])
def test_memory_counts_every_pool(kit: Any, mode: str) -> None:
    m = torch.nn.Linear(16, 16).to(kit.device)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = m(x).square().sum()
        if mode == "step":
            loss.backward()
        return loss

    guard = kit.guard(step, mode=mode)
    for _ in range(3):
        loss = guard(kit.randn(4, 16))
        if mode == "autograd":
            loss.backward()
    assert guard.memory()["pool"] >= 4 * 16 * 16
    guard.reset()
    assert guard.memory()["pool"] == 0


def test_a_deep_copy_guards_a_copy(kit: Any) -> None:
    guard = kit.guard(torch.nn.Linear(4, 4).to(kit.device))
    x = kit.randn(2, 4)
    with torch.no_grad():
        for _ in range(4):
            guard(x)
        other = copy.deepcopy(guard)
        assert other.stats["graphs"] == 0
        other.weight.zero_()
        for _ in range(4):
            assert torch.equal(other(x), other.bias.expand(2, 4))
        assert torch.equal(guard(x), torch.nn.functional.linear(x, guard.weight, guard.bias))


def test_an_object_with_a_guarded_method_can_be_copied_and_pickled() -> None:
    from graphlint.runtime.fake import FakeBackend

    Scaled.run._backend = FakeBackend()
    mine = Scaled()
    x = torch.ones(3)
    for _ in range(4):
        assert mine.run(x).tolist() == [2.0] * 3
    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        other.by.fill_(5.0)
        for _ in range(4):
            assert other.run(x).tolist() == [5.0] * 3
    assert mine.run(x).tolist() == [2.0] * 3


class Scaled:
    """At module level, so that it can be pickled."""

    def __init__(self) -> None:
        self.by = torch.tensor(2.0)

    @capture_safe
    def run(self, x: Any) -> Any:
        return x * self.by


def test_a_module_that_a_guard_watches_can_be_pickled(kit: Any) -> None:
    m = torch.nn.Linear(2, 2).to(kit.device)
    guard = kit.guard(m)
    with torch.no_grad():
        guard(kit.randn(1, 2))
    again = pickle.loads(pickle.dumps(m))
    again.load_state_dict(m.state_dict())
    copy.deepcopy(m).load_state_dict(m.state_dict())


def test_a_guard_that_is_gone_is_collected(kit: Any) -> None:
    guard = kit.guard(torch.nn.Linear(2, 2).to(kit.device))
    with torch.no_grad():
        for _ in range(5):
            guard(kit.randn(1, 2))
    seen = weakref.ref(guard)
    del guard
    gc.collect()
    assert seen() is None


def test_guards_in_two_threads(kit: Any) -> None:
    wrong: list[Any] = []

    def work(by: int) -> None:
        guard = kit.guard(lambda x: x * by, outputs="clone")
        for i in range(20):
            x = torch.full((4,), float(i), device=kit.device)
            if guard(x).tolist() != [i * float(by)] * 4:
                wrong.append((by, i))

    threads = [threading.Thread(target=work, args=(by,)) for by in (2, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_another_stream_waits_for_the_last_replay() -> None:
    from graphlint.runtime.fake import FakeBackend

    backend = FakeBackend()
    guard = capture_safe(lambda x: x * 2, backend=backend)
    for _ in range(4):
        guard(torch.ones(2))
    backend.log.clear()
    guard(torch.ones(2))
    assert backend.log == ["copies"]
    backend.stream = 7
    guard(torch.ones(2))
    guard(torch.ones(2))
    # the wait comes before the copy: the replay on the other stream may still read what the copy overwrites
    assert backend.log == ["copies", "wait 0", "copies", "copies"]


def test_work_on_a_stream_that_is_not_part_of_the_capture_is_refused() -> None:
    from graphlint.runtime.errors import StreamError
    from graphlint.runtime.fake import FakeBackend

    backend = FakeBackend()

    def fn(x: Any) -> Any:
        backend.stream = 5
        y = x * 2  # on the side
        backend.stream = 0
        return y + 1

    with pytest.raises(StreamError) as caught:
        capture_safe(fn, backend=backend)(torch.ones(2))
    assert caught.value.rule == "unforked-stream"
    assert "on the side" in caught.value.source_line
    backend.joined.add(5)
    assert capture_safe(fn, backend=backend)(torch.ones(2)).tolist() == [3.0, 3.0]


def test_snapshots_go_to_the_host_when_the_device_is_short() -> None:
    from graphlint.runtime.fake import FakeBackend

    backend = FakeBackend()
    backend.free = 0
    m = torch.nn.Linear(4, 4)
    o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

    def step(x: Any) -> Any:
        o.zero_grad()
        loss = m(x).sum()
        loss.backward()
        o.step()
        return loss

    guard = capture_safe(step, backend=backend)
    for _ in range(4):
        guard(torch.ones(2, 4))
    assert guard.report().proved


def test_the_observer_tells_reads_writes_and_draws() -> None:
    outside, written = torch.ones(3), torch.zeros(3)
    observer = Observer("cpu", lambda: 0, torch.clone)
    with observer:
        written.add_(outside * 2)
        torch.rand(2)
        (outside > 0).nonzero()
    addresses = {t.untyped_storage().data_ptr() for t in (outside, written)}
    assert set(observer.reads) == addresses
    assert list(observer.writes) == [written.untyped_storage().data_ptr()]
    assert observer.draws
    assert not observer.backward
    assert [event.op for event in observer.events] == ["aten::nonzero"]
    assert observer.events[0].where is not None
    assert "nonzero" in observer.events[0].where.source_line
    observer.undo()
    assert written.tolist() == [0.0] * 3


def test_a_guard_is_not_guarded_twice(kit: Any) -> None:
    guard = kit.guard(lambda x: x)
    assert isinstance(guard, CaptureSafe)
    assert capture_safe(guard) is guard
