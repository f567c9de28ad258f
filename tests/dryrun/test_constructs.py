"""Every construct that a GPU is known to refuse is found by the dry run of it, on a played device; `tests/gpu` does the
same on a real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from construct_programs import ROWS, load

from graphlint.runtime.dryrun import dry_run, emulated_device

# a step that is warmed up first, as the dry run does: these capture
WORKS = {r["name"] for r in ROWS if r["name"].startswith("no_warmup_")}
ELSEWHERE = {
    "cupy_sum": "needs CuPy",
    "ipc_share": "shares memory of a real device",
    "torch_Tensor_list": "a type that a torch without CUDA does not have",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)  # a `torch.compile` before may have changed it
    with emulated_device():
        yield load(tmp_path_factory.mktemp("constructs"))
    torch.distributions.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("name", [row["name"] for row in ROWS if row["name"] not in WORKS | set(ELSEWHERE)])
def test_a_construct_that_breaks_a_capture_is_found(name: str, programs: Any) -> None:
    report = dry_run(getattr(programs, f"c_{name}")()[0], target_torch="2.11", runs=1)
    crashes = [finding for finding in report.findings if finding.severity == "crash"]
    assert crashes, report
    assert any(finding.at.filename.endswith("capture_constructs.py") for finding in crashes)
