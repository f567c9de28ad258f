"""graphlint keeps PyTorch code safe to capture in a CUDA graph.

`import graphlint` is cheap: the linter's parts and the guard's parts are loaded on first use, so that linting needs no
torch and the guard needs no libcst.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from graphlint.findings import Finding as Finding
    from graphlint.pipeline import lint as lint
    from graphlint.runtime.differential import differential as differential
    from graphlint.runtime.dryrun import assert_capture_safe as assert_capture_safe
    from graphlint.runtime.dryrun import dry_run as dry_run
    from graphlint.runtime.parity import parity as parity
    from graphlint.runtime.profiling import profile as profile
    from graphlint.runtime.watchsync import capture_watch as capture_watch

# public name -> module that defines it
_LAZY = {
    "lint": "graphlint.pipeline",
    "Finding": "graphlint.findings",
    "assert_capture_safe": "graphlint.runtime.dryrun",
    "capture_watch": "graphlint.runtime.watchsync",
    "differential": "graphlint.runtime.differential",
    "dry_run": "graphlint.runtime.dryrun",
    "parity": "graphlint.runtime.parity",
    "profile": "graphlint.runtime.profiling",
}

__all__ = ["__version__", *sorted(_LAZY)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'graphlint' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
