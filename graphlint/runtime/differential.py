"""The differential trace: a step run again after something changed, compared operator by operator with what a graph
would replay.

A graph keeps the operators, the numbers, the shapes and the addresses of the capture. Whatever differs in a later
eager run is what replay gets wrong.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from graphlint.runtime.dryrun import lines as line_trace
from graphlint.runtime.dryrun import sites
from graphlint.runtime.dryrun.records import Op, Operand, Site, Trace

Kind = Literal["scalar", "host-tensor", "shape", "address", "branch", "state-born"]
Labels = dict[int, tuple[str, str]]


class Difference(msgspec.Struct, frozen=True):
    """One thing that a replay would keep and eager would not.

    `before` is what the graph holds, `after` what eager does now; `label` names the memory for an address
    (`parameter`, `argument`, ... and its path).
    """

    kind: Kind
    site: Site
    op: str
    before: str
    after: str
    detail: str = ""
    label: tuple[str, str] = ("", "")
    forward: Site | None = None


def differential(
    fn: Callable[..., Any], *args: Any, between: Callable[..., Any] | None = None, runs: int = 3, warmup: int = 1
) -> list[Difference]:
    """Runs `fn(*args)` as a region `runs` times with `between(fn, args, i)` before each later run, and returns what a
    replay of the first would keep.

    Without a device the CPU plays it, as in `dry_run`. Each line and kind is told once per run; an empty list means
    that the runs did the same.
    """
    import torch

    from graphlint import rulebook
    from graphlint.runtime.dryrun import emulate
    from graphlint.runtime.dryrun.judge import Judge
    from graphlint.runtime.dryrun.run import StepRun

    session = emulate.session_for({"fn": fn, "args": args})
    with emulate.emulated_device(session):
        run = StepRun(session, Judge(rulebook.parse_version(torch.__version__)), fn, args, {}, ())
        run.report(between, runs, warmup, frozenset())
    return run.differences


_SIZES = (
    "size",
    "self_size",
    "sizes",
    "stride",
    "shape",
    "start",
    "end",
    "length",
    "dim_size",
    "output_size",
    "max",
    "min",
)


def compare(
    captured: Trace, later: Trace, before: Labels | None = None, after: Labels | None = None
) -> list[Difference]:
    """All differences between the captured run and a later one, each line and kind once.

    `before` and `after` name the memory at the time of each run: storage -> (kind, path).
    """
    found: dict[tuple[str, str, int, str], Difference] = {}
    names = {**(after or {}), **(before or {})}
    shaped = False
    for one, other in zip(captured.ops, later.ops, strict=False):
        if (one.name, one.overload) != (other.name, other.overload):
            break
        if one.name == "aten::lift_fresh":
            continue  # a number that Python has just wrapped; the operator that takes it is compared
        for difference in _operators(one, other, before or {}, after or {}, names):
            sized = difference.kind == "shape" or difference.detail in _SIZES or "(" in difference.before
            if sized and shaped:
                continue  # the first change of a length explains those that follow from it
            shaped = shaped or sized
            found.setdefault(
                (difference.kind, difference.site.filename, difference.site.row, difference.detail), difference
            )
    branch = _branch(captured, later)
    if branch is not None:
        return [*found.values(), branch]
    return list(found.values())


def _operators(one: Op, other: Op, before: Labels, after: Labels, names: Labels) -> list[Difference]:
    found = [
        Difference("scalar", one.site, one.name, _short(a), _short(b), name, forward=one.forward)
        for (name, a), (_, b) in zip(one.scalars, other.scalars, strict=False)
        if not _same(a, b) and name not in ("size", "self_size", "sizes", "stride", "implicit", "generator")
    ]
    found += [
        Difference("shape", one.site, one.name, _short(a), _short(b), name, forward=one.forward)
        for (name, a), (_, b) in zip(one.scalars, other.scalars, strict=False)
        if not _same(a, b) and name in ("size", "self_size", "sizes", "stride")
    ]
    for place, (a, b) in enumerate(zip(one.operands, other.operands, strict=False)):
        found.extend(_operand(one, place, a, b, before, after, names))
    return found


def _operand(
    op: Op, place: int, one: Operand, other: Operand, before: Labels, after: Labels, names: Labels
) -> list[Difference]:
    if one.shape != other.shape:
        return [Difference("shape", op.site, op.name, str(one.shape), str(other.shape), forward=op.forward)]
    if one.value is not None and other.value is not None and not _same(one.value, other.value):
        label = names.get(one.storage, ("", ""))
        return [
            Difference(
                "host-tensor", op.site, op.name, _short(one.value), _short(other.value), label=label, forward=op.forward
            )
        ]
    if one.born < 0 and other.born < 0 and one.storage != other.storage and one.value is None:
        label = after.get(other.storage) or before.get(one.storage) or ("", "")
        return [
            Difference(
                "address", op.site, op.name, _path(before, one), _path(after, other), str(place), label, op.forward
            )
        ]
    if one.born >= 0 and other.born < 0 and one.value is None:
        label = after.get(other.storage, ("", ""))
        return [
            Difference(
                "state-born", op.site, op.name, "made in the region", _path(after, other), str(place), label, op.forward
            )
        ]
    return []


def _path(names: Labels, operand: Operand) -> str:
    _, path = names.get(operand.storage, ("", ""))
    return f"{path or 'a tensor'} (memory {operand.storage})"


def _same(a: object, b: object) -> bool:
    """Equality where nan is nan."""
    return a == b or (a != a and b != b)


def _short(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) < 60 else text[:57] + "..."


def _branch(captured: Trace, later: Trace) -> Difference | None:
    """The first operator that only one run has, told at the line where the runs parted."""
    pairs = itertools.zip_longest(captured.ops, later.ops)
    for one, other in pairs:
        if one is not None and other is not None and (one.name, one.overload) == (other.name, other.overload):
            continue
        here = one or other
        assert here is not None
        parted = line_trace.parting(captured.lines, later.lines)
        site = here.site if parted is None or here.site.inside else _line_site(parted, here.site)
        return Difference(
            "branch",
            site,
            here.name,
            one.name if one else "nothing",
            other.name if other else "nothing",
            forward=here.forward,
        )
    return None


def _line_site(place: tuple[str, int], inner: Site) -> Site:
    """A site for a bare line; the way there is that of the operator behind it."""
    return Site(place[0], place[1], column=_indent(place), end_row=place[1], trace=inner.trace)


def _indent(place: tuple[str, int]) -> int:
    import linecache

    text = linecache.getline(place[0], place[1])
    return len(text) - len(text.lstrip()) + 1


def tested_names(place: tuple[str, int]) -> set[str]:
    """Names and attributes that the statement on a line tests; empty where it tests nothing."""
    tree = sites.parsed(place[0])
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, (ast.If, ast.While)) and node.lineno == place[1]:
            return {
                x.attr if isinstance(x, ast.Attribute) else x.id
                for x in ast.walk(node.test)
                if isinstance(x, (ast.Name, ast.Attribute))
            }
    return set()
