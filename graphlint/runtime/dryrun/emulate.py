"""Opens a session: the modes, the patches and the optimizer hooks that make one dry run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from graphlint.runtime.dryrun import hoststate
from graphlint.runtime.dryrun.modes import CallMode, OpMode
from graphlint.runtime.dryrun.patches import installed
from graphlint.runtime.dryrun.session import Session

_open: list[Session] = []


def has_device() -> bool:
    """Whether this machine has a CUDA device, asked past any emulation."""
    return bool(torch._C._cuda_getDeviceCount() > 0) if hasattr(torch._C, "_cuda_getDeviceCount") else False


def current() -> Session | None:
    """The session that is open on this process, if any."""
    return _open[-1] if _open else None


def session_for(roots: dict[str, Any], emulate: bool | None = None) -> Session:
    """The open session, or a new one that fits a step whose function and arguments are `roots`.

    `emulate`: whether the CPU plays the device. None: where there is no device, and where every tensor that the step
    can reach lives on the CPU, since a device would then have nothing to do.

    Raises:
        RuntimeError: a real device is asked for where there is none.
    """
    running = current()
    if running is not None:
        return running
    if emulate is False and not has_device():
        raise RuntimeError(
            "emulate=False asks for a CUDA device and there is none; leave it out to let the CPU play it"
        )
    if emulate is None:
        emulate = not has_device() or _all_on_host(roots)
    return Session(emulated=emulate, assume_device=True)


def _all_on_host(roots: dict[str, Any]) -> bool:
    """Whether the roots lead to tensors, and all of those are the CPU's."""
    kinds: set[str] = set()

    def note(tensor: torch.Tensor) -> int:
        kinds.add(tensor.device.type)
        return id(tensor)

    hoststate.labels(roots, note)
    return kinds == {"cpu"}


def device_name(session: Session) -> str:
    """What the session ran on, for the report."""
    return "the CPU playing a CUDA device" if session.emulated else torch.cuda.get_device_name()


@contextlib.contextmanager
def side_stream(session: Session) -> Iterator[None]:
    """Work inside goes to a stream of its own, as a capture's does."""
    streams = session.streams
    before = streams.current
    if session.emulated:
        streams.current = streams.new()
        try:
            yield
        finally:
            streams.current = before
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


@contextlib.contextmanager
def emulated_device(session: Session | None = None) -> Iterator[Session]:
    """Code inside runs as on a machine with one CUDA device: where there is none, the CPU plays it.

    `device="cuda"`, `.cuda()`, `.to("cuda")`, streams, events and graphs work; where each tensor would live is
    remembered. On a machine with a device nothing is remapped, calls are only watched. Sessions don't nest: an inner
    one is the outer one.
    """
    running = current()
    if running is not None:
        yield running
        return
    session = session or Session(emulated=not has_device())
    _open.append(session)
    try:
        with installed(session), _optimizers(session), _backward_seen(session), CallMode(session), OpMode(session):
            yield session
    finally:
        _open.remove(session)


@contextlib.contextmanager
def _backward_seen(session: Session) -> Iterator[None]:
    """`backward()` is itself a torch function, inside which torch looks away; hooks and custom backwards are the
    user's and must be seen."""
    owners = [owner for owner in (torch.autograd, torch.autograd.graph) if hasattr(owner, "_engine_run_backward")]
    original = getattr(owners[0], "_engine_run_backward") if owners else None  # noqa: B009 (a private name that some releases lack)

    def run(*args: Any, **kwargs: Any) -> Any:
        if session.emulated and args:
            _accumulators(session, args[0])
        # one thread: a device's backward would run in the engine's, where no function mode follows
        with CallMode(session), torch.autograd.set_multithreading_enabled(False):
            return original(*args, **kwargs) if original is not None else None

    for owner in owners:
        owner._engine_run_backward = run
    try:
        yield
    finally:
        for owner in owners:
            owner._engine_run_backward = original


def _accumulators(session: Session, outputs: Any) -> None:
    """Gradient nodes remember the stream of their first backward; a capture can not wait for the default stream."""
    queue = [getattr(output, "grad_fn", None) for output in outputs]
    seen: set[Any] = set()
    while queue and len(seen) < 50_000:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        queue.extend(parent for parent, _ in node.next_functions)
        if node.name().endswith("AccumulateGrad"):
            stream = node.metadata.setdefault("graphlint_stream", session.streams.current)
            if stream == 0 and session.recording:
                session.event("default-stream-warmup", "backward")
                return


@contextlib.contextmanager
def _optimizers(session: Session) -> Iterator[None]:
    """While a region is open, an optimizer that is about to step is asked whether it may."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def about_to_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if session.recording and not _may_step(session, optimizer):
            session.event("not-capturable", f"{type(optimizer).__name__}.step")

    handle = register_optimizer_step_pre_hook(about_to_step)
    try:
        yield
    finally:
        handle.remove()


def _may_step(session: Session, optimizer: Any) -> bool:
    """Torch refuses a capture of an optimizer that knows `capturable` and has it off, for parameters on the device."""
    if "capturable" not in optimizer.defaults:
        return True
    on_device = any(session.role(p) == "device" for group in optimizer.param_groups for p in group["params"])
    return not on_device or all(group.get("capturable") for group in optimizer.param_groups)


@contextlib.contextmanager
def forward_lines() -> Iterator[None]:
    """Anomaly mode without its checks: every node of the backward pass remembers the forward line that made it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mode = torch.autograd.set_detect_anomaly(True, check_nan=False)
    with mode:
        yield
