"""Whole programs on a played device: replays do what a graph would do, and what is wrong is told at its line."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from graphlint.runtime.dryrun import DryRunReport, dry_run_script

HEAD = """
import torch
from torch import nn

class Runner:
    def __init__(self):
        self.net = nn.Linear(4, 4).to("cuda").requires_grad_(False)
        self.x = torch.ones(2, 4, device="cuda")
        self.scale = 1.0
        self.log = []

    def body(self):
        return self.net(self.x) * self.scale

    def capture(self):
        self.body()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = self.body()

runner = Runner()
runner.capture()
"""


def run(tmp_path: Path, tail: str) -> DryRunReport:
    path = tmp_path / "program.py"
    path.write_text(HEAD + textwrap.dedent(tail))
    return dry_run_script(path, target_torch="2.11")


def told(report: DryRunReport) -> list[tuple[str, str]]:
    """`(rule, text of the line)` of every finding."""
    lines = (Path(f.at.filename).read_text().splitlines()[f.at.row - 1].strip() for f in report.findings)
    return [(finding.name, line) for finding, line in zip(report.findings, lines, strict=True)]


def test_a_right_program_is_clean_and_replays(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        """
        for value in (1.0, 2.0):
            runner.x.fill_(value)
            runner.graph.replay()
            print(torch.equal(runner.y, runner.body()))
        """,
    )
    assert (told(report), report.output, report.error) == ([], "True\nTrue\n", "")
    assert report.regions == 1 and report.runs == 2


def test_a_capture_executes_nothing(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        """
        counter = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            counter.add_(1)
        print(int(counter))
        graph.replay()
        graph.replay()
        print(int(counter))
        """,
    )
    assert report.output.split() == ["0", "2"]


@pytest.mark.parametrize(
    ("rule", "line", "tail"),
    [
        ("frozen-scalar", "return self.net(self.x) * self.scale", "runner.scale = 2.0\nrunner.graph.replay()\n"),
        ("rebound-input", "runner.x = torch.zeros(2, 4, device='cuda')", None),
        ("replaced-parameter", "runner.net.weight = nn.Parameter(torch.zeros(4, 4, device='cuda'))", None),
        ("replaced-parameter", "runner.net.load_state_dict(fresh, assign=True)", None),
        ("frozen-mode", "runner.net.eval()", None),
        ("python-hook", "runner.net.register_forward_hook(lambda *args: None)", None),
    ],
)
def test_what_changes_after_the_capture(tmp_path: Path, rule: str, line: str, tail: str | None) -> None:
    fresh = "fresh = {k: v.clone() for k, v in runner.net.state_dict().items()}\n"
    report = run(tmp_path, tail or f"{fresh}{line}\nrunner.graph.replay()\n")
    assert told(report) == [(rule, line)]
    (finding,) = report.findings
    assert any(note.message == "replayed here" for note in finding.related)


def test_replay_shows_the_stale_numbers(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        """
        runner.scale = 2.0
        runner.graph.replay()
        print(torch.equal(runner.y * 2, runner.body()))
        """,
    )
    assert report.output == "True\n"


def test_an_output_read_before_any_replay(tmp_path: Path) -> None:
    report = run(tmp_path, "first = runner.y.sum()\nrunner.graph.replay()\n")
    assert told(report) == [("early-output-read", "first = runner.y.sum()")]


def test_outputs_kept_in_a_list(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        """
        for value in (1.0, 2.0, 3.0):
            runner.x.fill_(value)
            runner.graph.replay()
            runner.log.append(runner.y)
        """,
    )
    assert told(report) == [("kept-output", "runner.log.append(runner.y)")]


def test_a_refill_on_a_stream_that_nobody_waits_for(tmp_path: Path) -> None:
    unordered = """
        side, batch = torch.cuda.Stream(), torch.ones(2, 4).pin_memory()
        with torch.cuda.stream(side):
            runner.x.copy_(batch, non_blocking=True)
        {wait}
        runner.graph.replay()
        """
    assert [rule for rule, _ in told(run(tmp_path, unordered.format(wait="")))] == ["late-refill"]
    joined = unordered.format(wait="torch.cuda.current_stream().wait_stream(side)")
    assert told(run(tmp_path, joined)) == []


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = torch.cuda.is_available, torch.cuda.Stream, torch.Generator, torch.compile
    run(tmp_path, "runner.graph.replay()\n")
    assert before == (torch.cuda.is_available, torch.cuda.Stream, torch.Generator, torch.compile)


def test_a_failing_program_is_reported(tmp_path: Path) -> None:
    report = run(tmp_path, "raise RuntimeError('no data')\n")
    assert report.error == "RuntimeError: no data" and not report.ok


def test_a_compiled_function_that_writes_an_argument(tmp_path: Path) -> None:
    program = """
        def turn(q, out):
            {write}
            return q * 2

        fast = torch.compile(turn, mode="reduce-overhead")
        q, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        {mark}
        fast(q, out)
        """
    skipped = [("skipped-cudagraph", "out.copy_(q)")]
    assert told(run(tmp_path, program.format(write="out.copy_(q)", mark=""))) == skipped
    assert told(run(tmp_path, program.format(write="q.neg()", mark=""))) == []
    static = "torch._dynamo.mark_static_address(out)"
    assert told(run(tmp_path, program.format(write="out.copy_(q)", mark=static))) == []


THREAD = """
    import threading
    go, done = threading.Event(), threading.Event()

    def work():
        go.wait(20)
        try:
            {work}
        finally:
            done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph{mode}):
        y = runner.x * 2
        go.set()
        done.wait(20)
        y = y + 1
    graph.replay()
    print(y.mean().item())
    """


@pytest.mark.parametrize(
    ("work", "mode", "disturbs"),
    [
        ("torch.empty(4, pin_memory=True)", "", True),
        ("torch.ones(4).to('cuda')", "", True),
        ("torch.cuda.synchronize()", "", True),
        ("torch.cuda.synchronize()", ", capture_error_mode='thread_local'", True),
        ("torch.ones(4).to('cuda')", ", capture_error_mode='thread_local'", False),
        ("torch.ones(4).mul(3)", "", False),
    ],
)
def test_a_thread_that_runs_beside_a_capture(tmp_path: Path, work: str, mode: str, disturbs: bool) -> None:
    report = run(tmp_path, THREAD.format(work=work, mode=mode))
    assert (report.error, report.output) == ("", "3.0\n")  # the thread's operators are no part of the graph
    line = f"with torch.cuda.graph(graph{mode}):"
    assert told(report) == ([("thread-in-capture", line)] if disturbs else [])


@pytest.mark.parametrize("head", ["if True:", "def main():"])
def test_a_script_that_binds_a_captured_name_again(tmp_path: Path, head: str) -> None:
    report = run(
        tmp_path,
        f"""
        {head}
            x = torch.ones(2, 4, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = runner.net(x)
            for value in (1.0, 2.0):
                x = torch.full((2, 4), value, device="cuda")
                graph.replay()
        {"main()" if head == "def main():" else ""}
        """,
    )
    assert told(report) == [("rebound-input", 'x = torch.full((2, 4), value, device="cuda")')]


def test_streams_are_told_where_work_is_sent_to_them(tmp_path: Path) -> None:
    wrong = run(
        tmp_path,
        """
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with torch.cuda.stream(side):
                y = runner.x * 2
        """,
    )
    assert told(wrong) == [("unforked-stream", "with torch.cuda.stream(side):")]
    default = run(tmp_path, "g = torch.cuda.CUDAGraph()\ng.capture_begin()\ny = runner.x * 2\ng.capture_end()\n")
    assert told(default) == [("default-stream", "g.capture_begin()")]


@pytest.mark.parametrize(("sizes", "many"), [("range(1, 12)", True), ("(4, 8, 16) * 5", False)])
def test_a_compiled_function_of_many_sizes(tmp_path: Path, sizes: str, many: bool) -> None:
    report = run(
        tmp_path,
        f"""
        fast = torch.compile(lambda x: x * 2, mode="reduce-overhead", dynamic=True)
        for n in {sizes}:
            fast(torch.ones(n, device="cuda")).sum().item()
        """,
    )
    call = 'fast(torch.ones(n, device="cuda")).sum().item()'
    assert told(report) == ([("dynamic-recording", call)] if many else [])


@pytest.mark.parametrize(("layers", "several"), [(3, True), (1, False)])
def test_blocks_that_record_stream_keeps(tmp_path: Path, layers: int, several: bool) -> None:
    report = run(
        tmp_path,
        f"""
        side, graph, x = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
        with torch.cuda.graph(graph):
            for _ in range({layers}):
                x = x * 2
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    y = x + 1
                x.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
        """,
    )
    assert told(report) == ([("recorded-stream", "x.record_stream(side)")] if several else [])


REPLAY = """
def replayed(value):
    runner.x.fill_(value)
    runner.graph.replay()
    return runner.y

"""


@pytest.mark.parametrize(
    ("line", "tail"),
    [
        ("kept = [replayed(value) for value in (1.0, 2.0)]", "{line}\nreplayed(3.0)"),
        ("kept[value] = replayed(value)", "kept = {{}}\nfor value in (1.0, 2.0, 3.0):\n    {line}"),
        (
            "before = now",
            "before = None\nfor value in (1.0, 2.0, 3.0):\n    now = replayed(value)\n"
            "    if before is not None:\n        print((now - before).sum().item())\n    {line}",
        ),
    ],
)
def test_outputs_kept_under_other_names(tmp_path: Path, line: str, tail: str) -> None:
    assert told(run(tmp_path, REPLAY + tail.format(line=line))) == [("kept-output", line)]
    copied = line.replace("replayed(value)", "replayed(value).clone()").replace("= now", "= now.clone()")
    assert told(run(tmp_path, REPLAY + tail.format(line=copied))) == []


def test_a_script_keeps_its_iterators(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        """
        batches = iter([torch.full((4,), float(i), device="cuda") for i in range(6)])
        total = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total.add_(next(batches))
        for _ in range(3):
            graph.replay()
        print(len(list(batches)), total[0].item())
        """,
    )
    assert told(report) == [("unrepeated-effect", "total.add_(next(batches))")]
    assert report.output == "5 0.0\n"  # the comparison has taken nothing from the program


@pytest.mark.parametrize(
    ("key", "told_at"), [("rows", "if rows not in graphs:"), ("(rows, length)", None)], ids=["rows", "both"]
)
def test_a_key_that_leaves_out_what_a_closure_reads(tmp_path: Path, key: str, told_at: str | None) -> None:
    report = run(
        tmp_path,
        f"""
        graphs, table = {{}}, torch.ones(4, 16, device="cuda")

        def capture(rows, length):
            work = lambda: table[:rows, :length].sum(-1)
            work()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = work()
            return graph, out

        def call(rows, length):
            if {key} not in graphs:
                graphs[{key}] = capture(rows, length)
            graphs[{key}][0].replay()

        call(2, 4)
        call(2, 9)
        """,
    )
    assert told(report) == ([("incomplete-graph-key", told_at)] if told_at else [])
