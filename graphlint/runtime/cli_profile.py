"""`graphlint profile` and `graphlint parity`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

FOUND, FAILED = 1, 2


class _Failure(click.ClickException):
    """One line on stderr, exit code 2."""

    exit_code = FAILED


_OF_FILES = {"step_range": "--step-range", "wall_us": "--wall-us"}
_OF_CALLABLES = {"steps": "--steps", "warmup": "--warmup", "measure": "--measure", "save_trace": "--save-trace"}


@click.command("profile")
@click.argument("target", metavar="MODULE:CALLABLE|FILE")
@click.option("--steps", default=3, show_default=True, type=click.IntRange(2), help="Recorded steps.")
@click.option(
    "--warmup", default=5, show_default=True, type=click.IntRange(0), help="Steps before anything is measured."
)
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Also capture the step and time it. [default: where nothing forbids it]",
)
@click.option("--step-range", metavar="NAME", help="Of a file: beginning of the name of the ranges that mark a step.")
@click.option(
    "--wall-us", type=click.FloatRange(0, min_open=True), help="Of a file: wall time of a step without a profiler."
)
@click.option("--save-trace", type=click.Path(dir_okay=False, path_type=Path), help="Keep the Chrome trace.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write the page with the timeline.")
@click.option("--output-format", type=click.Choice(["text", "json", "html"]), default="text", show_default=True)
@click.option("--output-file", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here.")
def profile_command(
    target: str,
    steps: int,
    warmup: int,
    measure: bool | None,
    step_range: str | None,
    wall_us: float | None,
    save_trace: Path | None,
    html: Path | None,
    output_format: str,
    output_file: Path | None,
) -> None:
    """Is a CUDA graph worth it? The launch-bound share of a step.

    MODULE:CALLABLE is one step, called without arguments; or a function that makes it and returns `step` or
    `(step, batches)`, where `batches` is a list of argument tuples or a function of the iteration. FILE is a recording:
    a Chrome trace of torch.profiler (.json, .json.gz) or an Nsight Systems export (.sqlite).
    """
    for path in (html, output_file, save_trace):
        _require_writable(path)  # before minutes of measuring
    if Path(target).suffix == ".py" and Path(target).is_file():
        raise _Failure(
            f"{target}: a program; give a recording, or MODULE:CALLABLE, as in {Path(target).stem}:make_step"
        )
    if Path(target).is_file():
        _refuse(_OF_CALLABLES, "is for a step that is run; a recording is taken as it is")
        report = _from_file(Path(target), step_range, wall_us)
    elif Path(target).is_dir():
        raise _Failure(f"{target}: a folder; give one recording in it")
    elif ":" not in target:
        raise _Failure(f"{target}: no such file; give a recording or MODULE:CALLABLE")
    else:
        _refuse(_OF_FILES, "is for a recording; a step that is run is marked and timed by itself")
        report = _from_callable(target, steps, warmup, "auto" if measure is None else measure, save_trace)
    if html is not None:
        _write(html, report.to_html())
    _emit({"text": report.to_text, "json": report.to_json, "html": report.to_html}[output_format](), output_file)


def _refuse(options: dict[str, str], why: str) -> None:
    """An option that would be ignored is a mistake."""
    context = click.get_current_context()
    for name, option in options.items():
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise _Failure(f"{option} {why}")


def _from_file(path: Path, mark: str | None, wall_us: float | None) -> Any:
    from graphlint.runtime.profiling import profile_file

    try:
        return profile_file(path, mark, wall_us)
    except (ValueError, OSError) as error:
        raise _Failure(str(error)) from None


def _from_callable(target: str, steps: int, warmup: int, measure: Any, trace: Path | None) -> Any:
    from graphlint.runtime.profiling import profile
    from graphlint.runtime.profiling.record import NoDevice, StepFailed, require_device

    try:
        require_device()  # before the user's code runs
        step, batches = _made(target)
        with _memory_told():
            return profile(step, batches=batches, steps=steps, warmup=warmup, measure=measure, trace=trace)
    except (NoDevice, StepFailed) as error:
        raise _Failure(str(error)) from None


@click.command("parity")
@click.argument("target", metavar="MODULE:make_step")
@click.option("--steps", default=50, show_default=True, type=click.IntRange(1), help="Compared steps.")
@click.option("--warmup", default=3, show_default=True, type=click.IntRange(1), help="Real steps before the snapshot.")
@click.option(
    "--with",
    "graphed",
    type=click.Choice(["guard", "graph"]),
    default="guard",
    show_default=True,
    help="The guard, or a plain torch.cuda.graph.",
)
@click.option(
    "--rtol",
    default=1e-3,
    show_default=True,
    type=click.FloatRange(0),
    help="Relative difference that counts as equal.",
)
@click.option("--output-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--output-file", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here.")
def parity_command(
    target: str, steps: int, warmup: int, graphed: str, rtol: float, output_format: str, output_file: Path | None
) -> None:
    """Run eager and graphed from one snapshot, plot both losses, find the first divergence.

    MODULE:make_step returns `step` or `(step, batches)`; the step returns its loss. Exit code 1 when they diverge.
    """
    from graphlint.runtime.parity import NO_DEVICE, ParityFailed, parity
    from graphlint.runtime.profiling.record import NoDevice, require_device

    _require_writable(output_file)
    try:
        require_device(NO_DEVICE)
        step, batches = _made(target)
        with _memory_told():
            report = parity(step, batches=batches, steps=steps, warmup=warmup, graphed=graphed, rtol=rtol)
    except (ParityFailed, NoDevice) as error:
        raise _Failure(str(error)) from None
    _emit(report.to_json() if output_format == "json" else report.to_text(), output_file)
    if not report.ok:
        sys.exit(FOUND)


@contextmanager
def _memory_told() -> Iterator[None]:
    """Measuring keeps copies of the state and graphs with memory of their own."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        said = f"the GPU's memory is used up ({_first_line(error)}); try a smaller batch"
        raise _Failure(said) from None


