"""Records a step on a GPU: its wall time without a profiler, then a trace of a few steps with one.

The only part of the profile, beside `measure.py`, that needs torch.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import torch

from graphlint.runtime.profiling import chrome
from graphlint.runtime.profiling.costs import ReplayCosts
from graphlint.runtime.profiling.readings import Reading
from graphlint.runtime.profiling.timeline import MODULE_MARK, STEP_MARK, Timeline
from graphlint.runtime.profiling.timing import enqueue_time, turns
from graphlint.runtime.profiling.world import World

Batch = tuple[Any, ...]
Batches = Iterable[Any] | Callable[[int], Any] | None

_HELD = 8  # batches that are fetched from a function or an iterable


class NoDevice(RuntimeError):
    """There is no GPU to measure on."""


class StepFailed(RuntimeError):
    """The step itself raises; its own error is the cause."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What was measured of one step."""

    timeline: Timeline
    eager: Reading  # the step's wall time, host and device running freely, before and after the recording
    enqueue: float  # microseconds from the call to its return on an idle device, no profiler
    costs: ReplayCosts
    input_shapes: tuple[tuple[str, ...], ...]  # of each recorded step's batch, one text for each tensor


class Step:
    """A callable with its batches: `step(i)` runs iteration `i`."""

    def __init__(self, fn: Callable[..., Any], args: Batch = (), batches: Batches = None) -> None:
        self.fn = fn
        self._args = args
        self._batches: Any = batches

    def batch(self, i: int) -> Batch:
        if self._batches is None:
            return self._args
        got = self._batches(i) if callable(self._batches) else self._batches[i % len(self._batches)]
        return got if isinstance(got, tuple) else (got,)

    def __call__(self, i: int) -> Any:
        return self.fn(*self.batch(i))

    def held(self) -> tuple[Step, float]:
        """The step with its batches at hand, and the microseconds of the host that fetching one took (median).

        Fetching is no part of the step. A sequence is taken as it is; of a function or an iterable, such as a
        DataLoader, the first eight batches are fetched once.

        Raises:
            StepFailed: there is no batch, or fetching one raises.
        """
        source = self._batches
        if source is None or (not callable(source) and is_sequence(source) and len(source)):
            return self, 0.0
        batches: list[Batch] = []
        times: list[float] = []
        began = time.perf_counter()
        try:
            for got in islice(map(source, count()) if callable(source) else source, _HELD):
                times.append((time.perf_counter() - began) * 1e6)
                batches.append(got if isinstance(got, tuple) else (got,))
                began = time.perf_counter()
        except Exception as error:
            if not batches or not isinstance(error, IndexError):  # a function may index a short list
                said = f"batch {len(batches)} can't be had: {type(error).__name__}: {_first_line(error)}"
                raise StepFailed(said) from error
        if not batches:
            raise StepFailed("there are no batches; give at least one, as the step gets them in training")
        return Step(self.fn, batches=batches), statistics.median(times)

    def shapes(self) -> tuple[tuple[str, ...], ...]:
        """Of each batch, one text for each tensor: `32x3x224x224`."""
        if self._batches is None or callable(self._batches):
            return (_shapes(self.batch(0)),)
        return tuple(_shapes(self.batch(i)) for i in range(min(len(self._batches), 64)))


def is_sequence(batches: Any) -> bool:
    """Whether batches can be asked for by their number."""
    return hasattr(batches, "__getitem__") and hasattr(batches, "__len__")


