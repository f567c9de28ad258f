"""Loss parity: does a captured step train as the eager one does?

The step runs eagerly twice and graphed once, each time from the same snapshot on the same batches. The second eager run
says how much eager differs from itself; what lies beyond that is the graph's doing.

    step, batches -> warm-up -> snapshot -> eager, eager again, graphed -> curves -> first divergence
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from graphlint.runtime.parity_report import Curves, ParityReport, compare
from graphlint.runtime.profiling.record import Batch, Batches, Step, is_sequence, require_device
from graphlint.runtime.profiling.world import World, eager

Call = Callable[..., Any]


class Grapher(Protocol):
    """Makes the graphed twin of a step.

    It may run the step and leave its state changed: the snapshot is restored before the twin's first call.
    """

    def __call__(self, fn: Call, batch: Batch) -> Call:
        """A callable that takes batches like `fn` and returns its loss."""
        ...


NO_DEVICE = (
    "parity replays a captured graph; without one `graphlint dry-run` runs the step repeatedly and names what a replay "
    "would not repeat"
)


class ParityFailed(RuntimeError):
    """The comparison could not be made; the message says why and what to change."""


def parity(
    fn: Call,
    *args: Any,
    batches: Batches = None,
    steps: int = 50,
    warmup: int = 3,
    graphed: Grapher | str = "guard",
    rtol: float = 1e-3,
) -> ParityReport:
    """Compares `steps` eager and graphed steps from one snapshot.

    Args:
        fn: one training step; returns its loss, a scalar tensor (or a tuple, list or dict that holds one). Its modules,
            optimizers, schedulers, generators and plain values are found by themselves and put back between the runs.
        args: what it is called with, when every step gets the same.
        batches: in place of `args`, the arguments of each step as tuples: a sequence, an iterable, or a function of the
            step.
        steps: length of the comparison.
        warmup: real steps before the snapshot, so that optimizer state exists in it.
        graphed: "guard" for `capture_safe`, "graph" for a plain `torch.cuda.graph`, or a function that makes the twin.
        rtol: relative difference of the losses that still counts as equal, beyond what eager differs from itself.

    Returns:
        Both curves, the first divergence and what differed first.

    Raises:
        ParityFailed: the step raises, returns no loss, or can't be captured.
        NoDevice: torch sees no CUDA device, and the twin needs one.
    """
    grapher = _grapher(graphed)
    fn = eager(fn)
    step, world = Step(fn, args, _at_hand(batches, warmup + steps)), World(fn)
    try:
        for i in range(warmup):
            step(i)
    except Exception as error:
        raise ParityFailed(f"the eager step raises {type(error).__name__}: {_said(error)}") from error
    snapshot = world.snapshot()
    try:
        first = _run(step, step.fn, world, steps, warmup)
        changed = snapshot.changed()
        snapshot.restore()
        again = _run(step, step.fn, world, steps, warmup)
        snapshot.restore()
        twin = _twin(grapher, step, warmup)
        snapshot.restore()
        replayed = _run(step, twin, world, steps, warmup)
    finally:
        snapshot.restore()
    return compare(first.curves(), again.curves(), replayed.curves(), rtol, changed)


def _at_hand(batches: Any, count: int) -> Any:
    """Batches that can be asked for by their number, all three runs get the same: of an iterable the first ones."""
    if batches is None or callable(batches):
        return batches
    kept = batches if is_sequence(batches) else list(islice(batches, count))
    if not len(kept):
        raise ParityFailed("there are no batches; give at least one, as the step gets them in training")
    return kept


def _grapher(graphed: Grapher | str) -> Grapher:
    if not isinstance(graphed, str):
        return graphed
    named: dict[str, Grapher] = {"guard": guarded, "graph": plain_graph}
    if graphed not in named:
        raise ValueError(f"graphed={graphed!r} is unknown; give 'guard', 'graph' or a function that makes the twin")
    require_device(NO_DEVICE)
    return named[graphed]


def _twin(grapher: Grapher, step: Step, warmup: int) -> Call:
    try:
        return grapher(step.fn, step.batch(warmup))
    except Exception as error:
        raise ParityFailed(f"the step can't be captured: {_said(error)}; `graphlint dry-run` names the line") from error


def _said(error: BaseException) -> str:
    """The first line of an error; all of it when it is the guard's, whose lines are place, reason and cure."""
    text = str(error).strip() or type(error).__name__
    return text if hasattr(error, "code") and hasattr(error, "where") else text.splitlines()[0]


