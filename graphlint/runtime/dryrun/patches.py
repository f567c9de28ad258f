"""Puts stand-ins in the place of `torch.cuda` and the few other doors that no mode watches, and takes them away
again."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphlint.runtime.dryrun import collectives, compiled, moves
from graphlint.runtime.dryrun.session import Session
from graphlint.runtime.dryrun.standins import GraphContext, Played, pool_handle, set_stream, stream_context
from graphlint.runtime.dryrun.threads import watched_start
from graphlint.runtime.dryrun.watchers import capturing, noted, watch_device

_MISSING = object()


class Patches:
    """A list of replaced attributes that can be undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replaces one attribute; one that did not exist is removed again at the end."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Puts everything back."""
        for owner, name, value in reversed(self._undo):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._undo.clear()


@contextlib.contextmanager
def installed(session: Session) -> Iterator[None]:
    """All patches of a session: watchers on every machine, stand-ins where there is no device."""
    patches = Patches()
    try:
        _watch_host(session, patches)
        if session.emulated:
            _play_device(session, patches)
        else:
            watch_device(session, patches)
        yield
    finally:
        patches.undo()


def _watch_host(session: Session, patches: Patches) -> None:
    """Draws, seeds and scheduler steps on the host: no torch mode shows them."""
    for name in (
        "random",
        "randrange",
        "randint",
        "uniform",
        "gauss",
        "normalvariate",
        "choice",
        "choices",
        "sample",
        "shuffle",
        "getrandbits",
        "betavariate",
    ):
        patches.put(random, name, noted(session, "host-draw", f"random.{name}", getattr(random, name)))
    _watch_numpy(session, patches)
    _watch_clock(session, patches)
    _watch_environment(session, patches)
    for owner, prefix in ((torch, "torch"), (torch.random, "torch.random"), (torch.cuda, "torch.cuda")):
        for name in ("manual_seed", "seed", "manual_seed_all", "seed_all"):
            if name in vars(owner):
                patches.put(owner, name, _seed(session, f"{prefix}.{name}", getattr(owner, name)))
    _watch_schedulers(session, patches)
    _let_optimizers_step(patches)


def _let_optimizers_step(patches: Patches) -> None:
    """Torch's own check would end the step at an optimizer that is not capturable; the dry run notes it and goes on."""
    from torch.optim.optimizer import Optimizer

    for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
        if hasattr(Optimizer, name):
            patches.put(Optimizer, name, lambda self: None)


def _seed(session: Session, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        session.event("seed", call)
        if session.emulated and ".cuda." in call:
            return torch.default_generator.manual_seed(*args) if args else torch.default_generator.seed()
        return function(*args, **kwargs)

    return wrapper


def _watch_numpy(session: Session, patches: Patches) -> None:
    import sys

    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    for name in (
        "rand",
        "randn",
        "random",
        "randint",
        "uniform",
        "normal",
        "choice",
        "permutation",
        "shuffle",
        "random_sample",
        "beta",
        "exponential",
    ):
        patches.put(
            numpy.random, name, noted(session, "host-draw", f"numpy.random.{name}", getattr(numpy.random, name))
        )


def _watch_clock(session: Session, patches: Patches) -> None:
    import time

    for name in ("time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns"):
        patches.put(time, name, noted(session, "clock", f"time.{name}", getattr(time, name)))


def _watch_environment(session: Session, patches: Patches) -> None:
    """What a region reads from the environment, and what it found there."""
    kind = type(os.environ)
    read = kind.__getitem__

    def noted(self: Any, key: str) -> str:
        found = os.fsdecode(self._data[self.encodekey(key)]) if self.encodekey(key) in self._data else None
        session.event("environment", f"os.environ[{key!r}]", key if found is None else f"{key}={found}")
        return read(self, key)

    patches.put(kind, "__getitem__", noted)


def _watch_schedulers(session: Session, patches: Patches) -> None:
    from torch.optim import lr_scheduler

    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and "step" in vars(kind):
            patches.put(kind, "step", noted(session, "scheduler-step", f"{kind.__name__}.step", vars(kind)["step"]))


def _play_device(session: Session, patches: Patches) -> None:
    cuda: Any = torch.cuda
    played = Played(session)
    for name in ("Stream", "Event", "CUDAGraph"):
        patches.put(cuda, name, getattr(played, name))
    patches.put(torch.cuda.streams, "Stream", played.Stream)
    patches.put(torch.cuda.streams, "Event", played.Event)
    patches.put(torch.cuda.graphs, "CUDAGraph", played.CUDAGraph)
    patches.put(torch.cuda.graphs, "graph", GraphContext)
    values: dict[str, Any] = {
        "graph": GraphContext,
        "stream": functools.partial(stream_context, session),
        "StreamContext": functools.partial(stream_context, session),
        "current_stream": played.current_stream,
        "default_stream": played.default_stream,
        "set_stream": functools.partial(set_stream, session),
        "graph_pool_handle": pool_handle,
        "make_graphed_callables": functools.partial(compiled.make_graphed_callables, session),
        "is_current_stream_capturing": capturing(session, lambda: False),
        "synchronize": functools.partial(_synchronize, session),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": _NoContext,
        "get_device_name": lambda device=None: "CPU playing a CUDA device",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: _Properties(),
        "is_bf16_supported": lambda including_emulation=True: True,
        "default_generators": (torch.default_generator,),
        "_sleep": lambda cycles: session.streams.launch(),
        "current_blas_handle": lambda: 0,
    }
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        values[name] = lambda device=None: 0
    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "set_sync_debug_mode", "ipc_collect"):
        values[name] = lambda *args, **kwargs: None
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        patches.put(torch.cuda.nvtx, name, _nothing)
    patches.put(torch.Tensor, "record_stream", functools.partialmethod(_record_stream, session))
    values["initial_seed"] = torch.initial_seed
    values["mem_get_info"] = lambda device=None: (1 << 36, 1 << 37)
    values["empty_cache"] = noted(session, "allocator", "torch.cuda.empty_cache", lambda: None)
    values["get_rng_state"] = noted(
        session, "rng-state", "torch.cuda.get_rng_state", lambda device=None: torch.get_rng_state(), "get"
    )
    values["set_rng_state"] = noted(
        session, "rng-state", "torch.cuda.set_rng_state", lambda state, device=None: torch.set_rng_state(state), "set"
    )
    for name, value in values.items():
        patches.put(cuda, name, value)
    _play_rest(session, patches)


