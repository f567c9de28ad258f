"""The guard on a real GPU: what a CPU backend can't show. The logic itself is tested in tests/runtime, on both."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from graphlint.runtime.backend import CaptureFailed, CaptureRequest  # noqa: E402
from graphlint.runtime.cuda import CudaBackend  # noqa: E402
from graphlint.runtime.errors import CaptureError, CrossThreadError, ReplayMismatchError  # noqa: E402
from graphlint.runtime.guard import capture_safe  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def tidy() -> Any:
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    gc.collect()


def randn(*shape: int, seed: int = 0, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", **options)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 4)).cuda()


def optimizer(m: nn.Module, kind: str) -> torch.optim.Optimizer:
    lr = torch.tensor(1e-3, device="cuda")
    made = {
        "adamw": lambda: torch.optim.AdamW(m.parameters(), lr=lr, capturable=True),
        "adamw fused": lambda: torch.optim.AdamW(m.parameters(), lr=lr, capturable=True, fused=True),
        "adam foreach": lambda: torch.optim.Adam(m.parameters(), lr=lr, capturable=True, foreach=True),
        "sgd": lambda: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9),
        "sgd fused": lambda: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9, fused=True),
        "float lr": lambda: torch.optim.AdamW(m.parameters(), lr=1e-3, capturable=True),
    }
    return made[kind]()


def train(
    guarded: bool, kind: str = "adamw", steps: int = 20, clip: bool = False, cast: bool = False, **options: Any
) -> Any:
    """A run; gives losses, weights, generator state and the step."""
    m = net()
    o = optimizer(m, kind)
    if kind == "float lr" and not guarded:  # what the guard does before it captures
        o.param_groups[0]["lr"] = torch.tensor(1e-3, device="cuda")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        o.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cast):
            loss = nn.functional.mse_loss(m(x).float(), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        o.step()
        return loss

    run = capture_safe(step, **options) if guarded else step
    torch.manual_seed(11)
    losses = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(o, 0.95) if kind not in ("sgd", "float lr") else None
    for i in range(steps):
        losses.append(run(randn(8, 16, seed=i), randn(8, 4, seed=500 + i)).item())
        if scheduler is not None:
            scheduler.step()
    return losses, [p.detach().clone() for p in m.parameters()], torch.cuda.get_rng_state(), run, o


def same(a: Any, b: Any) -> None:
    assert a[0] == b[0]
    assert all(torch.equal(p, q) for p, q in zip(a[1], b[1], strict=True))
    assert torch.equal(a[2], b[2])


@pytest.mark.parametrize("kind", ["adamw", "adamw fused", "adam foreach", "sgd", "sgd fused", "float lr"])
def test_training_is_bitwise_eager(kind: str) -> None:
    guarded = train(True, kind, 50)
    same(train(False, kind, 50), guarded)
    assert guarded[3].stats["eager"] == 0
    assert guarded[3].stats["replays"] > 50


def test_clipping_and_autocast_inside() -> None:
    same(train(False, clip=True, cast=True), train(True, clip=True, cast=True))


def test_autocast_around_the_guard() -> None:
    m = nn.Linear(16, 16).cuda()
    guard = capture_safe(lambda x: m(x).detach())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for i in range(6):
            x = randn(4, 16, seed=i)
            assert torch.equal(guard(x), m(x))
        with torch.no_grad():
            m.weight.mul_(2)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(guard(x), m(x))


def test_grad_scaler_with_an_overflow() -> None:
    """A fused optimizer under a scaler, all in the graph: the step with inf is skipped and the scale halved as in eager."""

    def run(guarded: bool) -> Any:
        m = net()
        o = torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)

        def step(x: torch.Tensor) -> torch.Tensor:
            o.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = m(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(o)
            scaler.update()
            return loss

        fn = capture_safe(step) if guarded else step
        torch.manual_seed(2)
        scales = []
        for i in range(16):
            x = randn(8, 16, seed=i)
            if i in (7, 9):
                x[0, 0] = float("inf")
            fn(x)
            scales.append(scaler._scale.item())
        return scales, [p.detach().clone() for p in m.parameters()], torch.cuda.get_rng_state()

    same(run(False), run(True))


def test_dropout_is_fresh_and_follows_the_seed() -> None:
    guard = capture_safe(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(1000, device="cuda")
    for _ in range(4):
        guard(x)
    assert not torch.equal(guard(x).clone(), guard(x))
    torch.manual_seed(5)
    first = guard(x).clone()
    torch.manual_seed(5)
    assert torch.equal(guard(x), first)
    torch.manual_seed(5)
    assert torch.equal(first, nn.functional.dropout(x, 0.5))


def test_an_armed_capture_stays_valid_and_an_invalid_one_is_healed() -> None:
    backend = CudaBackend()
    x = torch.ones(4, device="cuda")
    device = x.device
    for body, invalidated in ((lambda: x.sum().item(), False), (lambda: torch.cuda.synchronize(), True)):
        request = CaptureRequest(device, backend.new_stream(device), backend.new_pool(device))
        with pytest.raises(CaptureFailed) as failed:
            backend.capture(body, request)
        assert failed.value.invalidated is invalidated
        assert failed.value.healed
        torch.rand(3, device="cuda").sum().item()


def test_faults_in_backward_and_in_the_optimizer() -> None:
    m = net()
    m[0].weight.register_hook(lambda g: g * g.norm().item())  # the fault

    def backward(x: torch.Tensor) -> torch.Tensor:
        loss = m(x).sum()
        loss.backward()
        return loss

    guard = capture_safe(backward)
    guard(randn(2, 16))  # whether gradients are kept shows at the second call
    with pytest.raises(CaptureError) as caught:
        guard(randn(2, 16))
    assert caught.value.rule == "host-sync"
    assert "the fault" in caught.value.source_line
    assert caught.value.stage == "backward"
    plain = net()
    o = torch.optim.AdamW(plain.parameters())

    def step(x: torch.Tensor) -> None:
        o.zero_grad()
        plain(x).sum().backward()
        o.step()

    with pytest.raises(CaptureError) as caught:
        capture_safe(step)(randn(2, 16))
    assert caught.value.rule == "not-capturable"
    assert caught.value.source_line == "o.step()"
    assert caught.value.stage == "optimizer"
    assert not o.state


def test_work_on_a_stream_that_was_not_forked_is_missed_and_found() -> None:
    side = torch.cuda.Stream()
    total = torch.zeros(3, device="cuda")

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(side):
            total.add_(1)
        return x * 2

    with pytest.raises(CaptureError) as caught:
        capture_safe(fn)(randn(3))
    assert caught.value.rule == "unforked-stream"
    assert caught.value.source_line == "total.add_(1)"
    torch.cuda.synchronize()


def test_a_forked_and_joined_stream_is_part_of_the_graph() -> None:
    side = torch.cuda.Stream()

    def fn(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    guard = capture_safe(fn)
    for i in range(6):
        x = randn(64, seed=i)
        assert torch.equal(guard(x), x * 2 + 1)


def test_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    for preserve in (True, False):

        def run(guarded: bool, preserve: bool = preserve) -> Any:
            m = net()
            o = torch.optim.SGD(m.parameters(), lr=0.1)

            def step(x: torch.Tensor) -> torch.Tensor:
                o.zero_grad(set_to_none=True)
                p = 0.2 if preserve else 0.0
                m[1].p = p
                loss = checkpoint(m, x, use_reentrant=False, preserve_rng_state=preserve).square().mean()
                loss.backward()
                o.step()
                return loss

            fn = capture_safe(step) if guarded else step
            torch.manual_seed(1)
            losses = [fn(randn(8, 16, seed=i)).item() for i in range(8)]
            return losses, [p.detach().clone() for p in m.parameters()], torch.cuda.get_rng_state()

        same(run(False), run(True))


def test_a_compiled_function_inside() -> None:
    torch.use_deterministic_algorithms(False)
    m = torch.compile(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda())
    guard = capture_safe(lambda x: m(x).detach())
    for i in range(6):
        x = randn(8, 16, seed=i)
        torch.testing.assert_close(guard(x), m(x))
    assert guard.stats["replays"] > 0


def test_the_report_counts_nodes() -> None:
    guard = capture_safe(lambda x: torch.tanh(x * 2) + 1)
    for _ in range(4):
        guard(randn(64))
    (graph,) = guard.report().graphs
    if hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        assert 3 <= graph.nodes["kernel"] <= 6  # determinism may fill new memory
        assert "host" not in graph.nodes
        assert f"{graph.nodes['kernel']} kernel" in str(guard.report())
    else:
        assert graph.nodes == {}


def test_hooks_run_at_capture_and_their_work_is_replayed() -> None:
    m = nn.Linear(4, 4).cuda()
    m.register_forward_hook(lambda mod, args, out: out * 2)
    guard = capture_safe(lambda x: m(x).detach())
    for i in range(6):
        x = randn(2, 4, seed=i)
        assert torch.equal(guard(x), m(x))


def test_gradients_over_micro_batches_where_torchs_own_wrapper_fails() -> None:
    def run(how: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
        sample = randn(8, 16)
        fn: Any = m
        if how == "guard":
            fn = capture_safe(m, mode="autograd")
        if how == "torch":
            fn = torch.cuda.make_graphed_callables(m, (sample,))
        for p in m.parameters():
            p.grad = None
        for i in range(4):
            fn(randn(8, 16, seed=i)).square().mean().backward()
        return [p.grad.clone() for p in m.parameters()]

    eager, guard, theirs = run("eager"), run("guard"), run("torch")
    assert all(torch.equal(a, b) for a, b in zip(eager, guard, strict=True))
    if torch.__version__.startswith("2.11"):
        assert not all(torch.equal(a, b) for a, b in zip(eager, theirs, strict=True))


def test_workspaces_outlive_a_clearing() -> None:
    """torch.compile's CUDA graphs free every cuBLAS workspace when they record; a graph of ours must not lose its own."""
    eager, mine = train(False, "adamw", 30, cast=True), train(True, "adamw", 6, cast=True)
    step = mine[3]
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    sizes = (1 << 20, 4 << 20, 8 << 20, 32 << 20)
    junk = [torch.full((n,), 7, dtype=torch.uint8, device="cuda") for n in sizes for _ in range(4)]
    for i in range(6, 30):
        loss = step(randn(8, 16, seed=i), randn(8, 4, seed=500 + i))
        for group in mine[4].param_groups:
            group["lr"].mul_(0.95)
        assert abs(loss.item() - eager[0][i]) < 1e-2
    torch.cuda.synchronize()
    assert all(bool((t == 7).all()) for t in junk)