def guarded(fn: Call, batch: Batch) -> Call:
    """The step under the guard, verification off: the comparison is the verification."""
    from graphlint.runtime.guard import capture_safe

    twin: Call = capture_safe(fn, verify="off", on_violation="raise")
    return twin


def plain_graph(fn: Call, batch: Batch) -> Call:
    """The step as one `torch.cuda.graph`, with static copies of the batch's device tensors."""
    from graphlint.runtime.profiling.measure import capture, static_copy

    static = static_copy(batch)
    places = _device_tensors(static)
    held: list[Any] = [None]

    def body() -> None:
        held[0] = fn(*static)

    graph = capture(body, World(fn).generators)

    def replay(*fresh: Any) -> Any:
        values = _device_tensors(fresh)
        if [v.shape for v in values] != [p.shape for p in places]:
            raise ParityFailed("the batch has other shapes than the one that was captured; a plain graph takes one set")
        for place, value in zip(places, values, strict=True):
            place.copy_(value)
        graph.replay()
        return held[0]

    return replay


def _device_tensors(batch: Batch) -> list[Any]:
    """The tensors of a batch on the device, at any depth."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda]


@dataclass
class _Run:
    """What one run left: losses and norms still on the device, so that the run is not slowed by reading them."""

    losses: list[Any]
    norms: list[Any]
    names: tuple[str, ...]
    rates: list[tuple[float, ...]]

    def curves(self) -> Curves:
        losses = tuple(float(x) for x in self.losses)
        norms = tuple(tuple(row.tolist()) for row in self.norms)
        return Curves(losses, norms, self.names, tuple(self.rates), all(isinstance(x, float) for x in self.losses))


def _run(step: Step, call: Call, world: World, steps: int, offset: int) -> _Run:
    run = _Run([], [], tuple(name for name, _ in _watched(world)), [])
    for i in range(offset, offset + steps):
        run.rates.append(_rates(world))
        try:
            result = call(*step.batch(i))
        except ParityFailed:
            raise
        except Exception as error:
            which = "eager" if call is step.fn else "graphed"
            raise ParityFailed(f"{which} step {i - offset} raises {type(error).__name__}: {_said(error)}") from error
        run.losses.append(_loss(result))
        tensors = [tensor for _, tensor in _watched(world)]
        if tensors:
            run.norms.append(torch.stack([n.double() for n in _norms(tensors)]))
    return run


def _watched(world: World) -> list[tuple[str, Any]]:
    """Tensors whose norm is compared after each step."""
    return [(n, t) for n, t in world.tensors().items() if t.is_floating_point() and t.numel()]


def _norms(tensors: list[Any]) -> list[Any]:
    device = tensors[0].device
    with torch.no_grad():
        return [torch.linalg.vector_norm(t.detach(), dtype=torch.float64).to(device) for t in tensors]


def _rates(world: World) -> tuple[float, ...]:
    """Learning rates that are Python numbers; one that is a tensor can't be frozen by a capture."""
    groups = (g for optimizer in world.optimizers.values() for g in optimizer.param_groups)
    return tuple(g["lr"] if isinstance(g.get("lr"), float) else math.nan for g in groups)


def _loss(result: Any) -> Any:
    """The first scalar of what the step returns: a detached copy, since a graph writes the next one over it."""
    leaves, _ = torch.utils._pytree.tree_flatten(result)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1:
            return leaf.detach().double().clone()
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            return float(leaf)
    raise ParityFailed("the step returns no loss to compare; let it return its loss as a scalar tensor")
