"""Which of the user's lines run, in order: where a branch was taken differently, and which part of a region a run has
reached.

Uses `sys.monitoring` where Python has it (3.12), else `sys.settrace`; library code is not traced.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from graphlint.runtime.dryrun import sites

Place = tuple[str, int]

_LIMIT = 200_000
_TOOL = 4  # a tool id that debuggers, coverage and profilers leave free


@contextlib.contextmanager
def recorded(lines: list[Place], about_to_run: Callable[[Place], None] | None = None) -> Iterator[None]:
    """Appends `(file, row)` for every line of the user's code that runs inside, in order, up to 200,000 lines.

    `about_to_run` is called with each line before it runs and before it is appended.
    """

    def note(filename: str, row: int) -> None:
        place = (sites.relative(filename), row)
        if about_to_run is not None:
            about_to_run(place)
        if len(lines) < _LIMIT:
            lines.append(place)

    if sys.version_info >= (3, 12) and sys.monitoring.get_tool(_TOOL) is None:
        with _monitored(note):
            yield
    else:
        with _traced(note):
            yield


@contextlib.contextmanager
def _monitored(note: Callable[[str, int], None]) -> Iterator[None]:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    thread = threading.get_ident()  # the events are the interpreter's; a trace function would be this thread's

    def on_line(code: CodeType, row: int) -> Any:
        if sites.is_installed(code.co_filename):
            return monitoring.DISABLE
        if threading.get_ident() == thread:
            note(code.co_filename, row)
        return None

    monitoring.use_tool_id(_TOOL, "graphlint")
    monitoring.register_callback(_TOOL, monitoring.events.LINE, on_line)
    monitoring.set_events(_TOOL, monitoring.events.LINE)
    monitoring.restart_events()
    try:
        yield
    finally:
        monitoring.set_events(_TOOL, 0)
        monitoring.free_tool_id(_TOOL)


@contextlib.contextmanager
def _traced(note: Callable[[str, int], None]) -> Iterator[None]:
    def on_line(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "line":
            note(frame.f_code.co_filename, frame.f_lineno)
        return on_line

    def on_call(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        return None if sites.is_installed(frame.f_code.co_filename) else on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def parting(first: list[tuple[str, int]], second: list[tuple[str, int]]) -> tuple[str, int] | None:
    """The last line that two runs had in common before they went different ways, or None where they did not.

    The first run may begin with lines of its own (the head of the `with` that opened the region).
    """
    starts = [i for i, place in enumerate(first[:12]) if second and place == second[0]]
    if starts:
        first = first[max(starts, key=lambda i: (first[i + 1 : i + 2] == second[1:2], i)) :]
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return first[index - 1] if index else one
    if len(first) != len(second) and first and second:
        return first[min(len(first), len(second)) - 1]
    return None
