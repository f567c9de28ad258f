"""What a guarded replay costs on the host, beside the floor and beside its peers, all in one process.

    python benchmarks/replay.py --output benchmarks/results/replay.jsonl

Needs a CUDA device; tensordict is measured where it is installed. One JSON line per row: `bench`, `who`, `inputs`,
`parameters`, `host_us` (median time until the call returns, the device kept from falling behind), `whole_us` (median
time to the end of the work). The floor is one grouped copy of the inputs and a bare `CUDAGraph.replay()`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphlint.runtime.guard import capture_safe

ROUNDS, CALLS, ROUND_SECONDS = 21, 200, 0.02
Row = dict[str, Any]


def time_calls(call: Callable[[], Any], calls: int = CALLS, rounds: int = ROUNDS) -> tuple[float, float]:
    """Median microseconds per call: until it returns, and until the device is done."""
    host, whole = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        host.append((returned - start) / calls * 1e6)
        whole.append((done - start) / calls * 1e6)
    return statistics.median(host), statistics.median(whole)


def interleaved(calls: dict[str, Callable[[], Any]]) -> dict[str, tuple[float, float]]:
    """Times several calls in turns, so that a slow moment of the machine falls on all of them."""
    host: dict[str, list[float]] = {who: [] for who in calls}
    whole: dict[str, list[float]] = {who: [] for who in calls}
    counts = {
        who: max(5, min(CALLS, int(ROUND_SECONDS / (time_calls(call, 5, 3)[1] * 1e-6)))) for who, call in calls.items()
    }
    for _ in range(ROUNDS):
        for who, call in calls.items():
            one = time_calls(call, counts[who], 1)
            host[who].append(one[0])
            whole[who].append(one[1])
    return {who: (statistics.median(host[who]), statistics.median(whole[who])) for who in calls}


class Net(nn.Module):
    """Few kernels, as many parameters as asked for: what is measured is the host."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.extra = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(parameters))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out = inputs[0] * 2
        for x in inputs[1:]:
            out = out + x
        if len(self.extra):
            out = out + torch._foreach_add(list(self.extra), 1.0)[0].sum()
        return out


def floor_of(fn: Callable[..., Any], inputs: list[torch.Tensor]) -> Callable[[], Any]:
    """The least that a replay with inputs can cost."""
    static = [x.clone() for x in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn(*static)

    def call() -> Any:
        torch._foreach_copy_(static, inputs)
        graph.replay()
        return out

    return call


def peers(net: nn.Module, inputs: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """The same forward through everybody, without gradients."""
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: net(*inputs), "floor": floor_of(net, inputs)}
    guard = capture_safe(net, mode="forward")
    for _ in range(5):
        guard(*inputs)
    calls["graphlint"] = lambda: guard(*inputs)
    full = capture_safe(net, mode="forward", watch="off")
    for _ in range(5):
        full(*inputs)
    calls["graphlint, watch off"] = lambda: full(*inputs)
    own = capture_safe(net, mode="forward")
    for _ in range(5):
        own(*inputs)
    buffers, _ = own.input_buffers()
    calls["graphlint, own buffers"] = lambda: own(*buffers)
    calls["bare replay"] = own._graphs[next(iter(own._graphs))].graph.replay
    try:
        graphed = torch.cuda.make_graphed_callables(Twin(net).eval(), tuple(inputs))
        calls["make_graphed_callables"] = lambda: graphed(*inputs)
    except Exception as error:
        print(f"make_graphed_callables: {error}", file=sys.stderr)
    try:
        from tensordict.nn import CudaGraphModule

        module = CudaGraphModule(net, warmup=2)
        for _ in range(4):
            module(*inputs)
        calls["tensordict CudaGraphModule"] = lambda: module(*inputs)
    except ImportError:
        print("tensordict is not installed", file=sys.stderr)
    compiled = torch.compile(net, mode="reduce-overhead", dynamic=False)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*inputs)

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    calls["torch.compile reduce-overhead"] = step
    return calls


class Twin(nn.Module):
    """`make_graphed_callables` replaces the forward of what it is given: it gets a module of its own around the same
    parameters.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.net(*inputs)


def host_rows() -> list[Row]:
    """Host time of a forward at several numbers of inputs and parameters."""
    rows: list[Row] = []
    for inputs, parameters in ((1, 0), (4, 0), (32, 0), (1, 10), (1, 1000)):
        torch._dynamo.reset()
        net = Net(parameters).cuda().eval()
        tensors = [torch.randn(8, 32, device="cuda") for _ in range(inputs)]
        with torch.no_grad():
            timed = interleaved(peers(net, tensors))
        base = timed["floor"][0]
        for who, (host, whole) in timed.items():
            row = {"bench": "forward", "who": who, "inputs": inputs, "parameters": parameters}
            rows.append(
                {**row, "host_us": round(host, 2), "whole_us": round(whole, 2), "of_floor": round(host / base, 3)}
            )
            print(rows[-1])
    return rows


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder-only, learned positions."""

    def __init__(
        self, layers: int = 12, width: int = 512, heads: int = 8, vocabulary: int = 8192, length: int = 128
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def training(compiled: bool = False, mode: str | None = None) -> tuple[Callable[..., Any], Any]:
    """A fresh model, optimizer and step."""
    torch.manual_seed(0)
    model = GPT().cuda()
    forward: Any = torch.compile(model, mode=mode) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(3e-4, device="cuda"), capturable=True, fused=True)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = forward(ids)
        loss = nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer)


