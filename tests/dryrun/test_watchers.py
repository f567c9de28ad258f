"""Where a step runs, and how the streams of a real device are followed; on the CPU, with plain objects for streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphlint.runtime.dryrun import dry_run
from graphlint.runtime.dryrun.emulate import _all_on_host
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.session import Region, Session
from graphlint.runtime.dryrun.watchers import _RealStreams


def stream(handle: int) -> Any:
    return SimpleNamespace(cuda_stream=handle)


def followed(fork: bool, join: bool) -> list[str]:
    """The events of a region that puts work on a second stream."""
    session = Session(emulated=True)
    real, main, side, event = _RealStreams(session), stream(77), stream(78), SimpleNamespace()
    real.enter(main)
    region = Region("step", Site("step.py", 1))
    session.open(region)
    if fork:
        real.record(event, main)
        real.wait(side, event)
    real.enter(side)
    refused = session.streams.launch()
    real.enter(main)
    if join:
        real.record(event, side)
        real.wait(main, event)
    session.close()
    return [refused, *(e.kind for e in region.trace.events)]


def test_real_streams_are_followed_by_their_handles() -> None:
    assert followed(fork=True, join=True) == [""]
    assert followed(fork=True, join=False) == ["", "unjoined-stream"]
    assert followed(fork=False, join=False) == ["unforked-stream"]


def test_the_default_stream_is_told_while_a_region_is_open() -> None:
    session = Session(emulated=True)
    real = _RealStreams(session)
    real.enter(stream(0))
    real.enter(stream(5))
    region = Region("step", Site("step.py", 1))
    session.open(region)
    real.enter(stream(0))
    session.close()
    assert [event.kind for event in region.trace.events] == ["default-stream"]


def test_a_step_without_host_tensors_belongs_to_the_device() -> None:
    weight = torch.ones(3)
    assert _all_on_host({"step": lambda x: x + weight})
    assert _all_on_host({"args": [{"x": torch.ones(2)}]})
    assert not _all_on_host({"args": [torch.ones(2), torch.ones(2, device="meta")]})
    assert not _all_on_host({"step": lambda: torch.ones(2)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a device; tests/gpu has its counterpart")
def test_a_real_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="there is none; leave it out"):
        dry_run(lambda x: x + 1, torch.ones(2), emulate=False)
