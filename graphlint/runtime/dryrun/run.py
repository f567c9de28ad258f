"""The dry run of one step: warm it up, run it as a region, run it again after something changed, judge and compare."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from graphlint import rulebook
from graphlint.findings import Finding
from graphlint.runtime import differential
from graphlint.runtime.dryrun import emulate as sessions
from graphlint.runtime.dryrun import hoststate, lines, memory, sites, staleness
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.report import DryRunReport, Optimizer, executed_lines
from graphlint.runtime.dryrun.roles import generator_identity
from graphlint.runtime.dryrun.session import Region, Session

Between = Callable[..., Any]


class CaptureUnsafe(AssertionError):
    """A step that a graph can't capture, or would replay wrongly; the message is the report, `report` the same as
    data."""

    def __init__(self, report: DryRunReport) -> None:
        self.report = report
        super().__init__("the step is not safe to capture\n\n" + report.to_text())


def dry_run(
    fn: Callable[..., Any],
    *args: Any,
    between: Between | None = None,
    runs: int = 3,
    warmup: int = 1,
    generators: Iterable[torch.Generator] = (),
    target_torch: str | None = None,
    ignore: Iterable[str] = (),
    emulate: bool | None = None,
    **kwargs: Any,
) -> DryRunReport:
    """Runs `fn(*args, **kwargs)` as a capture would, without capturing, and reports everything that breaks capture or
    replay.

    Where the CPU plays the device, tensors that were made before count as device tensors, `device="cuda"` works, and
    what is made without a device stays on the host. The step really runs `warmup + runs` times, with all its effects.

    Args:
        fn: the step, a function, bound method or module; its arguments may hold tensors of any shape, dtype and
            nesting. between: called as `between(fn, args, i)` before run `i` (from 1): refill inputs in place, step a
            scheduler, change a flag. What differs
            afterwards is what a graph would have frozen.
        runs: runs of the region, the first is the captured one; 1 compares nothing.
        warmup: runs before it, as a capture needs them too.
        generators: custom generators that will be registered with the graph.
        target_torch: the torch release to judge for, "2.11"; default the running one.
        ignore: rule names or codes that are not reported.
        emulate: whether the CPU plays the device. Default: where there is no device, and for a step whose tensors are
            all on the CPU; any other step runs on the device.

    Raises:
        RuntimeError: `emulate=False` without a device. Nothing for a violation, and nothing for an exception of the step: the report's `error` tells it.
    """
    version = rulebook.parse_version(target_torch or torch.__version__)
    session = sessions.session_for({_name(fn): fn, "args": args, **kwargs}, emulate)
    with sessions.emulated_device(session):
        return StepRun(session, Judge(version), fn, args, kwargs, tuple(generators)).report(
            between, runs, warmup, frozenset(ignore)
        )


def assert_capture_safe(fn: Callable[..., Any], *args: Any, **options: Any) -> DryRunReport:
    """`dry_run` that raises `CaptureUnsafe` (an AssertionError) with the whole report when anything is found; returns
    the report otherwise."""
    report = dry_run(fn, *args, **options)
    if not report.ok:
        raise CaptureUnsafe(report)
    return report


class StepRun:
    """One dry run under way."""

    def __init__(
        self, session: Session, judge: Judge, fn: Any, args: Any, kwargs: Any, generators: tuple[Any, ...]
    ) -> None:
        self._session, self._judge = session, judge
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._generators = {generator_identity(generator) for generator in generators}
        self._roots = {_name(fn): fn, **{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}
        self._optimizers: dict[int, Optimizer] = {}
        self._error = ""
        self.differences: list[differential.Difference] = []

    def report(self, between: Between | None, runs: int, warmup: int, ignore: frozenset[str]) -> DryRunReport:
        """Everything, in order."""
        for _ in range(warmup):
            if not self._warm():
                break
        before = hoststate.labels(self._roots, self._session.roles.identity)
        with self._host_state() as effects:
            captured = self._region()
        before = {**hoststate.labels(self._roots, self._session.roles.identity), **before}
        found = self._judge.judge(captured.trace)
        latest = captured
        steady = {effect.path for effect in effects}
        done = 1
        for number in range(1, runs):
            if self._error:
                break
            watch = memory.Watch(self._session, latest, self._roots)
            found += self._change(between, number, watch)
            with self._host_state() as effects:
                later = latest = self._region()
            done += 1
            now = hoststate.labels(self._roots, self._session.roles.identity)
            told = {change.path for change in watch.changes.values()}
            differences = [
                d
                for d in differential.compare(captured.trace, later.trace, before, now)
                if not (told and d.kind == "address")
            ]
            self.differences += differences
            found += staleness.findings(
                self._judge, captured.trace, differences, [e for e in effects if e.path in steady]
            )
        return self._finish(found, captured, done, ignore)

    def _finish(self, found: list[Finding], captured: Region, runs: int, ignore: frozenset[str]) -> DryRunReport:
        unique: dict[tuple[str, str, int], Finding] = {}
        for finding in found:
            if finding.name not in ignore and finding.code not in ignore:
                unique.setdefault((finding.code, finding.at.filename, finding.at.row), finding)
        trace = captured.trace
        return DryRunReport(
            findings=tuple(sorted(unique.values(), key=lambda f: (f.at, f.code))),
            copies=tuple(trace.copies),
            draws=tuple(trace.draws),
            optimizers=tuple(self._optimizers.values()),
            executed=executed_lines(trace),
            runs=runs,
            operators=len(trace.ops),
            device=sessions.device_name(self._session),
            torch=str(torch.__version__),
            error=self._error,
        )

    def _warm(self) -> bool:
        try:
            with sessions.side_stream(self._session):
                self._call()
        except Exception as error:
            self._error = _told(error)
        return not self._error

    def _call(self) -> Any:
        return self._fn(*self._args, **self._kwargs)

    @contextlib.contextmanager
    def _host_state(self) -> Iterator[list[hoststate.Effect]]:
        """Fills the list with what the run inside changed on the host."""
        state, effects = hoststate.HostState(self._roots), []  # type: tuple[hoststate.HostState, list[hoststate.Effect]]
        yield effects
        effects.extend(effect for effect in state.effects() if not _library(effect))

    def _region(self) -> Region:
        """One run as a region, on a stream of its own."""
        session = self._session
        region = Region("step", sites.here(sys._getframe(3)))
        region.generators = self._generators
        region.trace.cold = any(
            isinstance(o, torch.optim.Optimizer) and not o.state for _, o in hoststate.reachable(self._roots)
        )
        with sessions.side_stream(session):
            session.stop = StepRun._call.__code__
            session.open(region)
            try:
                with sessions.forward_lines(), self._optimizer_paths(), lines.recorded(region.trace.lines):
                    self._call()
            except Exception as error:
                self._error = _told(error)
            finally:
                session.close()
                session.stop = None
        return region

    @contextlib.contextmanager
    def _optimizer_paths(self) -> Iterator[None]:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            group = optimizer.param_groups[0]
            lr = "device tensor" if isinstance(group["lr"], torch.Tensor) else "Python number"
            self._optimizers[id(optimizer)] = Optimizer(
                type(optimizer).__name__, group.get("capturable"), group.get("fused"), group.get("foreach"), lr
            )

        handle = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def _change(self, between: Between | None, number: int, watch: memory.Watch) -> list[Finding]:
        """Lets the caller change something before a run; replaced memory is told at the line that replaced it."""
        seen: list[tuple[str, int]] = []

        def look(place: tuple[str, int]) -> None:
            if seen:
                with torch._C.DisableTorchFunction():
                    watch.look(seen[-1])

        if between is not None:
            with lines.recorded(seen, look):
                between(self._fn, self._args, number)
            with torch._C.DisableTorchFunction():
                watch.look(seen[-1] if seen else ("<unknown>", 0))
        return [staleness.replaced(self._judge, change) for change in watch.changes.values() if change.place[1]]


def _library(effect: hoststate.Effect) -> bool:
    """Host values that optimizers, schedulers and modules of torch keep for themselves."""
    return effect.name.startswith("_") or "param_groups" in effect.path or ".state[" in effect.path


def _name(fn: Any) -> str:
    owner = getattr(fn, "__self__", None)
    return "self" if owner is not None else getattr(fn, "__name__", type(fn).__name__)


def _told(error: BaseException) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else ''}"