def require_device(
    otherwise: str = (
        "launch share and gain can only be measured on a GPU: record a trace where there is one and give its file, "
        "or let `graphlint dry-run` name what would break a capture, which needs none"
    ),
) -> None:
    """Args:
        otherwise: what can be done without a GPU.

    Raises:
        NoDevice: torch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        raise NoDevice(f"no CUDA device: {otherwise}")


def record(step: Step, world: World, steps: int, warmup: int, trace: Path | None = None) -> Recording:
    """Runs and records the step.

    Args:
        step: what one iteration does; it runs for real, so take a snapshot first if that matters.
        world: its modules are marked in the recording.
        steps: recorded iterations.
        warmup: iterations before anything is measured.
        trace: where to keep the Chrome trace, for other viewers.

    Raises:
        NoDevice: no GPU.
        StepFailed: the step raises.
    """
    require_device()
    with _its_own_errors():
        for i in range(warmup):
            step(i)
        torch.cuda.synchronize()
        (before,) = turns(step)
        enqueue = enqueue_time(step)
        timeline = trace_steps(step, world, steps, trace)
    costs = calibrate()
    with _its_own_errors():
        (after,) = turns(step)
    return Recording(timeline, before + after, enqueue, costs, step.shapes())


@contextmanager
def _its_own_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StepFailed(f"the step raises {type(error).__name__}: {_first_line(error)}") from error


def trace_steps(step: Callable[[int], Any], world: World, steps: int, trace: Path | None = None) -> Timeline:
    """The timeline of `steps` iterations under `torch.profiler`, with steps and modules marked.

    Two unmarked iterations run first: the profiler's own start must not count.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as folder, _marked(world):
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            for i in range(steps + 2):
                name = f"{STEP_MARK}{i - 2}" if i >= 2 else "graphlint.settle"
                with torch.profiler.record_function(name):
                    step(i)
            torch.cuda.synchronize()
        path = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        timeline = chrome.read(path)
    return _labelled(timeline)


def _labelled(timeline: Timeline) -> Timeline:
    return replace(timeline, source="live run", card=torch.cuda.get_device_name(), torch=torch.__version__)


@contextmanager
def _marked(world: World) -> Iterator[None]:
    """Forward calls of every module become named ranges of the recording."""
    handles: list[Any] = []
    for path, module in world.submodules():
        handles.extend(_mark(module, f"{MODULE_MARK}{path}|{type(module).__name__}"))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mark(module: Any, name: str) -> tuple[Any, Any]:
    open_ranges: list[Any] = []

    def enter(_module: Any, _args: Any) -> None:
        mark = torch.profiler.record_function(name)
        mark.__enter__()
        open_ranges.append(mark)

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        if open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    return (
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True),
    )


def calibrate(nodes: int = 400) -> ReplayCosts:
    """Measures graph launches and the gaps between kernels on the current device, with chains of one small kernel.

    Takes about half a second. Gaps come from the profiler, so that they fit the kernel times of a recording. A chain of
    one kernel shows the smallest gap there is, so a card that measures less than the default keeps the default.
    """
    usual = ReplayCosts()
    tiny, small, large = (torch.zeros(1 << n, device="cuda") for n in (6, 20, 24))
    graphs = [_chain(tiny, nodes), _chain(small, 40)]
    many, few = (enqueue_time(lambda _, g=graph: g.replay()) for graph in graphs)  # type: ignore[misc]
    slope = max(0.0, (many - few) / (nodes - 40))
    return ReplayCosts(
        node_gap=max(usual.node_gap, statistics.mean(_median_gap(graph.replay) for graph in graphs)),
        eager_gap=max(usual.eager_gap, _median_gap(lambda: _add(large, 40))),
        replay=max(1.0, few - 40 * slope),
        replay_per_node=slope,
        source=f"measured on {torch.cuda.get_device_name()}, torch {torch.__version__}",
    )


def _add(x: Any, times: int) -> None:
    for _ in range(times):
        x.add_(1)


def _chain(x: Any, nodes: int) -> Any:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        _add(x, nodes)
    graph.replay()
    return graph


def _median_gap(run: Callable[[], Any]) -> float:
    """Device idle between two kernels of `run`, in microseconds, when all of them were enqueued in time."""
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(3):
                run()
            torch.cuda.synchronize()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        kernels = [o for o in chrome.read(path).device if o.kind == "kernel"]
    return max(0.0, statistics.median(b.start - a.end for a, b in pairwise(kernels)))


def _shapes(batch: Batch) -> tuple[str, ...]:
    leaves, _ = torch.utils._pytree.tree_flatten(batch)
    return tuple("x".join(map(str, leaf.shape)) or "scalar" for leaf in leaves if isinstance(leaf, torch.Tensor))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
