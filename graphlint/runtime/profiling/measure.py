"""Measures what the profile projects: the same step, and single modules, as a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphlint.runtime.backend import CaptureFailed, CaptureRequest, Graph, default
from graphlint.runtime.profiling.record import Batch, Step, wall_time
from graphlint.runtime.profiling.world import World
from graphlint.runtime.translate import translate

Mode = Callable[[], AbstractContextManager[None]]

_WARMUP = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Wall times of one thing, eager and replayed, in microseconds; or the reason why it could not be captured."""

    eager: float
    graphed: float | None
    reason: str = ""

    @property
    def gain(self) -> float | None:
        """How many times faster the replay is."""
        return None if self.graphed is None else self.eager / self.graphed


def measure_step(step: Step, eager: float, generators: Sequence[Any] = ()) -> Measured:
    """Captures the whole step and times its replay, copies of new inputs included.

    Args:
        step: leaves its state changed; take a snapshot around this.
        eager: wall time of the eager step in microseconds.
        generators: the step's own random generators.
    """
    batch = step.batch(0)
    static = tuple(a.clone() if _on_device(a) else a for a in batch)
    pairs = [(s, a) for s, a in zip(static, batch, strict=True) if _on_device(a)]
    try:
        graph = capture(lambda: step.fn(*static), generators)
    except Exception as error:
        return Measured(eager, None, _why(error))

    def replay(_: int) -> None:
        if pairs:
            torch._foreach_copy_([s for s, _ in pairs], [a for _, a in pairs])
        graph.replay()

    return Measured(eager, wall_time(replay))


def measure_modules(step: Step, world: World, paths: Sequence[str]) -> dict[str, Measured]:
    """Each named module alone, forward and backward, on the inputs that it gets in the step."""
    results: dict[str, Measured] = {}
    snapshot = world.snapshot(on_host=True)
    for path in paths:
        module = world.module(path)
        if module is not None:
            results[path] = _measure_module(step, module)
            snapshot.restore()
    return results


def _measure_module(step: Step, module: Any) -> Measured:
    found = _inputs(step, module)
    if found is None:
        return Measured(0.0, None, "the step does not call it")
    args, kwargs, mode = found

    def run(_: int = 0) -> None:
        with mode():
            output = module(*args, **kwargs)
        leaves, _ = torch.utils._pytree.tree_flatten(output)
        ends = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])

    try:
        for _ in range(_WARMUP):
            run()
        eager = wall_time(run)
        graph = capture(run)
        return Measured(eager, wall_time(lambda _: graph.replay()))
    except Exception as error:
        return Measured(0.0, None, _why(error))


def _inputs(step: Step, module: Any) -> tuple[Batch, dict[str, Any], Mode] | None:
    """Copies of what the module is called with in one step, and the modes that the call runs under."""
    caught: list[tuple[Batch, dict[str, Any], Mode]] = []

    def catch(_module: Any, args: Batch, kwargs: dict[str, Any]) -> None:
        if not caught:
            copied = torch.utils._pytree.tree_map(_detached, (args, kwargs))
            caught.append((*copied, _mode()))

    with _hook(module, catch):
        step(0)
    return caught[0] if caught else None


def _mode() -> Mode:
    """The current autocast and gradient modes. The cache of casted weights is off: a graph would hold its addresses."""
    autocast, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    gradients = torch.is_grad_enabled()

    @contextmanager
    def mode() -> Iterator[None]:
        with torch.set_grad_enabled(gradients), torch.autocast("cuda", dtype, autocast, cache_enabled=False):
            yield

    return mode


@contextmanager
def _hook(module: Any, catch: Callable[..., None]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def capture(run: Callable[[], Any], generators: Sequence[Any] = ()) -> Graph:
    """A graph of `run`, after warm-up on the stream that captures it.

    Args:
        generators: beside the default one, those that `run` draws from.

    Raises:
        CaptureFailed: it can't be captured; the process is healthy afterwards.
    """
    backend = default()
    device = torch.device("cuda", torch.cuda.current_device())
    stream = backend.new_stream(device)
    with backend.on_stream(stream):
        for _ in range(_WARMUP):
            run()
    request = CaptureRequest(device, stream, backend.new_pool(device), generators=tuple(generators))
    graph, _ = backend.capture(run, request)
    for _ in range(2):  # the first replay also uploads the graph
        graph.replay()
    backend.synchronize(device)
    return graph


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _why(error: BaseException) -> str:
    """What stopped the capture in one line: the rule and the user's line, as the guard would say it."""
    if not isinstance(error, CaptureFailed):
        return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    fault = translate(error.first)
    place = f" ({Path(fault.where.filename).name}:{fault.where.lineno})" if fault.where else ""
    return f"{fault.code} {fault.rule}: {fault.reason}{place}"
