"""Lets these tests import the helpers that lie one folder up, and leaves nothing of one test to those after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A step under test may open one; the guard's tests ask whether other ranks would wait."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
