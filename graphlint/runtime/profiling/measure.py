"""Measures what the profile projects: the same step, and single modules, as a captured graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphlint.runtime.backend import CaptureFailed, CaptureRequest, Graph, default
from graphlint.runtime.errors import CaptureError, GuardWarning
from graphlint.runtime.profiling.readings import Reading
from graphlint.runtime.profiling.record import Batch, Step
from graphlint.runtime.profiling.timing import turns
from graphlint.runtime.profiling.world import World
from graphlint.runtime.translate import translate

Mode = Callable[[], AbstractContextManager[None]]

_WARMUP = 3
_SETTLED = 6  # calls after which a guard replays: the first captures, the next two are compared


@dataclass(frozen=True, slots=True)
class Measured:
    """One thing, eager and graphed, read in the same turns; or the reason why it could not be captured."""

    eager: Reading | None = None
    graphed: Reading | None = None
    reason: str = ""

    @property
    def gain(self) -> float | None:
        """How many times faster the replay is."""
        return None if self.graphed is None or self.eager is None else self.eager.median / self.graphed.median


def measure_step(step: Step, world: World) -> Measured:
    """Captures the whole step; times it and its replay in turns, copies of new inputs included.

    Args:
        step: leaves its state changed; take a snapshot around this.
        world: what it reaches. Its tensors are kept alive meanwhile: a replay writes where they were.
    """
    batch = step.batch(0)
    static = static_copy(batch)
    try:
        graph = capture(lambda: step.fn(*static), world.generators)
    except Exception as error:
        return Measured(reason=_why(error))
    alive = [slot.get() for slot in world.state.slots()]
    load = _loader(static)

    def replay(i: int) -> None:
        load(step.batch(i))
        graph.replay()

    eager, graphed = turns(step, replay)
    alive.clear()
    return Measured(eager, graphed)


def static_copy(batch: Batch) -> Batch:
    """The batch with a copy in place of each tensor on the device, at any depth."""
    static: Batch = torch.utils._pytree.tree_map(lambda a: a.clone() if _on_device(a) else a, batch)
    return static


def _loader(static: Batch) -> Callable[[Batch], None]:
    """Copies a batch into the static one; tensors of another shape are left out."""
    places = [a for a in torch.utils._pytree.tree_leaves(static) if _on_device(a)]

    def load(batch: Batch) -> None:
        fresh = [a for a in torch.utils._pytree.tree_leaves(batch) if _on_device(a)]
        pairs = [(p, a) for p, a in zip(places, fresh, strict=False) if p.shape == a.shape]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [a for _, a in pairs])

    return load


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
        return Measured(reason="the step does not call it")
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
        graph = capture(run)
        eager, graphed = turns(run, lambda _: graph.replay())
        return Measured(eager, graphed)
    except Exception as error:
        return Measured(reason=_why(error))


def measure_in_step(step: Step, world: World, paths: Sequence[str]) -> dict[str, Measured]:
    """The whole step with one named module at a time behind the guard, forward and backward as graphs, in turns with
    the eager step.
    """
    results: dict[str, Measured] = {}
    snapshot = world.snapshot(on_host=True)
    for path in paths:
        module = world.module(path)
        if module is not None:
            results[path] = _measure_in_step(step, module)
            snapshot.restore()
    return results


def _measure_in_step(step: Step, module: Any) -> Measured:
    from graphlint.runtime.guard import capture_safe

    found = _inputs(step, module)
    if found is None:
        return Measured(reason="the step does not call it")
    args, kwargs, mode = found
    how = _guard_mode(module, args, kwargs, mode)
    guard = capture_safe(module.forward, mode=how, outputs="clone", verify="off")

    def run(i: int) -> None:
        with _forward(module, guard):
            step(i)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GuardWarning)  # whether it is worth it is what is asked here
            for i in range(_SETTLED):
                run(i)
            eager, graphed = turns(step, run)
        return Measured(eager, graphed)
    except Exception as error:
        return Measured(reason=_why(error))
    finally:
        guard.reset()


def _guard_mode(module: Any, args: Batch, kwargs: dict[str, Any], mode: Mode) -> str:
    """Whether a gradient will flow through the module."""
    leaves = [*torch.utils._pytree.tree_leaves((args, kwargs)), *module.parameters()]
    wanted = any(isinstance(t, torch.Tensor) and t.requires_grad for t in leaves)
    with mode():
        return "autograd" if wanted and torch.is_grad_enabled() else "forward"


@contextmanager
def _forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module's forward is that one; its hooks stay around it."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


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
    if isinstance(error, CaptureError):
        place = f" ({Path(error.filename).name}:{error.lineno})" if error.where else ""
        return f"{error.code} {error.rule}: {error.reason}{place}"
    if not isinstance(error, CaptureFailed):
        return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    fault = translate(error.first)
    place = f" ({Path(fault.where.filename).name}:{fault.where.lineno})" if fault.where else ""
    return f"{fault.code} {fault.rule}: {fault.reason}{place}"
