"""Names what a replay gets wrong: differences between runs and host values that changed become findings under the
rulebook's names."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterable

from graphlint.findings import Finding, Related
from graphlint.runtime.differential import Difference, tested_names
from graphlint.runtime.dryrun import memory, sites, statements
from graphlint.runtime.dryrun.hoststate import Effect
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.records import Event, Site, Trace

ADDRESS_RULES = {
    "parameter": "replaced-parameter",
    "buffer": "replaced-buffer",
    "gradient": "replaced-gradient",
    "optimizer-state": "replaced-optimizer-state",
}


def findings(
    judge: Judge, captured: Trace, differences: Iterable[Difference], effects: Iterable[Effect]
) -> list[Finding]:
    """Findings for the differences between the captured run and a later one, and for what the later run changed on
    the host."""
    effects = list(effects)
    changed = [judged for effect in effects if (judged := _effect(judge, captured, effect)) is not None]
    told = {(finding.at.filename, finding.at.row) for finding in changed}
    differing = [
        judged
        for difference in differences
        if not (difference.kind == "address" and difference.site.place in told)  # what an iterator hands out
        if (judged := _difference(judge, captured, difference, effects)) is not None
    ]
    return [*differing, *changed]


def _difference(judge: Judge, captured: Trace, difference: Difference, effects: list[Effect]) -> Finding | None:
    """One difference as a finding; None where another finding says it already."""
    site, optimizer = difference.site, _in_optimizer(difference.site)
    kind, change = difference.kind, f"{difference.before} at capture, {difference.after} now"
    if kind == "address":
        rule = ADDRESS_RULES.get(difference.label[0], "rebound-input")
        path = difference.label[1] or "a tensor"
        return judge.finding(
            rule,
            path,
            f"is other memory now than at capture; the graph keeps reading the old one ({difference.op})",
            site,
            difference.forward,
        )
    if kind in ("scalar", "shape", "host-tensor"):
        if kind == "host-tensor" and optimizer and difference.label[0] != "lr":
            return None  # a step counter that lives on the host: `capturable` is the question, not its value
        blamed = _blamed(captured, site)
        if blamed is not None:
            return judge.finding(
                blamed[0],
                blamed[1],
                f"is a value of the capture that replay keeps ({difference.detail or difference.op}: {change})",
                blamed[2],
            )
        rule = _scalar_rule(difference, optimizer)
        what = f"{difference.op} {difference.detail}".strip()
        return judge.finding(rule, what, f"takes a host value that replay keeps: {change}", site, difference.forward)
    if kind == "state-born":
        rule = "state-born-in-region" if optimizer else ADDRESS_RULES.get(difference.label[0], "region-cache")
        site = (not optimizer and assigned(captured, difference.label[1].rsplit(".", 1)[-1])) or site
        return judge.finding(
            rule,
            difference.op,
            "reads what the captured region itself made; every replay makes it anew",
            site,
            difference.forward,
        )
    return _branch(judge, captured, difference, optimizer, effects)


def _in_optimizer(site: Site) -> bool:
    """Whether the line works inside an optimizer or a scaler; averaged models and schedulers live in the same folder
    but are neither."""
    return any(
        part in frame and "swa_utils" not in frame and "lr_scheduler" not in frame
        for frame in site.inside
        for part in ("torch/optim/", "torch/amp/grad_scaler")
    )


def _scalar_rule(difference: Difference, optimizer: bool) -> str:
    if optimizer or difference.label[0] == "lr":
        return "frozen-lr"
    if difference.kind == "host-tensor":
        return "cpu-scalar-tensor"
    line = _text(difference.site)
    if difference.kind == "shape" and ("seqlen" in line or "seq_len" in line):
        return "frozen-max-seqlen"
    return "frozen-scalar"


def _blamed(captured: Trace, site: Site) -> tuple[str, str, Site] | None:
    """The draw, the clock or the setting that a changing number comes from, where the region asked one."""
    for event in captured.events:
        if event.kind == "environment" and _set_since(event):
            return "frozen-clock", event.call, event.site
        if event.kind in ("host-draw", "clock"):
            rule = "host-rng" if event.kind == "host-draw" else "frozen-clock"
            return rule, event.call, event.site
    return None


def _set_since(event: Event) -> bool:
    """Whether the user's code read an environment variable that has another value now."""
    key, _, before = event.detail.partition("=")
    return not any("torch/" in part for part in event.site.inside) and os.environ.get(key, "") != before