def test_bucket_graphs_share_one_pool() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(x @ x.transpose(-1, -2)) @ x
        return x.sum(-1)

    guard = capture_safe(fn, buckets={"x": (0, [512, 1024, 2048])}, verify="off", mode="forward")
    with torch.no_grad():
        guard(randn(300, 64))
    shared = guard.memory()["pool"]
    guard.reset()
    alone = capture_safe(fn, buckets={"x": (0, [2048])}, verify="off", mode="forward")
    with torch.no_grad():
        alone(randn(300, 64))
    largest = alone.memory()["pool"]
    assert 0 < shared <= 1.25 * largest


def test_interleaved_graphs_of_one_pool() -> None:
    guard = capture_safe(lambda x: torch.tanh(x @ x.t()).sum(0))
    for i in range(12):
        x = randn((64, 128, 256)[i % 3], 32, seed=i)
        assert torch.equal(guard(x), torch.tanh(x @ x.t()).sum(0))
    assert guard.stats["graphs"] == 3


def test_a_thousand_replays_and_two_hundred_recaptures_leave_memory_flat() -> None:
    step = train(True, "adamw", 6)[3]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for i in range(1000):
        step(randn(8, 16, seed=i), randn(8, 4))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 16)

    def fn(x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.tanh(x @ x.t()) * n

    guard = capture_safe(fn, max_graphs=2, verify="off", warmup=1)
    marks = []
    for n in range(200):
        guard(randn(128, 64), n)
        if n in (20, 199):
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            marks.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert guard.stats["captures"] == 200
    assert marks[1][0] <= marks[0][0] + (1 << 16)
    assert marks[1][1] <= marks[0][1] + (4 << 20)


def test_reset_gives_memory_back() -> None:
    fn = lambda x: torch.tanh(x @ x.t()).sum(0)  # noqa: E731
    capture_safe(fn)(randn(512, 64)).sum().item()  # cuBLAS workspaces and the like
    gc.collect()
    torch.cuda.empty_cache()
    guard = capture_safe(fn)
    before = torch.cuda.memory_reserved()
    guard(randn(8192, 64))
    assert torch.cuda.memory_reserved() > before + (200 << 20)
    guard.reset()
    del guard
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (64 << 20)


def test_least_used_graph_frees_its_memory() -> None:
    guard = capture_safe(lambda x: x * 2, max_graphs=1, verify="off")
    guard(torch.ones(64 << 20, device="cuda"))
    held = torch.cuda.memory_allocated()
    guard(torch.ones(16, device="cuda"))
    gc.collect()
    assert torch.cuda.memory_allocated() < held - (200 << 20)


def test_two_guards_in_two_threads() -> None:
    m = [nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()]
    guards = [capture_safe(lambda x, k=k: m[k](x).detach(), outputs="clone") for k in (0, 1)]
    wrong: list[str] = []

    def work(k: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for i in range(60):
                    x = torch.full((8, 64), float(i), device="cuda")
                    if not torch.equal(guards[k](x), m[k](x)):
                        wrong.append(f"{k} {i}")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_one_guard_from_two_streams() -> None:
    guard = capture_safe(lambda x: x @ x.t(), outputs="clone")
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            x = torch.full((256, 256), float(i), device="cuda")
            out = guard(x)
            assert torch.equal(out, x @ x.t())


def test_another_thread_synchronises_during_the_capture() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        t = threading.Thread(target=torch.cuda.synchronize, name="rude")
        t.start()
        t.join()
        return x * 2

    with pytest.raises(CaptureError) as caught:
        capture_safe(fn)(randn(3))
    assert isinstance(caught.value, CrossThreadError) or caught.value.rule == "stream-sync"
    torch.rand(3, device="cuda").sum().item()


def test_pinning_in_another_thread() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        t = threading.Thread(target=lambda: torch.empty(8 << 20).pin_memory(), name="pin_memory")
        t.start()
        t.join()
        return x * 2

    guard = capture_safe(fn)
    for i in range(5):
        assert torch.equal(guard(randn(3, seed=i)), randn(3, seed=i) * 2)


def test_a_loader_with_pinned_memory_beside() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randn(512, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True, num_workers=1)
    m = net()
    o = optimizer(m, "adamw")

    @capture_safe
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        o.zero_grad()
        loss = nn.functional.mse_loss(m(x), y)
        loss.backward()
        o.step()
        return loss

    for x, y in loader:
        step(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
    assert step.stats["replays"] > 60
    assert step.stats["eager"] == 0


def test_copies_and_pickles_capture_anew() -> None:
    m = nn.Linear(4, 4).cuda()
    guard = capture_safe(m)
    x = randn(2, 4)
    with torch.no_grad():
        for _ in range(5):
            guard(x)
        for other in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
            assert other.stats["graphs"] == 0
            for _ in range(5):
                assert torch.equal(other(x), m(x))
            with torch.no_grad():
                other.weight.zero_()
            assert torch.equal(other(x), other.bias.expand(2, 4))
        assert torch.equal(guard(x), m(x))


def test_parity_over_fifty_steps_counts_kernels_too() -> None:
    guarded = train(True, "adamw", 5, verify=50)[3]
    verdicts = {p.stage: p for p in guarded.report().graphs[0].proofs}
    assert "50 step(s) equal, bitwise" in verdicts["replay against eager"].text
    assert verdicts["missing work"].verdict in ("proved", "skipped")
    assert verdicts["memory"].verdict == "proved"


def test_a_stale_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphlint.runtime.inputs import StaticInputs

    load = StaticInputs.load
    calls = [0]

    def forgetful(self: Any, leaves: Any) -> None:
        calls[0] += 1
        if calls[0] > 1:
            leaves = [self.leaves[0], *leaves[1:]]
        load(self, leaves)

    monkeypatch.setattr(StaticInputs, "load", forgetful)
    with pytest.raises(ReplayMismatchError):
        capture_safe(lambda x, y: x * 2 + y)(randn(3), randn(3, seed=1))


def test_inference_mode_and_dropout_after_it() -> None:
    guard = capture_safe(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(64, device="cuda")
    with torch.inference_mode():
        for _ in range(5):
            guard(x)
    for _ in range(5):
        guard(x)
    torch.rand(3, device="cuda")


def test_out_of_memory_in_the_capture() -> None:
    free, _ = torch.cuda.mem_get_info()
    big = int(free * 0.9)

    def fn(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            parts = [torch.empty(big, dtype=torch.uint8, device="cuda") for _ in range(3)]
            return x + parts[0][0]
        return x * 1

    with pytest.raises(CaptureError) as caught:
        capture_safe(fn)(randn(3))
    assert caught.value.rule == "graph-out-of-memory"
    torch.empty(1 << 20, device="cuda")


@pytest.mark.parametrize("settings", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_allocator_settings(settings: str) -> None:
    code = (
        "import torch, warnings; warnings.simplefilter('ignore')\n"
        "from graphlint.runtime.guard import capture_safe\n"
        "from graphlint.runtime.errors import CaptureError\n"
        "g = capture_safe(lambda x: x * 2)\n"
        "x = torch.ones(4, device='cuda')\n"
        "try:\n    print([g(x).sum().item() for _ in range(5)][-1])\n"
        "except CaptureError as e:\n    print(e.rule)\n"
    )
    env = {
        **os.environ,
        "PYTORCH_CUDA_ALLOC_CONF": settings,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout.strip() == ("8.0" if "expandable" in settings else "no-device"), done.stderr[-500:]


two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two
def test_a_second_device() -> None:
    m = nn.Linear(8, 8).to("cuda:1")
    guard = capture_safe(m)
    with torch.no_grad():
        for i in range(6):
            x = randn(4, 8, seed=i).to("cuda:1")
            assert torch.equal(guard(x), m(x))
    assert torch.cuda.current_device() == 0


@two
@pytest.mark.parametrize("how", ["own", "ddp"])
def test_an_all_reduce_in_a_captured_step(how: str) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "NCCL_NVLS_ENABLE": "0"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "tests/gpu/all_reduce.py",
        how,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("equal") == 2
