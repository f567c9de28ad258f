"""The grouped copy of a fast path: by addresses where the inputs are plain memory, by torch's own where it must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

CALLS = 6  # the first ones take the slow path


def captured_of(guard: Any) -> Any:
    return guard._graphs[next(iter(guard._graphs))]


def by_addresses(guard: Any) -> bool:
    return "launch()" in captured_of(guard).source


LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "narrow": lambda x: x[:, 1:],
    "every second": lambda x: x[:, ::2],
    "broadcast": lambda x: x[:1].expand(4, 6),
    "one element": lambda x: x[1, 1],
    "a row": lambda x: x[2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.cfloat])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype_is_copied_exactly(kit: Any, layout: str, dtype: torch.dtype) -> None:
    guard = kit.guard(lambda x, y: (x.clone(), y.clone()))
    for i in range(CALLS):
        x = (kit.randn(4, 6, seed=i) * 9).to(dtype)
        y = (kit.randn(4, 6, seed=100 + i) * 9).to(dtype)
        first, second = guard(LAYOUTS[layout](x), y)
        assert torch.equal(first, LAYOUTS[layout](x)) and torch.equal(second, y)
    assert by_addresses(guard)


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 7, 16])
@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 4099, 70_001])
def test_any_alignment_and_length(kit: Any, offset: int, length: int) -> None:
    guard = kit.guard(lambda x: x.clone())
    for i in range(CALLS):
        whole = torch.arange(length + offset, device=kit.device).add(i).to(torch.uint8)
        assert torch.equal(guard(whole[offset:]), whole[offset:])


def test_many_inputs_of_many_sizes(kit: Any) -> None:
    guard = kit.guard(lambda *xs: [x * 2 for x in xs])
    for i in range(CALLS):
        xs = [kit.randn(n, 3, seed=i + n) for n in range(1, 41)]
        assert all(torch.equal(a, b * 2) for a, b in zip(guard(*xs), xs, strict=True))
    assert by_addresses(guard)


def test_mostly_gaps_and_bucketed_inputs_are_left_to_torch(kit: Any) -> None:
    guard = kit.guard(lambda x: x.clone())
    bucketed = kit.guard(lambda x: x * 2, buckets={"x": (0, [4, 8])})
    for i in range(CALLS):
        x = kit.randn(8, 8, seed=i)
        assert torch.equal(guard(x[:, ::4]), x[:, ::4])
        assert torch.equal(bucketed(x[:3]), x[:3] * 2)
    assert not by_addresses(guard) and not by_addresses(bucketed)


def test_one_launch_has_blocks_for_its_largest_tensor_or_is_left_to_torch() -> None:
    from graphlint.runtime.driver import MOST, blocks_for

    assert blocks_for([]) == 0 and blocks_for([4] * (MOST + 1)) == 0
    assert blocks_for([0]) == blocks_for([4]) == blocks_for([4] * MOST) == 1
    assert blocks_for([4097]) == 2
    assert blocks_for([1 << 30]) == 2048  # alone, any size
    assert blocks_for([1 << 20, *[4] * 127]) == 128  # not starved by its small neighbours
    assert blocks_for([8 << 20, 4]) == 0  # torch shares its blocks out by size


def test_inputs_that_require_grad_need_no_detaching(kit: Any) -> None:
    guard = kit.guard(lambda x: x * 3)
    with torch.no_grad():
        for i in range(CALLS):
            x = kit.randn(3, seed=i).requires_grad_()
            assert torch.equal(guard(x), x * 3)
    assert by_addresses(guard)


def test_where_the_driver_refuses_torch_copies(kit: Any) -> None:
    if kit.device != "cpu":
        pytest.skip("the driver refuses a thread that has no context yet; tests/gpu has that")
    guard = kit.guard(lambda x: x + 1)
    for i in range(CALLS):
        guard(kit.randn(3, seed=i))
    kit.backend.refuses_copies = True
    x = kit.randn(3, seed=99)
    assert torch.equal(guard(x), x + 1) and by_addresses(guard)


def test_in_anothers_capture_the_body_runs_and_no_buffer_is_written(kit: Any) -> None:
    if kit.device != "cpu":
        pytest.skip("tests/gpu has its counterpart, with a graph of torch's own")
    from graphlint.runtime.fake import Tape

    guard = kit.guard(lambda x: x * 2)
    for i in range(CALLS):
        guard(kit.randn(3, seed=i))
    replays = guard.stats["replays"]
    buffer = captured_of(guard).static.targets[0].clone()
    tape = Tape(_request(kit))
    x = kit.randn(3, seed=50)
    with tape:
        y = guard(x)
    assert torch.equal(y, x * 2) and len(tape.entries) == 1
    assert guard.stats["replays"] == replays and torch.equal(captured_of(guard).static.targets[0], buffer)


def _request(kit: Any) -> Any:
    from graphlint.runtime.backend import CaptureRequest

    return CaptureRequest(torch.device(kit.device), None, None)
