"""Is a CUDA graph worth it? The launch-bound share of a step, measured here or read from a recording.

    call or file -> timeline -> steps -> launches, gaps, modules -> report -> text, JSON, page

Only the recorder (`record`, `measure`, `reach`, `state`) needs torch; all the rest works on plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from graphlint.runtime.profiling.report import Report
    from graphlint.runtime.profiling.timeline import Timeline

__all__ = ["profile", "profile_file", "read"]


def profile(
    fn: Callable[..., Any],
    *args: Any,
    batches: Iterable[Any] | Callable[[int], Any] | None = None,
    steps: int = 3,
    warmup: int = 5,
    measure: bool | Literal["auto"] = "auto",
    trace: str | Path | None = None,
) -> Report:
    """Measures a step on the GPU and says whether a CUDA graph is worth it, for all of it and for each module.

    The step runs a few hundred times; parameters, buffers, gradients, optimizer state, random generators and plain
    host values that it can reach are put back afterwards.

    Args:
        fn: one iteration: a function, a method or a module. Its modules and optimizers are found by themselves.
        args: what it is called with.
        batches: in place of `args`, the arguments of each iteration as tuples: a sequence, an iterable such as a
            DataLoader, or a function of the iteration; of the latter two the first eight are taken. Give batches as they
            really come: a shape that changes decides what can be captured.
        steps: recorded iterations.
        warmup: iterations before anything is measured.
        measure: also capture the step and its modules, and time the replay. "auto" does so where nothing in the
            recording forbids a capture. A capture that fails is healed and told.
        trace: where to keep the Chrome trace.

    Returns:
        The report; `str(report)` is for a terminal, `to_json()` and `to_html()` for the rest.

    Raises:
        NoDevice: torch sees no CUDA device.
        StepFailed: the step raises, or there are no batches.
        OSError: the trace can't be written.
    """
    from graphlint.runtime.profiling.live import run

    return run(fn, args, batches, steps, warmup, measure, Path(trace) if trace else None)


def profile_file(path: str | Path, mark: str | None = None, wall_us: float | None = None) -> Report:
    """Judges a recording: a Chrome trace (`.json`, `.json.gz`) or an Nsight Systems SQLite export.

    Args:
        mark: beginning of the name of the ranges that mark steps; `prof.step()` and `Optimizer.step` are known.
        wall_us: wall time of one step without a profiler, in microseconds; a recording overstates the host's part.

    Raises:
        UnreadableTrace: no recording, or one without device work.
        ValueError: no range begins with `mark`.
        OSError: the file can't be opened.
    """
    from graphlint.runtime.profiling.analyse import Clock, analyse

    return analyse(read(path), clock=Clock(wall_us) if wall_us else None, mark=mark)


def read(path: str | Path) -> Timeline:
    """The timeline of a recording, whatever tool wrote it.

    Raises:
        UnreadableTrace: no recording, or one without device work.
        OSError: the file can't be opened.
    """
    from graphlint.runtime.profiling import chrome, nsys
    from graphlint.runtime.profiling.jsonfile import UnreadableTrace

    path = Path(path)
    with path.open("rb") as file:
        head = file.read(16)
    if head == b"SQLite format 3\x00":
        return nsys.read(path)
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise UnreadableTrace(
            f"{path}: a report in Nsight's own format; export it with `nsys export --type sqlite {path}`"
        )
    return chrome.read(path)
