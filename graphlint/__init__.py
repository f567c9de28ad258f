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
    from graphlint.runtime.errors import AddressChangedError as AddressChangedError
    from graphlint.runtime.errors import CaptureError as CaptureError
    from graphlint.runtime.errors import CollectiveError as CollectiveError
    from graphlint.runtime.errors import CrossThreadError as CrossThreadError
    from graphlint.runtime.errors import DynamicShapeError as DynamicShapeError
    from graphlint.runtime.errors import FallbackWarning as FallbackWarning
    from graphlint.runtime.errors import GeneratorError as GeneratorError
    from graphlint.runtime.errors import GuardWarning as GuardWarning
    from graphlint.runtime.errors import HostCopyError as HostCopyError
    from graphlint.runtime.errors import HostSyncError as HostSyncError
    from graphlint.runtime.errors import NoDeviceError as NoDeviceError
    from graphlint.runtime.errors import NotWorthwhile as NotWorthwhile
    from graphlint.runtime.errors import OptimizerNotCapturableError as OptimizerNotCapturableError
    from graphlint.runtime.errors import OutOfBucketError as OutOfBucketError
    from graphlint.runtime.errors import OutOfGraphMemoryError as OutOfGraphMemoryError
    from graphlint.runtime.errors import PoolLeakError as PoolLeakError
    from graphlint.runtime.errors import ReplayError as ReplayError
    from graphlint.runtime.errors import ReplayMismatchError as ReplayMismatchError
    from graphlint.runtime.errors import SignatureError as SignatureError
    from graphlint.runtime.errors import StaleScalarError as StaleScalarError
    from graphlint.runtime.errors import StreamError as StreamError
    from graphlint.runtime.errors import TwoForwardsError as TwoForwardsError
    from graphlint.runtime.errors import UnjoinedStreamError as UnjoinedStreamError
    from graphlint.runtime.errors import WarmupError as WarmupError
    from graphlint.runtime.guard import CaptureSafe as CaptureSafe
    from graphlint.runtime.guard import capture_safe as capture_safe
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
    "capture_safe": "graphlint.runtime.guard",
    "CaptureSafe": "graphlint.runtime.guard",
}
_LAZY |= dict.fromkeys(
    (
        "AddressChangedError",
        "CaptureError",
        "CollectiveError",
        "CrossThreadError",
        "DynamicShapeError",
        "FallbackWarning",
        "GeneratorError",
        "GuardWarning",
        "HostCopyError",
        "HostSyncError",
        "NoDeviceError",
        "NotWorthwhile",
        "OptimizerNotCapturableError",
        "OutOfBucketError",
        "OutOfGraphMemoryError",
        "PoolLeakError",
        "ReplayError",
        "ReplayMismatchError",
        "SignatureError",
        "StaleScalarError",
        "StreamError",
        "TwoForwardsError",
        "UnjoinedStreamError",
        "WarmupError",
    ),
    "graphlint.runtime.errors",
)

__all__ = ["__version__", *sorted(_LAZY)]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'graphlint' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
