"""Inputs of a graph that a program forgets, refills in part or too late; and the look-alikes that are right."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from graphlint.runtime.dryrun import dry_run_script

HEAD = """
import torch

class Runner:
    def __init__(self):
        self.static_x, self.season = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")

    def body(self):
        return self.static_x.cumsum(0) + self.season

    def capture(self):
        self.body()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = self.body()
        return self
"""


def told(tmp_path: Path, program: str) -> list[tuple[str, str]]:
    """`(rule, text of the line)` of every finding of the program."""
    path = tmp_path / "program.py"
    path.write_text(HEAD + textwrap.dedent(program))
    report = dry_run_script(path, target_torch="2.11")
    assert report.error == ""
    lines = path.read_text().splitlines()
    return [(finding.name, lines[finding.at.row - 1].strip()) for finding in report.faults]


CALL = """
    def call(runner, x, season=None, label=None):
        {read}
        runner.static_x.copy_(x)
        runner.graph.replay()
        return runner.y.clone()

    runner = Runner().capture()
    x, season = torch.ones(4), torch.full((4,), 3.0)
    {before}
    call(runner, x, {given})
    """


@pytest.mark.parametrize(
    ("given", "read", "before", "forgotten"),
    [
        ("season=season", "pass", "pass", True),
        ("label=season", "pass", "pass", False),  # no input of the graph goes by that name
        ("season=season", "runner.season.copy_(season)", "pass", False),
        ("season=season", "runner.season = season.cuda(); runner.capture()", "pass", False),
        ("season=season", "pass", "runner.season.copy_(season)", False),  # the caller has put it there
        ("season=torch.zeros(4)", "pass", "pass", False),  # the graph holds the same values
        ("season=torch.ones(2)", "pass", "pass", False),
    ],
)
def test_an_argument_that_nothing_copies_in(
    tmp_path: Path, given: str, read: str, before: str, forgotten: bool
) -> None:
    expected = [("skipped-input", "runner.static_x.copy_(x)")] if forgotten else []
    assert told(tmp_path, CALL.format(given=given, read=read, before=before)) == expected


def test_a_prompt_that_was_read_before_the_loop(tmp_path: Path) -> None:
    program = """
        def generate(runner, season):
            runner.season.copy_(season)
            for _ in range(3):
                runner.graph.replay()
                runner.season.copy_(runner.y)

        generate(Runner().capture(), torch.ones(4))
        """
    assert told(tmp_path, program) == []


def test_arguments_of_the_call_that_captured(tmp_path: Path) -> None:
    program = """
        class Lazy:
            graph = None

            def __call__(self, *tensors, scale):
                if self.graph is None:
                    self.kept, self.by = tensors, scale
                    self.graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self.graph):
                        self.y = tensors[0] * scale["by"]
                {refill}
                self.graph.replay()
                return self.y.clone()

        lazy = Lazy()
        for value in (1.0, 2.0):
            lazy(torch.full((4,), value, device="cuda"), scale={{"by": torch.full((4,), value, device="cuda")}})
        """
    half = "self.kept[0].copy_(tensors[0])"
    assert told(tmp_path, program.format(refill=half)) == [("skipped-input", half)]
    assert told(tmp_path, program.format(refill=f"{half}; self.by['by'].copy_(scale['by'])")) == []


@pytest.mark.parametrize(
    ("fill", "read", "stale"),
    [
        ("runner.static_x[:n].copy_(x)", "runner.y.sum().item()", True),
        ("runner.static_x[:n].copy_(x)", "runner.y.cpu().tolist()", True),
        ("runner.static_x[:n].copy_(x)", "runner.y[:n].sum().item()", False),  # a running sum: the head knows no tail
        ("runner.static_x[:n].copy_(x)", "runner.y.clone()[:n].sum().item()", False),
        ("runner.static_x[:n].copy_(x)", "(runner.y * 2).softmax(0).argmax().item()", True),
        ("runner.static_x[:n].copy_(x)", "(runner.y * 2 + 1)[:n].tolist()", False),
        ("runner.static_x[:n].copy_(x)", "runner.y.cpu().mean().item()", True),
        ("runner.static_x[:n].copy_(x)", "runner.y.cpu().add(1)[:n].tolist()", False),
        ("runner.static_x[:n].copy_(x)", "torch.zeros(4).copy_(runner.y).tolist()", True),
        ("runner.static_x[:n].copy_(x); runner.static_x[n:].zero_()", "runner.y.sum().item()", False),
        ("runner.static_x[n:].copy_(x)", "runner.y.sum().item()", False),  # slots of a table, not heads of a batch
    ],
)
def test_a_tail_of_an_earlier_batch(tmp_path: Path, fill: str, read: str, stale: bool) -> None:
    program = f"""
        def call(runner, x):
            n = len(x) if len(x) < 4 or "[:n]" in {fill!r} else 0
            {fill}
            runner.graph.replay()
            return {read}

        runner = Runner().capture()
        call(runner, torch.ones(4))
        call(runner, torch.ones(2))
        """
    assert told(tmp_path, program) == ([("partial-refill", fill)] if stale else [])


@pytest.mark.parametrize(
    ("first", "source", "late"),
    [
        ("pass", "x", True),
        ("runner.static_x.copy_(torch.ones(4))", "x", False),  # a prefetch: the first batch is there already
        ("pass", "x * runner.y", False),  # the state of a recurrence, which begins blank
    ],
)
def test_a_refill_behind_its_replay(tmp_path: Path, first: str, source: str, late: bool) -> None:
    program = f"""
        def call(runner, x):
            runner.graph.replay()
            runner.static_x.copy_({source})
            return runner.y.clone()

        runner = Runner().capture()
        {first}
        for value in (1.0, 2.0, 3.0):
            call(runner, torch.full((4,), value))
        """
    assert told(tmp_path, program) == ([("late-refill", "runner.static_x.copy_(x)")] if late else [])