def _play_rest(session: Session, patches: Patches) -> None:
    """Doors outside `torch.cuda`: generators, autocast, optimizers, compile, distributed."""
    patches.put(threading.Thread, "start", watched_start(session, threading.Thread.start))
    patches.put(torch, "Generator", _generator(session))
    patches.put(torch.nn.Module, "cuda", lambda self, device=None: self.to("cuda"))
    patches.put(torch.amp.autocast_mode.autocast, "__init__", _autocast(torch.amp.autocast_mode.autocast.__init__))
    patches.put(torch.backends.cudnn, "is_acceptable", lambda tensor: False)  # torch may be built for CUDA all the same
    patches.put(torch, "compile", functools.partial(compiled.play_compile, session))
    patches.put(torch, "cond", functools.partial(moves.play_cond, session))
    patches.put(torch, "load", _load(session, torch.load))
    patches.put(
        torch._C, "_group_tensors_by_device_and_dtype", _grouped(session, torch._C._group_tensors_by_device_and_dtype)
    )
    if torch.distributed.is_available():
        ddp = torch.nn.parallel.DistributedDataParallel
        patches.put(ddp, "forward", collectives.watch_ddp(session, ddp.forward))
        for name, value in collectives.played(session).items():
            patches.put(torch.distributed, name, value)


def _record_stream(tensor: torch.Tensor, session: Session, stream: object) -> None:
    """Plays `Tensor.record_stream`: the second tensor of a region that it is called for is told."""
    region, number = session.region, session.roles.identity(tensor)
    if region is not None and region.kind != "shadow" and number in region.born:
        region.recorded.add(number)
        if len(region.recorded) > 1:
            session.event("recorded-stream", "torch.Tensor.record_stream")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What has no meaning on a played device."""


class _NoContext:
    """Plays `torch.cuda.device(0)`."""

    def __init__(self, device: object = None) -> None:
        pass

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


class _Properties:
    name, major, minor, total_memory, multi_processor_count = "CPU playing a CUDA device", 9, 0, 1 << 37, 132


def _synchronize(session: Session, device: object = None) -> None:
    session.event("stream-sync", "torch.cuda.synchronize")
    session.host_waits()


def _generator(session: Session) -> type:
    """`torch.Generator(device="cuda")` on a CPU-only torch; its draws are told apart by its identity."""
    real = torch.Generator

    class _Kind(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real) if cls.__name__ == "Generator" else super().__instancecheck__(instance)

    class Generator(real, metaclass=_Kind):  # type: ignore[misc,valid-type]
        """A CPU generator that remembers which device it was made for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            made = super().__new__(cls, "cpu")
            made.on_device = moves.is_device(device)
            if made.on_device:
                session.event("generator-born", "torch.Generator")
            return made

        def manual_seed(self, seed: int) -> Any:
            session.event("seed", "Generator.manual_seed")
            super().manual_seed(seed)
            return self

        def set_state(self, state: Any) -> Any:
            session.event("rng-state", "Generator.set_state", "set")
            super().set_state(state)
            return self

        def get_state(self) -> Any:
            session.event("rng-state", "Generator.get_state", "get")
            return super().get_state()

    return Generator


def _autocast(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(
        self: Any, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, enabled, cache_enabled)

    return __init__


def _load(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        loaded = original(f, map_location="cpu" if moves.is_device(map_location) else map_location, **kwargs)
        if moves.is_device(map_location):
            from graphlint.runtime.dryrun.modes import tensors

            for tensor in tensors(loaded):
                session.roles.mark(tensor, "device")
        return loaded

    return load


def _grouped(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """Optimizers group tensors by device inside C++, where a played device shows as the CPU."""

    def group(lists: Any, with_indices: bool = False) -> Any:
        found = {}
        for (device, dtype), value in original(lists, with_indices).items():
            first = next((tensor for tensor in value[0][0] if tensor is not None), None)
            if first is not None and session.role(first) == "device":
                device = torch.device("cuda", 0)
            found[(device, dtype)] = value
        return found

    return group
