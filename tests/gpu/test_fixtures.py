"""Every fixture does on this GPU what its header declares. CPU counterpart: tests/test_fixtures_data.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("fixtures_run", ROOT / "fixtures" / "run.py")
assert _spec is not None and _spec.loader is not None
run = importlib.util.module_from_spec(_spec)
sys.modules["fixtures_run"] = run
_spec.loader.exec_module(run)

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("fixture", run.discover(), ids=lambda f: f.name)
def test_fixture_does_what_it_declares(fixture: object) -> None:
    seen = run.run_one(fixture)
    assert seen["outcome"] == fixture.outcome, seen["stdout"] + seen["stderr"]
