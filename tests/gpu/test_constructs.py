"""Every construct that is known to break a capture, one after the other in one process: the fault is named, and
nothing is damaged.

After each one random numbers are drawn, memory is allocated, and an older graph is replayed; at the end a training run
is bitwise what it was before the first, and memory is back. CPU counterpart: tests/runtime/test_violations.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from construct_programs import ROWS, load  # noqa: E402

from graphlint.runtime.errors import CaptureError  # noqa: E402
from graphlint.runtime.guard import capture_safe  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# what the guard makes work: it warms up, registers generators, and lets other threads use CUDA meanwhile
WORKS = {"custom_generator_unregistered", "other_thread_alloc", "other_thread_pin"} | {
    row["name"] for row in ROWS if row["name"].startswith("no_warmup_")
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("constructs"))


@pytest.fixture(scope="module", autouse=True)
def checked_distributions() -> Iterator[None]:
    """`torch.compile` switches the argument checks of distributions off for the whole process; they are constructs."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)


@pytest.fixture(scope="module")
def older() -> Any:
    """A graph from before all failures, and the training run to compare with at the end."""
    guard = capture_safe(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = torch.ones(4096, device="cuda")
    for _ in range(4):
        guard(x)
    return guard, x, hundred_steps()


def hundred_steps() -> list[float]:
    """A short eager training run with dropout."""
    torch.manual_seed(3)
    m = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1)).cuda()
    o = torch.optim.AdamW(m.parameters(), lr=1e-3)
    losses = []
    for _ in range(100):
        o.zero_grad()
        loss = m(torch.randn(16, 32, device="cuda")).square().mean()
        loss.backward()
        o.step()
        losses.append(loss.item())
    return losses


def healthy(older: Any) -> None:
    """Draws, allocates, synchronises, replays the older graph with fresh numbers; the stream is the default one."""
    guard, x, _ = older
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(8, device="cuda").sum().item()
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(1)
    first, second = guard(x).clone(), guard(x).clone()
    assert not torch.equal(first, second)
    assert not torch.isnan(first).any()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_fault_is_named_and_nothing_is_damaged(row: Any, programs: Any, older: Any) -> None:
    name = row["name"]
    made = getattr(programs, f"c_{name}")()
    fn = made[0]
    before = torch.cuda.memory_allocated()
    seen: dict[str, Any] = {"name": name, "outcome": "captured", "rule": "", "line": "", "stage": "", "reason": ""}
    grad = torch.no_grad() if name.startswith("no_warmup_co") else contextlib.nullcontext()
    with warnings.catch_warnings(), grad:
        warnings.simplefilter("ignore")
        guard = capture_safe(fn, capture_error_mode="thread_local")
        try:
            guard()
            guard()  # a call that leaves gradients is captured at its second time
        except CaptureError as error:
            seen.update(
                outcome="refused", rule=error.rule, line=error.source_line, stage=error.stage, reason=error.reason
            )
            seen["first"] = str(error.cause).splitlines()[0] if error.cause else ""
            named = error.filename.endswith("capture_constructs.py")
        except Exception as error:
            seen.update(outcome=f"raised {type(error).__name__}", reason=str(error)[:200])
            named = True
        else:
            named = True
    guard.reset()
    record(seen)
    healthy(older)
    del guard, fn, made
    assert torch.cuda.memory_allocated() - before < 200 << 20
    if name in WORKS:
        assert seen["outcome"] == "captured", seen
    else:
        assert seen["outcome"] != "captured", seen
        assert named, seen


def test_training_is_what_it_was_before(older: Any) -> None:
    assert hundred_steps() == older[2]


def record(row: dict[str, Any]) -> None:
    """Appends a row to the file that GRAPHLINT_RESULTS names."""
    folder = os.environ.get("GRAPHLINT_RESULTS")
    if folder:
        with (Path(folder) / "constructs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