def _branch(
    judge: Judge, captured: Trace, difference: Difference, optimizer: bool, effects: list[Effect]
) -> Finding | None:
    site = difference.site
    if optimizer and not captured.cold:
        words = f"takes other settings now: {difference.before} is recorded, eager would run {difference.after}"
        return judge.finding("frozen-lr", difference.op, words, site, difference.forward)
    if optimizer:
        words = "takes its first-step branch at capture: state that the region makes is made anew by every replay"
        return judge.finding("state-born-in-region", difference.op, words, site, difference.forward)
    asked = next((event for event in captured.events if event.kind == "environment" and _set_since(event)), None)
    if asked is not None:
        words = "is asked at capture and has another value now; the graph keeps what followed from the first"
        return judge.finding("frozen-clock", asked.call, words, asked.site)
    tested = tested_names(site.place)
    if "training" in tested:
        rule = "frozen-mode"
    elif _decided_by_region(captured, site, tested, effects):
        rule = "first-step-branch"
    elif any("dropout" in frame for frame in site.inside):
        rule = "frozen-scalar"  # the probability crossed zero
    else:
        rule = "frozen-flag"
    words = f"decides once, at capture: {difference.before} is recorded, eager would run {difference.after} now"
    return judge.finding(rule, _text(site) or difference.op, words, site, difference.forward)


def _decided_by_region(captured: Trace, site: Site, tested: set[str], effects: list[Effect]) -> bool:
    """Whether the branch tests what the region itself sets: the first step goes another way than all later ones."""
    if tested & {effect.name for effect in effects} or any("swa_utils" in frame for frame in site.inside):
        return True
    return any(assigned(captured, name) for name in tested)


def replaced(judge: Judge, change: memory.Change) -> Finding:
    """A finding for memory, a mode or hooks that changed between the capture and a replay, at the line that changed
    it."""
    rule, words = _change_rule(change)
    return judge.finding(rule, change.path, words, statements.line_site(change.place))


def _change_rule(change: memory.Change) -> tuple[str, str]:
    """The rule and the words for one change between capture and replay."""
    if change.kind == "mode":
        return "frozen-mode", "is another mode now than at capture; the graph keeps the old one"
    if change.kind == "hook":
        return "python-hook", "has other hooks now than at capture; a replay runs none of them"
    words = "leads to other memory than at capture; the graph keeps the old address"
    if change.kind in ADDRESS_RULES:
        return ADDRESS_RULES[change.kind], words
    if change.gone and change.kind == "entry":
        return "evicted-cache", words
    return ("replaced-buffer" if change.path.count(".") > 1 else "rebound-input"), words


def _text(site: Site) -> str:
    return linecache.getline(site.filename, site.row).strip().rstrip(":")


def _effect(judge: Judge, captured: Trace, effect: Effect) -> Finding | None:
    """A host value that the step changes and replay will not; told at the line that changes it."""
    site = assigned(captured, effect.name) or _unscaled(captured, effect)
    if site is None:
        return None
    words = f"is changed by the step on the host ({effect.before} to {effect.after}); a replay runs no Python"
    return judge.finding(
        "unrepeated-effect",
        effect.path,
        words,
        site,
        related=[Related(site.filename, site.row, f"changes `{effect.path}`")],
    )


def _unscaled(captured: Trace, effect: Effect) -> Site | None:
    """The line that unscales, where a scaler's own note of it outlasts the region: no replay will take that note."""
    updated = any("_amp_update_scale_" in op.name for op in captured.ops)  # which begins a new note
    if effect.name not in ("stage", "_per_optimizer_states") or updated:
        return None
    return next((op.site for op in captured.ops if op.name.endswith("non_finite_check_and_unscale_")), None)


def assigned(captured: Trace, name: str) -> Site | None:
    """The executed line that assigns the attribute or name, or calls a method that changes it."""
    for place in dict.fromkeys(captured.lines):
        tree = sites.parsed(place[0])
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, (ast.stmt, ast.expr)) and node.lineno == place[1] and statements.changes(node, name):
                return Site(
                    place[0],
                    place[1],
                    column=node.col_offset + 1,
                    end_row=node.end_lineno or place[1],
                    end_column=(node.end_col_offset or 0) + 1,
                )
    return None
