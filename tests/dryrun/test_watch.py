"""`capture_watch` lists the synchronisations of any code, with their lines."""

from __future__ import annotations

import torch

import graphlint
from graphlint.runtime.watchsync import capture_watch


def test_lists_every_wait_with_its_line_and_count() -> None:
    with capture_watch() as seen:
        x = torch.ones(4, device="cuda")
        for _ in range(3):
            x.sum().item()
        x.cpu()
        host = torch.ones(2).sum().item()
    assert host == 2.0
    assert [finding.name for finding in seen] == ["host-sync", "host-sync"]
    item, copy = seen.findings
    assert copy.at.row == item.at.row + 1
    assert seen.counts[item.at.filename, item.at.row, "host-sync"] == 3
    assert "3 times" in str(seen) and "test_watch.py" in str(seen)


def test_a_quiet_block() -> None:
    with capture_watch() as seen:
        torch.ones(4, device="cuda").relu_()
    assert len(seen) == 0 and str(seen) == "no synchronisation seen"


def test_code_is_not_told_that_it_is_captured() -> None:
    with capture_watch():
        assert not torch.cuda.is_current_stream_capturing()


def test_public_names() -> None:
    assert graphlint.capture_watch is capture_watch
    assert graphlint.dry_run.__name__ == "dry_run" and graphlint.assert_capture_safe.__name__ == "assert_capture_safe"


def test_differential_tells_what_changed() -> None:
    state = {"scale": 1.0}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * state["scale"]

    def between(*_: object) -> None:
        state["scale"] += 1

    found = graphlint.differential(step, torch.ones(3), between=between, runs=2)
    assert [(d.kind, d.op, d.before, d.after) for d in found] == [("scalar", "aten::mul", "1", "2")]
    assert graphlint.differential(step, torch.ones(3)) == []
