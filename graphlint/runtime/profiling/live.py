"""Profiles a callable on the GPU: record, judge, and measure what was projected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from graphlint.runtime.profiling.analyse import Clock, analyse, with_measurement
from graphlint.runtime.profiling.measure import (
    Measured,
    measure_in_step,
    measure_modules,
    measure_step,
)
from graphlint.runtime.profiling.readings import Reading
from graphlint.runtime.profiling.record import Batch, Batches, Recording, Step, record, require_device
from graphlint.runtime.profiling.report import Choice, Module, Report
from graphlint.runtime.profiling.world import World, eager

_MEASURED = 4  # modules that are measured alone
_IN_STEP = 2  # ... and with the rest of the step around them


def run(
    fn: Callable[..., Any],
    args: Batch,
    batches: Batches,
    steps: int,
    warmup: int,
    measure: bool | Literal["auto"],
    trace: Path | None,
) -> Report:
    """See `graphlint.profile`."""
    require_device()
    if trace is not None:
        trace.open("ab").close()  # a path that can't be written is told before anything runs
    fn = eager(fn)
    world = World(fn)
    snapshot = world.snapshot(on_host=True)
    try:
        step, fetch = Step(fn, args, batches).held()
        recording = record(step, world, steps, warmup, trace)
        report = _judged(recording, fetch)
        if measure is True or (measure == "auto" and not report.advice.blocked):
            report = _measured(report, recording, step, world)
        return report
    finally:
        snapshot.restore()


def _judged(recording: Recording, fetch: float, beside: Reading | None = None) -> Report:
    """Judges the recording by the eager time read beside the graph, or else before; the range is that of all readings."""
    wall, every = recording.eager, recording.eager
    if beside is not None:
        wall, every = beside, every + beside
    clock = Clock(wall.median, recording.enqueue, every.range, fetch)
    return analyse(recording.timeline, recording.costs, clock, input_shapes=recording.input_shapes)


def _measured(report: Report, recording: Recording, step: Step, world: World) -> Report:
    """Modules first: a capture of the whole step that fails may leave torch up to 2.11 unable to try another."""
    chosen = [m for m in report.modules if m.choice is Choice.CAPTURE]
    alone = measure_modules(step, world, [m.path for m in _distinct(chosen)][:_MEASURED])
    biggest = sorted(chosen, key=lambda m: -m.step_gain)[:_IN_STEP]
    within = measure_in_step(step, world, [m.path for m in biggest])
    refused = uncapturable(world)
    whole = Measured(reason=refused) if refused else measure_step(step, world)
    if whole.eager is not None:  # judged again by the time that was read beside the graph
        report = _judged(recording, report.whole.fetch, whole.eager)
    rows = tuple(_row(m, alone.get(m.path), within.get(m.path)) for m in report.modules)
    refusals = [f"{path} could not be captured alone: {m.reason}" for path, m in alone.items() if m.reason]
    refusals += [f"{path} could not be captured in the step: {m.reason}" for path, m in within.items() if m.reason]
    report = replace(report, modules=rows, notes=(*report.notes, *refusals))
    return with_measurement(report, whole.eager, whole.graphed, whole.reason, recording.eager.median)


def _row(module: Module, alone: Measured | None, within: Measured | None) -> Module:
    if alone is not None and alone.eager is not None and alone.graphed is not None:
        module = replace(module, eager=alone.eager.median, graphed=alone.graphed.median)
    return replace(module, step_measured=within.gain) if within is not None else module


def _distinct(rows: Sequence[Module]) -> list[Module]:
    """One module of each class and size: twelve equal blocks need one measurement."""
    return list({(m.kind, m.nodes): m for m in reversed(rows)}.values())[::-1]


def uncapturable(world: World) -> str:
    """Why an optimizer of the step would refuse a capture, or nothing."""
    for name, optimizer in world.optimizers.items():
        if any(group.get("capturable") is False for group in optimizer.param_groups):
            kind = type(optimizer).__name__
            return f"{name} ({kind}) was built without capturable=True, and a graph can't hold its step"
    return ""
