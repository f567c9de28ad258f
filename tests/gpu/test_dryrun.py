"""The dry run on a real device: the same step, watched instead of played, is judged the same. Its logic is tested on
the CPU in `tests/dryrun`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "dryrun"), str(Path(__file__).parent)]

from construct_programs import ROWS, load  # noqa: E402
from test_step import HARMFUL, HARMLESS, Checked, Model, line_of, rules, train  # noqa: E402
from torch import nn  # noqa: E402

from graphlint.runtime.dryrun import dry_run, emulated_device  # noqa: E402
from graphlint.runtime.watchsync import capture_watch  # noqa: E402

# other threads in the default mode, and what is warmed up first, as the dry run does
WORKS = {"other_thread_alloc", "other_thread_pin"} | {r["name"] for r in ROWS if r["name"].startswith("no_warmup_")}
UNSEEN = {"cupy_sum", "ipc_share", "transformer_encoder_nested"}  # needs CuPy; torch functions that no mode sees
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def x() -> torch.Tensor:
    return torch.randn(4, 4, device="cuda")


@pytest.mark.parametrize("harmless", HARMLESS)
def test_harmless(harmless: Callable[[torch.Tensor], object]) -> None:
    report = dry_run(harmless, x())
    assert report.device == torch.cuda.get_device_name() and rules(report) == []


@pytest.mark.parametrize(("rule", "harmful"), HARMFUL)
def test_harmful(rule: str, harmful: Callable[[torch.Tensor], object]) -> None:
    assert rule in rules(dry_run(harmful, x(), runs=1))


def test_where_a_step_runs() -> None:
    assert "playing" in dry_run(lambda x: x + 1, torch.ones(3)).device
    assert dry_run(lambda x: x + 1, torch.ones(3), emulate=False).device == torch.cuda.get_device_name()
    assert dry_run(lambda: torch.ones(3, device="cuda")).device == torch.cuda.get_device_name()
    report = dry_run(lambda x: x.sum().item(), torch.ones(3), emulate=True)
    assert "playing" in report.device and rules(report) == ["host-sync"]


def test_goes_on_and_reports_all() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        total = x.sum().item()
        rows = x[x > 0]
        host = x.cpu()
        fresh = torch.tensor([1.0, 2.0], device="cuda")
        torch.cuda.synchronize()
        return rows.sum() + host.sum() + fresh.sum() + total

    report = dry_run(step, x())
    found = {(finding.name, finding.at.row) for finding in report.findings}
    expected = [
        ("host-sync", "item"),
        ("dynamic-shape", "x > 0"),
        ("host-sync", ".cpu()"),
        ("host-copy", "tensor(["),
        ("stream-sync", "synchronize"),
    ]
    assert found >= {(rule, line_of(step, text)) for rule, text in expected}


def test_backward_names_the_forward_line() -> None:
    weight = torch.ones(4, 4, device="cuda", requires_grad=True)

    def step(x: torch.Tensor) -> None:
        y = Checked.apply(x @ weight)
        y.sum().backward()

    (finding,) = dry_run(step, x()).findings
    assert (finding.name, finding.at.row) == ("data-dependent-branch", line_of(Checked, "grad.sum()"))
    assert [note.row for note in finding.related] == [line_of(step, "Checked.apply")]


def test_optimizers() -> None:
    weight = nn.Parameter(torch.ones(4, 4, device="cuda"))
    assert rules(dry_run(train(torch.optim.SGD([weight], lr=0.1), weight), x())) == []
    assert rules(dry_run(train(torch.optim.Adam([weight]), weight), x(), runs=1)) == ["not-capturable"]
    assert rules(dry_run(train(torch.optim.Adam([weight], capturable=True), weight), x())) == []
    fused = torch.optim.AdamW([weight], lr=torch.tensor(1e-3, device="cuda"), fused=True, capturable=True)
    assert rules(dry_run(train(fused, weight), x())) == []


def test_a_scaler_needs_a_fused_optimizer() -> None:
    weight = nn.Parameter(torch.ones(4, 4, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cuda")

    def step(x: torch.Tensor) -> None:
        scaler.scale((x @ weight).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    assert "unfused-scaler" in rules(dry_run(step, x(), runs=1))


def test_what_a_graph_would_freeze() -> None:
    weight = nn.Parameter(torch.ones(4, 4, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    found = dry_run(train(optimizer, weight), x(), between=lambda *_: scheduler.step()).findings
    assert [(f.name, f.at.row) for f in found] == [("frozen-lr", line_of(train, "optimizer.step()"))]
    model = Model()
    model.table = model.table.cuda()
    found = dry_run(model.scaled, x(), between=lambda *_: setattr(model, "scale", model.scale + 1)).findings
    assert [f.name for f in found] == ["frozen-scalar"]
    found = dry_run(model.moded, x(), between=lambda *_: setattr(model, "training", False)).findings
    assert [(f.name, f.at.row) for f in found] == [("frozen-mode", line_of(Model.moded, "if self.training"))]

    def between(*_: object) -> None:
        model.table = torch.ones(4, 4, device="cuda")

    found = dry_run(model.looked_up, x(), between=between).findings
    assert [(f.name, f.at.row) for f in found] == [("rebound-input", line_of(between, "model.table ="))]


def test_streams_must_be_forked_and_joined() -> None:
    def work(x: torch.Tensor, fork: bool, join: bool) -> None:
        side = torch.cuda.Stream()
        if fork:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        if join:
            torch.cuda.current_stream().wait_stream(side)

    assert rules(dry_run(work, x(), True, True)) == []
    assert rules(dry_run(work, x(), True, False)) == ["unjoined-stream"]
    assert "unforked-stream" in rules(dry_run(work, x(), False, True))


def test_a_layer_stack_with_dropout_and_autocast_is_clean() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).cuda()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, capturable=True)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = layer(x).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()

    report = dry_run(step, torch.randn(2, 8, 32, device="cuda"))
    assert rules(report) == [] and report.error == "" and report.draws


def test_watch_lists_waits_of_libraries_too() -> None:
    event = torch.cuda.Event()
    with capture_watch() as seen:
        y = torch.ones(4, device="cuda")
        for _ in range(3):
            y.sum().item()
        event.record()
        event.synchronize()
        quiet = y + 1
    assert quiet.is_cuda
    names = [finding.name for finding in seen]
    assert names == ["host-sync", "stream-sync"]
    item = seen.findings[0]
    assert seen.counts[item.at.filename, item.at.row, "host-sync"] == 3


def test_everything_is_put_back() -> None:
    before: dict[Any, Any] = {name: getattr(torch.cuda, name) for name in ("set_stream", "synchronize", "empty_cache")}
    dry_run(lambda x: x + 1, x())
    assert {name: getattr(torch.cuda, name) for name in before} == before
    with emulated_device() as session:
        assert not session.emulated
    assert torch.zeros(1, device="cuda").is_cuda and torch.cuda.Event.record.__qualname__ == "Event.record"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)  # a `torch.compile` before may have changed it
    yield load(tmp_path_factory.mktemp("constructs"))
    torch.distributions.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("name", [row["name"] for row in ROWS if row["name"] not in WORKS | UNSEEN])
def test_a_construct_that_breaks_a_capture_is_found(name: str, programs: Any) -> None:
    report = dry_run(getattr(programs, f"c_{name}")()[0], runs=1, emulate=False)
    crashes = [finding for finding in report.findings if finding.severity == "crash"]
    assert crashes, report
    assert any(finding.at.filename.endswith("capture_constructs.py") for finding in crashes)
