"""The pytest plugin: `capture_safe`, a fixture and a marker. Imports neither torch nor the linter until a test uses it.

    def test_step(capture_safe):
        step, args = build()
        capture_safe(step, *args)

    @pytest.mark.capture_safe
    def test_whole(): ...          # everything that runs in the test counts as the step

Both work with and without a GPU. Under the marker or the fixture the CPU plays the device where there is none, so
`build()` may say `device="cuda"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from graphlint.runtime.dryrun.report import DryRunReport


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line(
        "markers",
        "capture_safe(ignore=(), target_torch=None): fail when a CUDA graph could not capture what the test runs",
    )


@pytest.fixture
def capture_safe() -> Iterator[Callable[..., DryRunReport]]:
    """A function `check(step, *args, between=None, runs=3, ignore=(), ...)` that fails the test when the step is not
    safe to capture.

    The whole test runs with the CPU playing the device where there is none. Returns the dry run's report.
    """
    from graphlint.runtime.dryrun import assert_capture_safe, emulated_device

    def check(step: Callable[..., Any], *args: Any, **options: Any) -> DryRunReport:
        __tracebackhide__ = True
        return assert_capture_safe(step, *args, **options)

    with emulated_device():
        yield check


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test under the marker is itself the step."""
    marker = item.get_closest_marker("capture_safe")
    if marker is None:
        yield
        return
    from graphlint.runtime.dryrun.run import CaptureUnsafe
    from graphlint.runtime.watchsync import capture_watch

    ignore = frozenset(marker.kwargs.get("ignore", ()))
    with capture_watch(target_torch=marker.kwargs.get("target_torch")) as seen:
        outcome = yield
    faults = [f for f in seen if f.severity != "note" and f.name not in ignore and f.code not in ignore]
    if faults and seen.report is not None and outcome.excinfo is None:  # type: ignore[attr-defined]
        import msgspec

        outcome.force_exception(CaptureUnsafe(msgspec.structs.replace(seen.report, findings=tuple(faults))))  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
    """A violation reads as the report alone; pytest's traceback would only show graphlint's own lines."""
    error = call.excinfo.value if call.excinfo is not None else None
    if type(error).__name__ == "CaptureUnsafe" and hasattr(report, "longrepr"):
        report.longrepr = str(error)
