"""The report for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from graphlint.runtime.profiling.advice import time
from graphlint.runtime.profiling.readings import Range
from graphlint.runtime.profiling.report import Choice, Drawing, Module, Report
from graphlint.runtime.profiling.timeline import union

_WIDTH = 100
_STRIP = 72  # columns of the timeline
_BLOCKS = " ▁▂▃▄▅▆▇█"
_ROWS = 16  # modules shown
_MOVED = 0.05  # of the gain, by another reading of the eager step, that is told


def render(report: Report) -> str:
    """The whole report, lines of at most 100 columns where names allow."""
    return "\n".join(line.rstrip() for line in _lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield _title(report)
    yield ""
    yield from textwrap.wrap(report.advice.headline, _WIDTH)
    yield ""
    yield from _numbers(report)
    if report.drawing is not None:
        yield from _strip(report, report.drawing)
    yield ""
    yield from _idle(report)
    yield from _modules(report)
    if report.advice.points:
        yield "What to do"
        for i, point in enumerate(report.advice.points, 1):
            yield from textwrap.wrap(point, _WIDTH, initial_indent=f"  {i}. ", subsequent_indent="     ")
    if report.notes:
        yield ""
        for note in report.notes:
            yield from textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="      ")


def _title(report: Report) -> str:
    where = ", ".join(filter(None, [report.card, f"torch {report.torch}" if report.torch else ""]))
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    return f"{report.source}: {steps}" + (f" on {where}" if where else "")


def _numbers(report: Report) -> Iterator[str]:
    whole = report.whole
    yield f"  eager step   {time(whole.wall):>9}" + _between(whole.wall_range)
    yield f"  host         {time(whole.host):>9}   to enqueue {whole.nodes} kernels, copies and fills"
    yield f"  device       {time(whole.device):>9}   busy; idle for the host {whole.share:.0%} of the step"
    yield f"  as one graph {time(whole.projected):>9}   projected, {whole.gain:.2f} times faster{_spread(whole.gain_range)}"
    if whole.graphed is not None and whole.measured_gain is not None:
        off = whole.prediction_error or 0.0
        measured = f"measured, {whole.measured_gain:.2f} times faster{_spread(whole.measured_range)}"
        yield f"               {time(whole.graphed):>9}   {measured}; the projection was {off:+.1%} off"
        if whole.earlier is not None and whole.earlier_error is not None and abs(whole.earlier_error - off) > _MOVED:
            yield (
                f"               {time(whole.earlier):>9}   was the eager step before that; the gain projected over it is "
                f"{whole.earlier_error:+.0%} off"
            )


def _between(span: Range | None) -> str:
    return f"   {time(span[0])} to {time(span[1])} in eight of ten loops" if span else ""


def _spread(span: Range | None) -> str:
    return f" ({span[0]:.2f} to {span[1]:.2f})" if span else ""


def _strip(report: Report, drawing: Drawing) -> Iterator[str]:
    """Device activity over the step, one column for each slice of it, and below it the same work as one graph."""
    busy = union([(0.0, drawing.behind), *((start, start + length) for _, start, length, _, _ in drawing.ops)])
    slice_length = max(drawing.length, 1e-3) / _STRIP
    now = "".join(_block(_covered(busy, i * slice_length, (i + 1) * slice_length)) for i in range(_STRIP))
    as_graph = "█" * max(1, round(_STRIP / report.whole.gain))
    yield ""
    yield f"  device, now  |{now}|"
    yield f"  as a graph   |{as_graph[:_STRIP]:<{_STRIP}}|"


def _covered(busy: list[tuple[float, float]], start: float, end: float) -> float:
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in busy) / (end - start)


def _block(share: float) -> str:
    if share <= 0:
        return " "
    return _BLOCKS[max(1, min(8, round(share * 8)))]


def _idle(report: Report) -> Iterator[str]:
    total = sum(row.time for row in report.idle)
    if not total:
        return
    yield "Why the device idled"
    for row in report.idle:
        if row.time >= 0.005 * total:
            plural = "gap" if row.count == 1 else "gaps"
            longest = f"longest {time(row.longest)}" if row.count > 1 else ""
            yield f"  {row.time / total:>4.0%}  {row.said}: {row.count} {plural} {f'({longest})' if longest else ''}"
    yield ""


def _modules(report: Report) -> Iterator[str]:
    rows = [m for m in report.modules if m.choice is not Choice.INSIDE] or list(report.modules)
    if not rows:
        return
    width = min(44, max(len(m.path) for m in rows[:_ROWS]))
    yield f"{'Module':<{width + 2}} {'kernels':>7} {'host':>9} {'device':>9} {'idle':>5} {'step gain':>9}  what to do"
    for m in rows[:_ROWS]:
        yield _module(m, width)
    if len(rows) > _ROWS:
        yield f"  and {len(rows) - _ROWS} more (--output-format json lists all)"
    yield ""


def _module(m: Module, width: int) -> str:
    path = m.path if len(m.path) <= width else "..." + m.path[3 - width :]
    gains = [f"step {m.step_measured:.2f}x"] if m.step_measured is not None else []
    gains += [f"alone {m.gain:.1f}x"] if m.gain is not None else []
    measured = f" (measured: {', '.join(gains)})" if gains else ""
    numbers = f"{m.nodes:>7} {time(m.host):>9} {time(m.device):>9} {m.share:>5.0%} {m.step_gain:>8.2f}x"
    return f"  {path:<{width}} {numbers}  {m.choice.value}: {m.reason}{measured}"
