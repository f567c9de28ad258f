"""A function behind a guard: called like the function, looked at, copied and let go."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphlint.runtime import backend as backends
from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.graphs import FastPath, Graphs, miss
from graphlint.runtime.hotpath import MISS
from graphlint.runtime.lending import ENTRIES
from graphlint.runtime.options import Options
from graphlint.runtime.phases import CAPTURES
from graphlint.runtime.report import CaptureReport
from graphlint.runtime.service import Service


class CaptureSafe:
    """A function, method or module behind a guard; made by `capture_safe`, called like what it guards."""

    is_guard = True  # how `discover` knows one without importing this module

    def __init__(
        self, fn: Callable[..., Any], options: Options, declared: Mapping[str, Any], backend: GraphBackend | None
    ) -> None:
        self._fn = fn
        self._options = options
        self._declared = dict(declared)
        self._backend = backend or backends.default()
        self._name = (
            type(fn).__name__ if isinstance(fn, torch.nn.Module) else getattr(fn, "__name__", type(fn).__name__)
        )
        self._bound_to_owner = False
        self._init()
        if isinstance(fn, torch.nn.Module):
            self.__name__ = type(fn).__name__
            self.__doc__ = type(fn).__doc__
        else:
            functools.update_wrapper(self, fn, updated=())

    def _init(self) -> None:
        self._first: FastPath = miss
        self._others: tuple[FastPath, ...] = ()
        self._service = Service(self._fn, self._name, self._options, self._declared, self._backend, self._line_up)

    def _line_up(self, hot: tuple[FastPath, ...]) -> None:
        """The fast paths that a call tries, the likeliest first."""
        self._first = hot[0] if hot else miss
        self._others = hot[1:]

    @property
    def _graphs(self) -> Graphs:
        return self._service.graphs

    @property
    def _stream(self) -> Any:
        return self._service.maker.stream

    # ---- calling ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays where a graph stands for this call; else warms up, captures and verifies first."""
        try:
            out = self._first(args, kwargs)
            if out is not MISS:
                return out
            for hot in self._others:
                out = hot(args, kwargs)
                if out is not MISS:
                    return out
            hot = miss  # a fast path that was dropped is gone now, with its hold on results
        except RuntimeError:
            if self._backend.unavailable() or not self._backend.capturing():
                raise
        return self._service.call(args, kwargs)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The call without the guard."""
        return self._fn(*args, **kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> bool:
        """Warms up, captures and verifies the graph of such a call ahead, and undoes all of it: parameters, optimizer
        state, generators and the arguments are as before. With buckets, the graphs of all sizes.

        The caller's first call then replays; where it gives birth to state (an optimizer's), it runs eagerly and the
        second one replays. Returns whether the graph stands: False inside another capture, or where it can't be
        captured and `on_violation="eager"`; raises CaptureError otherwise.
        """
        return self._service.capture(args, kwargs)

    def profile(self, *args: Any, **options: Any) -> Any:
        """Whether a graph is worth it for this function: `graphlint.profile` of it with these arguments, eager.

        `options` are those of `graphlint.profile` (`batches`, `steps`, `warmup`, `measure`, `trace`). State is put
        back. Raises NoDevice without a CUDA device, StepFailed when the function raises.
        """
        from graphlint.runtime.profiling import profile

        return profile(self._fn, *args, **options)

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        """On an object: a guard of its own for each object, made on first use."""
        if owner is None:
            return self
        key = f"_capture_safe_{self.__name__}"
        mine = owner.__dict__.get(key)
        if not isinstance(mine, CaptureSafe):
            mine = CaptureSafe(types.MethodType(self._fn, owner), self._options, self._declared, self._backend)
            mine._bound_to_owner = True
            owner.__dict__[key] = mine
        return mine

    # ---- looking and letting go ----

    def input_buffers(self, key: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The graph's own input tensors, laid out as `(args, kwargs)` of the call.

        Fill them in place and call the guard with them: then nothing is checked or copied. `key` is a bucket's size;
        without it, the buffers of the graph that was used last. Raises LookupError when there is no such graph yet.
        """
        for captured in reversed(self._graphs.values()):
            if key is None or captured.static.size == key:
                return captured.static.call()
        raise LookupError("no graph yet" if key is None else f"no graph for bucket {key}")

    def report(self) -> CaptureReport:
        """What was captured, proved and copied, what it holds, and which calls ran eagerly for what reason."""
        graphs = []
        for captured in self._graphs.values():
            captured.report.replays = captured.replays[0]
            graphs.append(captured.report)
        state, ledger = self._service.maker.state, self._service.ledger
        sources = "\n".join(captured.source for captured in self._graphs.values())
        return CaptureReport(
            self._name, self._options.mode, str(state.device) if state else "", graphs,
            list(ledger.fallbacks.values()), list(ledger.notes), self.stats, self.memory(), sources, list(ledger.faults.values()),
        )  # fmt: skip

    @property
    def stats(self) -> dict[str, int]:
        """Counts: graphs, replays, captures, evictions, eager calls, shadowed and inlined calls."""
        graphs, counts = self._graphs, self._service.ledger.counts
        replays = graphs.lost + sum(captured.replays[0] for captured in graphs.values())
        return {"graphs": len(graphs), "replays": replays, "evicted": graphs.evicted, **counts}

    def memory(self) -> dict[str, int]:
        """Bytes: `inputs` in buffers, `outputs` in static results, `pool` in the pools of all graphs as the allocator
        sees them.
        """
        return self._service.memory()

    def invalidate(self, reason: str = "asked for") -> None:
        """Drops every graph; the next call captures again. Gradients and state stay as they are."""
        self._service.forget(reason)

    def reset(self) -> None:
        """Drops graphs, buffers, pool, counts and notes: the guard is as new."""
        with CAPTURES, self._service.turn:
            self._service.forget("reset")
            self._service.maker.give_back()
            self._init()

    # ---- being like what it guards ----

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_fn" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_fn"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy guards a copy of the function's state and captures anew."""
        import copy

        if self._bound_to_owner:
            return None  # the copied owner makes its own on first use
        return CaptureSafe(
            copy.deepcopy(self._fn, memo), self._options, copy.deepcopy(self._declared, memo), self._backend
        )

    def __reduce__(self) -> Any:
        """Graphs stay behind; the unpickled guard captures anew."""
        if self._bound_to_owner:
            return (_nothing, ())
        name, module = getattr(self._fn, "__qualname__", ""), sys.modules.get(getattr(self._fn, "__module__", ""))
        if module is not None and getattr(module, name, None) is self:
            return name
        return (_rebuild, (self._fn, self._options, self._declared))

    def __repr__(self) -> str:
        return f"<capture_safe {self.__name__}, mode {self._options.mode}, {len(self._graphs)} graph(s)>"


ENTRIES.add(CaptureSafe.__call__.__code__)


def _nothing() -> None:
    """What a method's guard becomes in a pickle: its owner makes a new one."""


def _rebuild(fn: Any, options: Options, declared: dict[str, Any]) -> CaptureSafe:
    return CaptureSafe(fn, options, declared, None)
