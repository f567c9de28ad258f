"""Programs as people write them, in pairs: what is right stays silent, and its neighbour is told by one finding."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from graphlint.runtime.dryrun import dry_run_script

DECODER = """
    class Attention:
        def __init__(self, capacity, dim):
            self.keys, self.values = torch.zeros(2, capacity, dim, device="cuda")
            self.query, self.position = torch.zeros(1, dim, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
            self.places = torch.arange(capacity, device="cuda")

        def attend(self):
            scores = (self.query @ self.keys.T).masked_fill(self.places[None] > self.position, float("-inf"))
            return scores.softmax(-1) @ self.values

        def capture(self):
            self.attend()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self.attend()

        def step(self, position, query, key, value):
            self.keys[position].copy_(key)
            self.values[position].copy_(value)
            self.query.copy_(query)
            {line}
            self.graph.replay()
            return self.out.clone()

    attention = Attention(8, 4)
    attention.capture()
    for length in (8, 3):
        for position in range(length):
            attention.step(position, torch.randn(1, 4), torch.randn(4), torch.randn(4)).sum().item()
    """

BUCKETS = """
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).cuda().requires_grad_(False)
    rows, graphs, pool = torch.zeros(8, 8, device="cuda"), {}, None
    for n in (8, 4, 2):
        net(rows[:n])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = net(rows[:n])
        pool = pool or graph.pool()
        graphs[n] = graph, out
    for n in (4, 8, 2, 8, 4):
        rows[:n].copy_(torch.randn(n, 8))
        graphs[n][0].replay()
        {line}
    """

BUFFERS = """
    net = torch.nn.Linear(4, 2).cuda().requires_grad_(False)
    inputs, graphs, outputs = [torch.zeros(8, 4, device="cuda") for _ in range(2)], [], []
    for x in inputs:
        net(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = net(x)
        graphs.append(graph)
        outputs.append(out)
    copies = torch.cuda.Stream()
    ready, done = ([torch.cuda.Event() for _ in inputs] for _ in range(2))
    for event in done:
        event.record()
    for i in range(6):
        k = i % 2
        with torch.cuda.stream(copies):
            copies.wait_event(done[k])
            inputs[k].copy_(torch.randn(8, 4).pin_memory(), non_blocking=True)
            ready[k].record(copies)
        {line}
        graphs[k].replay()
        outputs[k].sum().item()
        done[k].record()
    """

TRAINING = """
    net = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.zeros(16, 4, device="cuda")

    def backward():
        (net(x).square().mean() / 4).backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward()
    for i in range(8):
        x.copy_(torch.randn(16, 4))
        graph.replay()
        if i % 4 == 3:
            optimizer.step()
            {line}
    """

RECURRENT = """
    class Cell:
        def __init__(self):
            self.cell = torch.nn.GRUCell(4, 4).cuda().requires_grad_(False)
            self.x, self.hidden = torch.zeros(1, 4, device="cuda"), torch.zeros(1, 4, device="cuda")
            self.run()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.following = self.run()

        def run(self):
            return self.cell(self.x, self.hidden)

        def step(self, x, hidden=None):
            self.x.copy_(x)
            {line}
            self.graph.replay()
            self.hidden.copy_(self.following)
            return self.following.clone()

    cell = Cell()
    for _ in range(3):
        last = cell.step(torch.randn(1, 4))
    cell.step(torch.randn(1, 4), hidden=torch.ones(1, 4, device="cuda"))
    """


@pytest.mark.parametrize(
    ("program", "right", "wrong", "rule"),
    [
        (
            DECODER,
            "self.position.fill_(position)",
            "self.position = torch.full((1,), position, device='cuda')",
            "rebound-input",
        ),
        (BUCKETS, "graphs[n][1].sum().item()", "graphs[4][1].sum().item()", "shared-pool-output"),
        (BUFFERS, "torch.cuda.current_stream().wait_event(ready[k])", "pass", "late-refill"),
        (TRAINING, "optimizer.zero_grad(set_to_none=False)", "pass", "replaced-gradient"),
        (RECURRENT, "if hidden is not None: self.hidden.copy_(hidden)", "pass", "skipped-input"),
    ],
    ids=["decoder", "buckets", "buffers", "training", "recurrent"],
)
def test_a_pair(tmp_path: Path, program: str, right: str, wrong: str, rule: str) -> None:
    for line, expected in ((right, []), (wrong, [rule])):
        path = tmp_path / "program.py"
        path.write_text("import torch\n" + textwrap.dedent(program).replace("{line}", line))
        report = dry_run_script(path, target_torch="2.11")
        assert (report.error, [finding.name for finding in report.faults]) == ("", expected)
