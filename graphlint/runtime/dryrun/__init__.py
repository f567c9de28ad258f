"""The dry run: a step or a whole program run without a GPU, judged by the rulebook.

    records  sites  streams            plain values: what happened, at which line, in which order
    judge  report                      records -> findings -> text and JSON; no torch
    roles  tape  undo  session         the state of one run
    modes  moves  patches  standins    thin adapters to torch: what is seen, what is played
    compiled  collectives  threads
    hoststate  memory  body  callers   what a replay would get wrong
    lines  captured  reference  aside
    handed  tails  late  stepping
    pools  sharing  strays  workspaces
    ordering  aliases  recaptures
    onlookers  staleness  statements
    run  program  script  emulate      the ways in

The names below are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphlint.runtime.dryrun.emulate import emulated_device as emulated_device
    from graphlint.runtime.dryrun.report import DryRunReport as DryRunReport
    from graphlint.runtime.dryrun.run import CaptureUnsafe as CaptureUnsafe
    from graphlint.runtime.dryrun.run import assert_capture_safe as assert_capture_safe
    from graphlint.runtime.dryrun.run import dry_run as dry_run
    from graphlint.runtime.dryrun.script import dry_run_program as dry_run_program
    from graphlint.runtime.dryrun.script import dry_run_script as dry_run_script

_LAZY = {
    "emulated_device": "emulate",
    "DryRunReport": "report",
    "CaptureUnsafe": "run",
    "assert_capture_safe": "run",
    "dry_run": "run",
    "dry_run_program": "script",
    "dry_run_script": "script",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
