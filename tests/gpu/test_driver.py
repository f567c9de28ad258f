"""The grouped copy that the driver launches: byte for byte, on any thread, on any device. Its callers are tested on the
CPU in `tests/runtime/test_grouped_copy.py`.
"""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime import driver  # noqa: E402
from graphlint.runtime.guard import capture_safe  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def copied(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> int:
    """Sends one grouped copy to the current stream; gives the driver's answer."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    sizes = [t.numel() * t.element_size() for t in targets]
    copies = driver.driver_copies(targets[0].device, [t.data_ptr() for t in targets], sizes, stream)
    assert copies is not None
    copies.pack(copies.block, copies.at, *(s.data_ptr() for s in sources))
    return copies.launch()


@pytest.mark.parametrize("count", [1, 2, 5, 33, 128])
def test_byte_for_byte_and_not_one_more(count: int) -> None:
    draw = random.Random(count)
    sources, targets, guards = [], [], []
    for _ in range(count):
        size, at, to = draw.choice((0, 1, 15, 16, 17, 4096, 100_003)), draw.randrange(17), draw.randrange(17)
        sources.append(torch.randint(0, 256, (size + 17,), dtype=torch.uint8, device="cuda")[at : at + size])
        guards.append(torch.full((size + 34,), 7, dtype=torch.uint8, device="cuda"))
        targets.append(guards[-1][to : to + size])
    wanted = [torch.full_like(g, 7) for g in guards]
    for whole, target, source in zip(wanted, targets, sources, strict=True):
        start = target.storage_offset()
        whole[start : start + source.numel()] = source
    assert copied(sources, targets) == 0
    assert all(torch.equal(a, b) for a, b in zip(guards, wanted, strict=True))


def test_more_than_fits_in_one_launch_is_left_to_torch() -> None:
    stream = ctypes.c_void_p(0)
    assert driver.driver_copies(torch.device("cuda", 0), [0] * 129, [4] * 129, stream) is None
    assert driver.driver_copies(torch.device("cuda", 0), [], [], stream) is None


def test_a_large_copy_is_whole_and_fast() -> None:
    source = torch.randn(1 << 28, device="cuda")  # 1 GiB
    target = torch.empty_like(source)
    times: dict[str, float] = {}
    for who, copy in {"torch": lambda: target.copy_(source), "driver": lambda: copied([source], [target])}.items():
        target.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        copy()
        start.record()
        for _ in range(5):
            copy()
        end.record()
        torch.cuda.synchronize()
        times[who] = start.elapsed_time(end)
        assert torch.equal(source, target)
    assert times["driver"] < 1.2 * times["torch"]


def test_on_a_side_stream_in_order() -> None:
    guard = capture_safe(lambda x: x * 2)
    for i in range(6):
        guard(torch.full((1 << 20,), float(i), device="cuda"))
    side = torch.cuda.Stream()
    x = torch.full((1 << 20,), 3.0, device="cuda")
    wrong = []
    for i in range(50):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first = guard(x.fill_(float(i))).clone()
        torch.cuda.current_stream().wait_stream(side)
        second = guard(x).clone()
        wrong += [i] if not torch.equal(first, second) or first[-1].item() != 2.0 * i else []
    assert wrong == []


def test_an_empty_graph_where_warnings_are_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard = capture_safe(lambda x: x[1:])
        for i in range(4):
            assert guard(torch.full((3,), float(i), device="cuda")).tolist() == [float(i)] * 2
    del guard
    gc.collect()


def test_a_thread_that_never_used_the_device() -> None:
    guard = capture_safe(lambda x: x + 1)
    xs = [torch.full((8,), float(i), device="cuda") for i in range(12)]
    for x in xs[:6]:
        guard(x)
    seen: list[Any] = []

    def work() -> None:
        seen.extend(guard(x).clone() for x in xs[6:])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [y[0].item() for y in seen] == [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_from_another_current_device() -> None:
    guard = capture_safe(lambda x: x + 1)
    for i in range(10):
        with torch.cuda.device(i % 2):
            x = torch.full((8,), float(i), device="cuda:1")
            assert guard(x).tolist() == [i + 1.0] * 8


def test_a_guard_that_replays_already_becomes_part_of_anothers_capture() -> None:
    guard = capture_safe(lambda x: x * 2)
    for i in range(6):
        guard(torch.full((8,), float(i), device="cuda"))
    static, seen = torch.ones(8, device="cuda"), guard.stats["replays"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = guard(static) + 1
    assert guard.stats["replays"] == seen
    guard.reset()
    static.fill_(5.0)
    graph.replay()
    assert out.tolist() == [11.0] * 8
