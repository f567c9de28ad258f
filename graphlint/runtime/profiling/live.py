"""Profiles a callable on the GPU: record, judge, and measure what was projected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from graphlint.runtime.profiling.analyse import Clock, analyse, with_measurement
from graphlint.runtime.profiling.measure import measure_modules, measure_step
from graphlint.runtime.profiling.record import Batch, Batches, Step, record, require_device
from graphlint.runtime.profiling.report import Choice, Report
from graphlint.runtime.profiling.world import World, eager

_MEASURED = 4  # modules that are measured alone


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
    fn = eager(fn)
    step = Step(fn, args, batches)
    world = World(fn)
    snapshot = world.snapshot(on_host=True)
    try:
        recording = record(step, world, steps, warmup, trace)
        report = analyse(
            recording.timeline,
            recording.costs,
            Clock(recording.wall, recording.enqueue),
            input_shapes=recording.input_shapes,
        )
        report = replace(report, notes=(*report.notes, *filter(None, [recording.unsteady])))
        if measure is True or (measure == "auto" and not report.advice.blocked):
            report = _measured(report, step, world)
        return report
    finally:
        snapshot.restore()


def _measured(report: Report, step: Step, world: World) -> Report:
    """Modules first: a capture of the whole step that fails may leave torch up to 2.11 unable to try another."""
    wanted = [m.path for m in _distinct(report) if m.choice is Choice.CAPTURE][:_MEASURED]
    alone = measure_modules(step, world, wanted)
    rows = tuple(
        replace(m, eager=alone[m.path].eager, graphed=alone[m.path].graphed)
        if m.path in alone and alone[m.path].graphed is not None
        else m
        for m in report.modules
    )
    refusals = tuple(f"{path} could not be captured alone: {m.reason}" for path, m in alone.items() if m.reason)
    report = replace(report, modules=rows, notes=(*report.notes, *refusals))
    refused = uncapturable(world)
    if refused:
        return with_measurement(report, None, refused)
    whole = measure_step(step, report.whole.wall, world.generators)
    return with_measurement(report, whole.graphed, whole.reason)


def _distinct(report: Report) -> list[Any]:
    """One module of each class and size: twelve equal blocks need one measurement."""
    return list({(m.kind, m.nodes): m for m in reversed(report.modules)}.values())[::-1]


def uncapturable(world: World) -> str:
    """Why an optimizer of the step would refuse a capture, or nothing."""
    for name, optimizer in world.optimizers.items():
        if any(group.get("capturable") is False for group in optimizer.param_groups):
            kind = type(optimizer).__name__
            return f"{name} ({kind}) was built without capturable=True, and a graph can't hold its step"
    return ""
