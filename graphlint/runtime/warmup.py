"""The first phase: one watched call that leaves no trace, the caller's real call, and more calls on the graph's own
buffers.

The real call is the caller's: it runs once, eagerly, and its result is what the first call returns. Everything that is
born in a first step (optimizer state, caches, momentum buffers) is therefore born eagerly, and the capture sees the
steady state.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.observe import Observer, OpEvent, Written
from graphlint.runtime.state import Snapshot, State
from graphlint.runtime.stepped import Stepped, noting_steps

_TENSOR_LR = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop")


@dataclass
class Watched:
    """What the watched call showed."""

    events: list[OpEvent] = field(default_factory=list)
    reads: list[torch.Tensor] = field(default_factory=list)
    writes: dict[int, Written] = field(default_factory=dict)
    generators: list[torch.Generator] = field(default_factory=list)
    draws: bool = False
    rounding: float = 1e-4
    backward: bool = False
    streams: dict[int, Any] = field(default_factory=dict)
    stepped: Stepped = field(default_factory=Stepped)
    failed: str = ""

    def undo(self) -> None:
        """Writes back what the call overwrote outside of known state."""
        for written in self.writes.values():
            written.undo()


def watch_call(
    call: Callable[[], Any], arguments: set[int], state: State, backend: GraphBackend, stream: Any, room: int
) -> Watched:
    """Runs the call under the observer and undoes it. An exception of the call is kept as text: the real call will
    raise it.

    `arguments` are the storage addresses of the call's own tensors, which are not state.
    """
    before = state.snapshot(room)

    def keep(live: torch.Tensor) -> torch.Tensor:
        return live.clone() if 2 * live.numel() < room else live.to("cpu", copy=True)

    observer = Observer(backend.device_type, backend.stream_id(state.device), keep)
    failed, stepped = "", Stepped()
    try:
        with backend.on_stream(stream), _quiet_anomaly(), noting_steps(state.found, stepped), observer:
            call()
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    finally:  # an interrupt, too, leaves no trace
        observer.undo()
        before.restore()
        stepped.put_back()
    known = {id(t) for t in state.tensors().values()}
    by_storage = arguments | {t.untyped_storage().data_ptr() for t in state.tensors().values()}
    for address, tensor in observer.reads.items():
        if address in observer.writes and address not in by_storage and id(tensor) not in known:
            state.observed.append(tensor)
    state.add_generators([g for g in observer.generators if g.device.type == backend.device_type])
    return Watched(
        observer.events,
        list(observer.reads.values()),
        observer.writes,
        observer.generators,
        observer.draws,
        observer.rounding,
        observer.backward,
        observer.streams,
        stepped,
        failed,
    )


@contextlib.contextmanager
def _quiet_anomaly() -> Any:
    """Anomaly mode records the forward line of every autograd node; its warning is not for the user."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_anomaly_enabled(True, check_nan=False)
        try:
            yield
        finally:
            torch.set_anomaly_enabled(before[0], check_nan=before[1])


def tensor_lr(state: State, watched: Watched) -> list[str]:
    """Turns the lr of every optimizer that the call steps into a device tensor, where its code allows one; gives their
    labels.
    """
    turned = []
    for path, optimizer in state.found.optimizers.items():
        if not _steps(optimizer, watched):
            continue
        for g, group in enumerate(optimizer.param_groups):
            if isinstance(group.get("lr"), float) and _takes_tensor_lr(optimizer, group):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=state.device)
                turned.append(f"{path}.param_groups[{g}]['lr']")
    return turned


def _steps(optimizer: torch.optim.Optimizer, watched: Watched) -> bool:
    params = (p for group in optimizer.param_groups for p in group["params"])
    return any(p.untyped_storage().data_ptr() in watched.writes for p in params)


def _takes_tensor_lr(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    if type(optimizer).__name__ in _TENSOR_LR and type(optimizer).__module__.startswith("torch.optim"):
        return bool(group.get("capturable"))
    return type(optimizer) is torch.optim.SGD and bool(group.get("fused"))


def repeat(call: Callable[[], Any], times: int, base: Snapshot, backend: GraphBackend, stream: Any) -> list[Any]:
    """More warm-up calls, each from the same state; gives the last one's leaves of gradient objects as they then
    were.
    """
    grads: list[Any] = []
    for _ in range(times):
        with backend.on_stream(stream):
            call()
        grads = [param.grad for _, param in base.state.found.parameters()]
        base.restore()
    return grads