def _made(target: str) -> tuple[Callable[..., Any], Any]:
    """The step and its batches behind MODULE:CALLABLE.

    What the callable returns decides: a callable, or a pair with one in front, is the step; anything else means that
    the callable was the step itself.
    """
    found = _load(target)
    try:
        made = found()
    except (Exception, SystemExit) as error:
        said = _first_line(error)
        hint = "; let a function without arguments return (step, batches)" if isinstance(error, TypeError) else ""
        raise _Failure(f"{target} raises {type(error).__name__}: {said}{hint}") from None
    if callable(made):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        step, batches = made
        if not callable(batches) and not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
            kind = type(batches).__name__
            raise _Failure(f"{target} returns a {kind} for its batches; give a list, or a function of the iteration")
        return step, batches
    return found, None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _load(target: str) -> Callable[[], Any]:
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise _Failure(f"{target}: give MODULE:CALLABLE, for example train:make_step")
    if module_name.endswith(".py") or "/" in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise _Failure(f"{target}: give the module and not its file: {dotted}:{path}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {_first_line(error)}"
        raise _Failure(f"{target}: importing {module_name} raises {said}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise _Failure(f"{target}: {module_name} has no {path}")
        found = getattr(found, part)
    if not callable(found):
        raise _Failure(f"{target}: {path} is a {type(found).__name__} and can't be called")
    return found  # type: ignore[no-any-return]


def _emit(text: str, path: Path | None) -> None:
    if path is None:
        click.echo(_for_terminal(text), nl=not text.endswith("\n"))
    else:
        _write(path, text)


def _for_terminal(text: str) -> str:
    """The text in what the output can show: a stream in ASCII has no blocks and no micro sign."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        plain = text.translate(str.maketrans("▁▂▃▄▅▆▇█µ·", "..::=+##u-"))
        return plain.encode(encoding, "replace").decode(encoding)


def _require_writable(path: Path | None) -> None:
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise _Failure(f"{path}: can't be written (there is no folder {folder})")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise _Failure(f"{path}: can't be written (permission denied)")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _Failure(f"{path}: can't be written ({error.strerror})") from None
