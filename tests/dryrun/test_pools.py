"""The played allocator, and graphs that share its memory."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from graphlint.runtime.dryrun import dry_run_script
from graphlint.runtime.dryrun.pools import Space, common


def test_freed_memory_is_taken_again_best_fit_first() -> None:
    space, dead = Space(), set[int]()
    blocks = {
        number: space.take(number, size, lambda n=number: n in dead) for number, size in enumerate((100, 4000, 700))
    }
    assert blocks == {0: (0, 0, 512), 1: (0, 512, 4608), 2: (0, 4608, 5632)}
    dead.update((0, 1))
    assert space.take(3, 600, lambda: False) == (0, 0, 1024)  # the two neighbours have become one


def test_large_and_small_memory_keep_apart() -> None:
    space = Space()
    assert space.take(0, 1 << 20, lambda: True) == (0, 0, 1 << 20)
    assert space.take(1, (1 << 20) + 1, lambda: False) == (1, 0, (1 << 20) + 512)
    assert space.take(2, 1 << 19, lambda: False) == (0, 0, 1 << 19)


def test_a_pool_that_grows_too_large_is_followed_no_longer() -> None:
    space = Space()
    blocks = [space.take(number, 8, lambda: False) for number in range(2001)]
    assert blocks[1999] is not None and blocks[2000] is None


def test_common_memory() -> None:
    assert common([(1, (0, 0, 512)), (2, (0, 512, 1024))], [(7, (0, 256, 600)), (8, (1, 0, 512))]) == ({1, 2}, {7})


@pytest.mark.parametrize(
    ("pool", "kept", "order", "told"),
    [
        ("first.pool()", "", "second first", True),
        ("first.pool()", "", "first second", False),
        ("None", "", "second first", False),
        ("torch.cuda.graph_pool_handle()", "", "second first", False),
        ("first.pool()", "+ double", "second first", True),
        ("first.pool()", "; keep = double", "second first", False),  # nothing was free when the second was captured
    ],
)
def test_outputs_that_another_replay_writes_over(tmp_path: Path, pool: str, kept: str, order: str, told: bool) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(f"""
        import torch
        x = torch.ones(8, device="cuda")
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        def work():
            double = x * 2
            y = double + 1 {kept}
            return (y, locals().get("keep"))
        with torch.cuda.graph(first):
            one = work()
        with torch.cuda.graph(second, pool={pool}):
            two = x * 10
        for graph in ({", ".join(order.split())}):
            graph.replay()
        print((one[0] + two).sum().item())
        """)
    )
    report = dry_run_script(path, target_torch="2.11")
    assert report.error == ""
    assert [finding.name for finding in report.faults] == (["shared-pool-output"] if told else [])