def training_rows() -> list[Row]:
    """Whole-step time of a GPT training step, 12 layers, width 512, batch 4 x 128."""
    ids = torch.randint(0, 8192, (4, 128), device="cuda")
    calls: dict[str, Callable[[], Any]] = {}
    torch._dynamo.reset()
    for mode, who in ((None, "torch.compile"), ("reduce-overhead", "torch.compile reduce-overhead")):
        compiled, kept = training(True, mode)
        calls[who] = lambda compiled=compiled, kept=kept: compiled(ids, labels)  # type: ignore[misc]
    labels = ids.clone()
    # these first: while they record, they free the cuBLAS workspaces that a hand-captured graph relies on
    for call in calls.values():
        for _ in range(8):
            call()
    step, keep = training()
    calls["eager"] = lambda: step(ids, ids)
    hand, keep_hand = training()
    calls["hand-captured"] = floor_of(hand, [ids, ids.clone()])
    mine, keep_mine = training()
    guard = capture_safe(mine)
    calls["graphlint"] = lambda: guard(ids, labels)
    for call in calls.values():
        for _ in range(8):
            call()
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(15):
        for who, call in calls.items():
            times[who].append(time_calls(call, 10, 1)[1])
    rows = []
    base = statistics.median(times["hand-captured"])
    for who, values in times.items():
        middle = statistics.median(values)
        rows.append(
            {
                "bench": "training step",
                "who": who,
                "whole_us": round(middle, 1),
                "of_hand_captured": round(middle / base, 3),
            }
        )
        print(rows[-1])
    print(guard.report())
    del keep, keep_hand, keep_mine
    return rows


class Decoder:
    """One decode step over a cache: batch 8, 12 layers, width 512, cache of 1024 places, greedy."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(length=1024).cuda().bfloat16().eval()
        self.keys = torch.zeros(12, 8, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
        self.values = torch.zeros_like(self.keys)

    def step(self, token: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        x = self.model.tokens(token) + self.model.places(place)
        mask = (torch.arange(1024, device="cuda") <= place).view(1, 1, 1, 1024)
        for i, block in enumerate(self.model.blocks):
            q, k, v = block.qkv(block.norm1(x)).view(8, 1, 3, 8, 64).permute(2, 0, 3, 1, 4)
            self.keys[i].index_copy_(2, place, k)
            self.values[i].index_copy_(2, place, v)
            y = nn.functional.scaled_dot_product_attention(q, self.keys[i], self.values[i], attn_mask=mask)
            x = x + block.out(y.transpose(1, 2).reshape(8, 1, 512))
            x = x + block.down(nn.functional.gelu(block.up(block.norm2(x))))
        return self.model.head(self.model.norm(x)).argmax(-1)


@torch.no_grad()
def decode_rows() -> list[Row]:
    """Whole time of a decode step."""
    token, place = torch.randint(0, 8192, (8, 1), device="cuda"), torch.tensor([5], device="cuda")
    calls: dict[str, Callable[[], Any]] = {}
    decoders = [Decoder() for _ in range(4)]
    torch._dynamo.reset()
    compiled = torch.compile(decoders[3].step, mode="reduce-overhead", dynamic=False)
    calls["torch.compile reduce-overhead"] = lambda: compiled(token, place)
    for _ in range(8):
        compiled(token, place)
    calls["eager"] = lambda: decoders[0].step(token, place)
    calls["hand-captured"] = floor_of(decoders[1].step, [token, place])
    guard = capture_safe(decoders[2].step, mode="forward")
    calls["graphlint"] = lambda: guard(token, place)
    for call in calls.values():
        for _ in range(8):
            call()
    times: dict[str, list[tuple[float, float]]] = {who: [] for who in calls}
    for _ in range(21):
        for who, call in calls.items():
            times[who].append(time_calls(call, 20, 1))
    rows = []
    base = statistics.median(t[1] for t in times["hand-captured"])
    for who, values in times.items():
        host, whole = statistics.median(t[0] for t in values), statistics.median(t[1] for t in values)
        rows.append(
            {
                "bench": "decode step",
                "who": who,
                "host_us": round(host, 1),
                "whole_us": round(whole, 1),
                "of_hand_captured": round(whole / base, 3),
            }
        )
        print(rows[-1])
    return rows


def main() -> None:
    """Runs the rows asked for and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--only", nargs="*", default=["host", "training", "decode"], choices=["host", "training", "decode"]
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: these figures can only be measured on one")
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    rows: list[Row] = [{"bench": "machine", "who": torch.cuda.get_device_name(), "torch": torch.__version__}]
    for name, run in (("host", host_rows), ("training", training_rows), ("decode", decode_rows)):
        if name in options.only:
            rows += run()
    if options.output:
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
