"""The report as one HTML page that needs nothing else: no network, no library, no other file."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from typing import Any

from graphlint.runtime.profiling.advice import time
from graphlint.runtime.profiling.drawing import MOST_DRAWN
from graphlint.runtime.profiling.report import Choice, Drawing, Module, Report, Verdict

_COLOURS = {Verdict.FIRST: "first", Verdict.EASY: "easy", Verdict.NOT_WORTH: "not-worth"}
_LONGEST = 8  # gaps listed below the timeline
_NAME = 140  # kernel names are cut here; some are longer than a screen


def render(report: Report) -> str:
    """The page. Everything that comes from the recording is escaped."""
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "title": _escape(f"graphlint profile: {report.source}"),
        "where": _escape(_where(report)),
        "verdict": _COLOURS[report.advice.verdict],
        "verdict_said": _escape(report.advice.verdict.value),
        "headline": _escape(report.advice.headline),
        "points": "".join(f"<li>{_escape(p)}</li>" for p in report.advice.points),
        "bars": _bars(report),
        "tiles": _tiles(report),
        "idle": _idle(report),
        "gaps": _gaps(report.drawing),
        "modules": "".join(_module(m) for m in report.modules),
        "no_modules": "" if report.modules else "<p class=quiet>The recording names no modules.</p>",
        "notes": "".join(f"<li>{_escape(n)}</li>" for n in _notes(report)),
        "data": _data(report.drawing),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)  # once: names may hold braces, too


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


def _where(report: Report) -> str:
    steps = f"{report.steps} recorded step" + ("s" if report.steps != 1 else "")
    card = [report.card, f"torch {report.torch}" if report.torch else "", steps]
    return " · ".join([report.source, *filter(None, card)])


def _tiles(report: Report) -> str:
    whole = report.whole
    gain = f"{whole.gain:.1f}x" if whole.gain >= 2 else f"{whole.gain:.2f}x"
    below = f"measured {whole.measured_gain:.2f}x" if whole.measured_gain is not None else "as one graph"
    below += f", projected {whole.gain_range[0]:.2f}x to {whole.gain_range[1]:.2f}x" if whole.gain_range else ""
    tiles = [
        (f"{whole.share:.0%}", "launch-bound share", "device idle for the host"),
        (gain, "projected gain", below),
        (time(whole.host), "host", f"to enqueue {whole.nodes} operations"),
        (time(whole.device), "device", "busy in one step"),
    ]
    return "".join(
        f"<div class=tile><b>{_escape(number)}</b><span>{_escape(name)}</span><i>{_escape(more)}</i></div>"
        for number, name, more in tiles
    )


def _bars(report: Report) -> str:
    """Eager and graphed step to scale, the device's work filled in."""
    whole = report.whole
    rows = [("eager, now", whole.wall, whole.device), ("as one graph, projected", whole.projected, whole.device)]
    if whole.graphed is not None:
        rows.append(("as one graph, measured", whole.graphed, whole.device))
    longest = max(length for _, length, _ in rows)
    return "".join(_bar(name, length / longest, min(1.0, busy / length), time(length)) for name, length, busy in rows)


def _bar(name: str, length: float, busy: float, said: str) -> str:
    inner = f"<div class=busy style='width:{busy:.2%}'></div>"
    return (
        f"<div class=name>{_escape(name)}</div><div class=track><div class=bar style='width:{length:.2%}'>{inner}</div>"
        f"<span>{_escape(said)}</span></div>"
    )


def _idle(report: Report) -> str:
    total = sum(row.time for row in report.idle) or 1.0
    rows = [r for r in report.idle if r.time >= 0.005 * total]
    return "".join(
        f"<li><i class='dot {_slug(r.cause)}'></i><b>{r.time / total:.0%}</b> {_escape(r.said)} "
        f"<span class=quiet>{r.count} gap{'s' if r.count != 1 else ''}</span></li>"
        for r in rows
    )


def _gaps(drawing: Drawing | None) -> str:
    if drawing is None:
        return ""
    longest = sorted(drawing.gaps, key=lambda g: -g[1])[:_LONGEST]
    return "".join(
        f"<button data-from={start} data-length={length} title='{_escape(cause)}: show it'>"
        f"<i class='dot {_slug(cause)}'></i>{time(length)}<span class=unseen> of idle device, cause: {_escape(cause)}, "
        f"before </span><span>{_escape(path if not path.startswith('(') else operator or path)}</span></button>"
        for start, length, cause, path, operator in longest
    )


def _module(m: Module) -> str:
    depth = m.path.count(".")
    hidden = " class='inner'" if m.choice is Choice.INSIDE else ""
    measured = [f"step {m.step_measured:.2f}x"] if m.step_measured is not None else []
    measured += [f"alone {m.gain:.1f}x"] if m.gain is not None else []
    gain = f"<br><span class=quiet>measured: {', '.join(measured)}</span>" if measured else ""
    said = f"<b class='{_slug(m.choice.value)}'>{m.choice.value}</b>" if m.choice is not Choice.INSIDE else ""
    return (
        f"<tr{hidden}><td style='padding-left:{0.6 + 1.1 * depth:.1f}em'>{_escape(m.path)} "
        f"<span class=quiet>{_escape(m.kind)}</span></td><td>{m.nodes}</td>"
        f"<td>{time(m.host)}</td><td>{time(m.device)}</td>"
        f"<td><div class=meter><div style='width:{m.share:.0%}'></div></div>{m.share:.0%}</td>"
        f"<td>{m.step_gain:.2f}x</td><td class=why>{said} {_escape(m.reason)}{gain}</td></tr>"
    )


def _slug(text: str) -> str:
    return text.replace(" ", "-")


def _notes(report: Report) -> list[str]:
    notes = [*report.notes, f"Costs of a graph: {report.costs}."]
    if report.drawing is not None and report.drawing.shrink < 0.98:
        times = 1 / max(report.drawing.shrink, 1e-3)
        notes.append(
            f"The profiler made the idle time {times:.1f} times longer; the timeline is drawn with its true length."
        )
    if report.drawing is not None and len(report.drawing.ops) >= MOST_DRAWN:
        notes.append(f"The timeline shows the first {MOST_DRAWN:,} operations of the step.")
    return notes


def _data(drawing: Drawing | None) -> str:
    """The timeline as JSON that can stand in a script element. Names are written once."""
    if drawing is None:
        return "null"
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name[:_NAME], len(names))

    data: dict[str, Any] = {
        "length": drawing.length,
        "gap": drawing.node_gap,
        "behind": drawing.behind,
        "ops": [[number(n), s, d, stream, kind] for n, s, d, stream, kind in drawing.ops],
        "gaps": [[s, d, _slug(cause), number(path), number(op)] for s, d, cause, path, op in drawing.gaps],
        "calls": [[s, d, kind, number(name)] for s, d, kind, name in drawing.calls],
        "modules": [[number(f"{path}  {cls}".strip()), s, d, depth] for path, cls, s, d, depth in drawing.modules],
    }
    data["names"] = list(names)
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
