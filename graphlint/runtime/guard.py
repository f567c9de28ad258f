"""`@capture_safe`: warm a function up, check it, capture it, prove that the replay is what eager does, and replay it
from then on.

What is wrong with the simpler thing: `with torch.cuda.graph(g): step()` is four lines, and then inputs must be copied
by hand into the tensors of the capture, warm-up has trained the model three times, a changed learning rate is ignored,
a moved parameter is read where it was, an error names the second fault and leaves the process unable to draw random
numbers, and nothing says whether the result is right.

The hard part is that a capture runs the user's code without running it. So the first call is the caller's real one,
eager and counted once; everything else the guard does around it is undone, bytes and generators included (`admit.py`).
After that a call is one generated function: a check, a grouped copy, a launch (`hotpath.py`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from graphlint.runtime import autograd, discover
from graphlint.runtime import backend as backends
from graphlint.runtime.admit import Admission, Call
from graphlint.runtime.autograd import AutogradCaptured
from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.buckets import Buckets, Declared
from graphlint.runtime.errors import (
    CaptureError,
    FallbackWarning,
    GuardWarning,
    NoDeviceError,
    NotWorthwhile,
    SignatureError,
    Where,
)
from graphlint.runtime.graphs import FastPath, Graphs, Held, miss
from graphlint.runtime.hotpath import MISS
from graphlint.runtime.inputs import check_inputs
from graphlint.runtime.options import Options
from graphlint.runtime.replay import Captured, Shared
from graphlint.runtime.report import CaptureReport, Fallback, Proof
from graphlint.runtime.shadow import SHADOW_CALLS, shadow
from graphlint.runtime.spec import Spec, flatten_call
from graphlint.runtime.state import State
from graphlint.runtime.watch import Watch, hook_loads, watch_of

_CAPTURES = threading.RLock()  # one guard of the process warms, captures or verifies at a time
_BUSY = [0]  # not zero: some guard does; every hot path then takes the slow road
_OWNER = [0]  # the thread that does


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Inside, the calling thread warms, captures or verifies; other guards' calls in it are part of that."""
    _BUSY[0] += 1
    owner, _OWNER[0] = _OWNER[0], threading.get_ident()
    try:
        yield
    finally:
        _BUSY[0] -= 1
        _OWNER[0] = owner


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
        self._graphs = Graphs(self._options, self._backend, self._line_up, self._kept)
        self._refused: dict[Any, CaptureError] = {}
        self._deferred: set[Any] = set()
        self._fallbacks: dict[str, Fallback] = {}
        self._notes: list[str] = []
        self._told: set[str] = set()
        self._counts = {"captures": 0, "inlined": 0, "shadowed": 0, "eager": 0}
        self._state: State | None = None
        self._stream: Any = self._options.stream
        self._lent: Any = None  # gives the stream back when the guard is reset or gone
        self._handles: list[Any] = []
        self._lock = threading.RLock()

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
        except RuntimeError:
            if not self._backend.unavailable() and self._backend.capturing():
                return self._inline(args, kwargs)
            raise
        return self._slow(args, kwargs)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The call without the guard."""
        return self._fn(*args, **kwargs)

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

    def _inline(self, args: Any, kwargs: Any) -> Any:
        """Inside another capture or another guard's phases the function is simply part of them."""
        self._counts["inlined"] += 1
        return self._fn(*args, **kwargs)

    def _slow(self, args: Any, kwargs: Any) -> Any:
        reason = self._backend.unavailable()
        if reason:
            return self._give_up("no-device", NoDeviceError(reason, stage="preflight"), args, kwargs)
        if (_BUSY[0] and _OWNER[0] == threading.get_ident()) or self._backend.capturing():
            return self._inline(args, kwargs)
        with _CAPTURES, self._lock:
            return self._serve(args, kwargs)

    def _serve(self, args: Any, kwargs: Any) -> Any:
        """Finds the graph of a call, or makes it."""
        try:
            call = self._read(args, kwargs)
            key = self._key(call)
        except CaptureError as error:
            return self._give_up(error.rule, error, args, kwargs)
        captured = self._graphs.get(key)
        if captured is not None:
            return self._replay(key, captured, call)
        if key in self._refused:
            return self._give_up(key, self._refused[key], args, kwargs)
        try:
            return self._admit(key, call)
        except CaptureError as error:
            return self._give_up(key, error, args, kwargs)

    def _read(self, args: Any, kwargs: Any) -> Call:
        """A call as leaves and spec; widened to its bucket's shapes when it has one. Raises SignatureError and kin."""
        spec = Spec.of(args, kwargs, self._parameter_names(), self._backend.device_type)
        leaves = flatten_call(args, kwargs)[0]
        check_inputs(spec, leaves, self._backend.device_type, self._options.mode)
        plan = None
        if isinstance(self._options.buckets, Declared):
            plan = self._options.buckets.plan(spec)
            plan.choose(plan.length(leaves))
        return Call(args, kwargs, leaves, spec, plan)

    def _key(self, call: Call) -> Any:
        """What a graph is looked up by: the spec, training flags, how gradients stand, and the user's own key."""
        spec = call.spec
        if call.plan is not None:
            spec = call.plan.widen(spec, call.plan.choose(call.plan.length(call.leaves)))
        extra = None
        if callable(self._options.buckets):
            extra = self._options.buckets(*call.args, **call.kwargs)
        state = self._found(call)
        training = tuple(module.training for _, module in state.found.submodules())
        grads = "any"
        if self._options.mode == "step":
            first = next((p for _, p in state.found.parameters() if p.requires_grad), None)
            grads = "none" if first is None or first.grad is None else "some"
        for entry in ("any", grads):
            key = (spec, training, extra, entry)
            if key in self._graphs or key in self._refused:
                return key
        return (spec, training, extra, grads)

    @functools.cached_property
    def _signature(self) -> tuple[str, ...]:
        target = self._fn.forward if isinstance(self._fn, torch.nn.Module) else self._fn
        try:
            return tuple(inspect.signature(target).parameters)
        except (TypeError, ValueError):
            return ()

    def _parameter_names(self) -> Sequence[str]:
        return self._signature

    # ---- making graphs ----

    def _found(self, call: Call) -> State:
        """The state within reach, found once; modules and optimizers among the arguments are added."""
        if self._state is not None:
            discover.add_arguments(self._state.found, call.leaves, call.spec.names)
            self._state.add_generators(self._state.found.generators)
        else:
            found = discover.discover(self._fn, self._declared)
            discover.add_arguments(found, call.leaves, call.spec.names)
            device = self._device(call, found)
            self._state = State(found, device, self._backend.generators(device))
            self._handles = hook_loads(found, self._dirty)
        return self._state

    def _device(self, call: Call, found: discover.Found) -> torch.device:
        """The one device of the call. Raises SignatureError or NoDeviceError."""
        kind = self._backend.device_type
        devices = {leaf.device for leaf in call.leaves if isinstance(leaf, torch.Tensor)}
        devices |= {param.device for _, param in found.parameters()}
        devices |= {
            t.device for slot in found.loose if isinstance(t := slot.get(), torch.Tensor) and t.device.type == kind
        }
        if not devices:
            return self._backend.current_device()
        if not any(device.type == kind for device in devices):
            raise NoDeviceError(f"neither an argument nor a parameter is on a {kind} device", stage="preflight")
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise SignatureError(f"arguments and parameters are on {names}", rule="two-devices", stage="preflight")
        return devices.pop()

    def _admit(self, key: Any, call: Call) -> Any:
        """Warm-up, capture, verification of a new call; gives the caller's result."""
        state = self._found(call)
        self._refuse_wrapped(state.found)
        if self._stream is None:
            self._stream = self._backend.new_stream(state.device)
            self._lent = weakref.finalize(self, self._backend.give_back, self._stream)
            self._lent.atexit = False
        if self._graphs.shared is None:
            stream_id = self._backend.stream_id(state.device)
            after = functools.partial(self._backend.after_stream, state.device)
            self._graphs.shared = Shared(self._lock, _BUSY, [stream_id()], stream_id, after)
        admission = Admission(
            self._fn, call, self._options, state, self._backend, self._stream, self._where(), self._notes
        )
        admission.canonical = self._graphs.sister_grads()
        try:
            with _busy():
                admission.real_call()
                self._make(key, admission)
        except CaptureError as error:
            return self._failed(key, admission, error)
        except BaseException:
            if admission.ran:  # not the user's own exception: interrupted, or a fault of the guard
                admission.undo()
            raise
        self._tell(admission)
        return admission.result

    def _refuse_wrapped(self, found: discover.Found) -> None:
        """In mode "autograd" gradients are added outside of autograd, where DistributedDataParallel does not see
        them.
        """
        if self._options.mode != "autograd":
            return
        for path, module in found.modules.items():
            if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
                raise SignatureError(
                    f"`{path}` is a {type(module).__name__}, which would not see the gradients of a replay",
                    stage="preflight",
                    cure='Guard the whole step (mode="step"), with the communication inside.',
                )

    def _make(self, key: Any, admission: Admission) -> None:
        """Captures and verifies every graph that the call needs: one, or one per bucket, the largest first."""
        if not admission.decide_entry(deferred=key in self._deferred):
            self._deferred.add(key)
            self._note("captured at the second call: whether gradients are kept between calls shows only then")
            admission.after.restore()
            return
        made: list[tuple[Any, Held]] = []
        try:
            for size in self._sizes(admission.call):
                mine = self._sized_key(key, admission, size)
                if mine not in self._graphs:
                    made.append((mine, self._capture(mine, admission, size)))
        except BaseException:
            for _, captured in made:
                self._graphs.release(captured)
            raise
        for mine, captured in made:
            self._graphs.add(mine, captured, admission.call.leaves)
        if made and self._graphs.evicted >= 2 * self._options.max_graphs:
            self._warn_once(GuardWarning(self._thrash()))

    def _sizes(self, call: Call) -> Sequence[int]:
        return sorted(call.plan.sizes, reverse=True) if call.plan else (0,)

    def _sized_key(self, key: Any, admission: Admission, size: int) -> Any:
        spec, training, extra, _ = key
        if admission.call.plan is not None:
            spec = admission.call.plan.widen(admission.call.spec, size)
        return (spec, training, extra, admission.entry)

    def _capture(self, key: Any, admission: Admission, size: int) -> Held:
        steps = self._options.verify
        if self._options.mode == "autograd":
            assert self._graphs.shared is not None
            both = autograd.capture_autograd(admission, self._graphs.own_pool(admission), self._graphs.shared)
            try:
                if steps != "off":
                    autograd.prove_autograd(admission, both, 3 if steps == "first" else int(steps))
            except BaseException:
                both.release()
                raise
            both.device = admission.state.device
            self._counts["captures"] += 1
            return both
        pool = self._graphs.pool_for(admission)
        captured = admission.capture(size, pool)
        self._graphs.took(captured, pool)
        captured.device = admission.state.device
        captured.user_key = key[2]
        try:
            admission.prove(captured)
        except BaseException:
            if self._options.on_violation == "warn" and isinstance(error := sys.exc_info()[1], CaptureError):
                captured.report.proofs.append(Proof("verification", "failed", error.reason))
                warnings.warn(GuardWarning(str(error)), stacklevel=2)
            else:
                self._graphs.release(captured)
                raise
        if steps != "off":
            captured.shadows = SHADOW_CALLS
        self._counts["captures"] += 1
        return captured

    # ---- replaying off the fast path ----

    def _replay(self, key: Any, captured: Held, call: Call) -> Any:
        """A call whose graph stands, but that missed the fast path: another graph's turn, a shadowed call, a dirty
        watch.
        """
        if isinstance(captured, Captured) and captured.entry == "some":
            captured.adopt_grads()
        fact = captured.watch.first_broken()
        if fact is not None:
            return self._violated(key, captured, fact.error(), call)
        captured.watch.dirty[0] = False
        self._graphs.move_to_end(key)
        if isinstance(captured, AutogradCaptured):
            self._graphs.arm(captured, call.leaves)
            return captured.call(call.leaves)
        if captured.shadows:
            try:
                return self._shadow(captured, call)
            except CaptureError as error:
                self._graphs.drop(key)
                self._refused[key] = error
                return self._give_up(key, error, call.args, call.kwargs)
        if self._options.inputs == "alias":
            self._check_own(captured, call)
        self._graphs.arm(captured, call.leaves)
        self._order()
        return captured.hand_out(captured.run(call.leaves))

    def _order(self) -> None:
        """The current stream waits for the last replay's."""
        shared = self._graphs.shared
        assert shared is not None
        here = shared.stream_id()
        if here != shared.last_stream[0]:
            shared.after_stream(shared.last_stream[0])
            shared.last_stream[0] = here

    def _shadow(self, captured: Captured, call: Call) -> Any:
        """One of the first real calls, compared with eager."""
        assert self._state is not None
        self._counts["shadowed"] += 1
        self._order()
        with _busy():
            results = shadow(self._fn, captured, call, self._state, self._backend, self._stream, self._where())
        if not captured.shadows:
            self._graphs.arm(captured, call.leaves)
        return captured.hand_out(results)

    def _line_up(self, hot: tuple[FastPath, ...]) -> None:
        """The fast paths that a call tries, the likeliest first."""
        self._first = hot[0] if hot else miss
        self._others = hot[1:]

    def _dirty(self) -> None:
        """A module or an optimizer loaded a state."""
        self._graphs.dirty()

    def _thrash(self) -> str:
        return (
            f"CG601 capture-in-loop: {self.__name__} was captured {self._counts['captures']} times for "
            f"max_graphs={self._options.max_graphs}; pass changing numbers as tensors and changing lengths in buckets"
        )

    def _check_own(self, captured: Captured, call: Call) -> None:
        for i in captured.static.unique:
            if call.leaves[i] is not captured.static.leaves[i]:
                raise SignatureError(
                    f"argument `{captured.spec.names[i]}` is not the guard's own buffer, as inputs='alias' promises",
                    cure="Fill the tensors of `.input_buffers()` and pass those.",
                )

    def _kept(self, captured: Captured, args: Any, kwargs: Any) -> Any:
        """The caller holds an earlier result in more than one place: it gets its own memory, later results are
        copies.
        """
        captured.part_with_outputs()
        self._warn(
            GuardWarning(
                f"CG411 kept-output: a result of {self.__name__} is kept while the next call overwrites it; "
                "from now on results are copied (choose outputs='clone' or a ring to say so yourself)"
            )
        )
        self._graphs.disarm(captured)
        return MISS  # the slow path goes on, outside the lock of the fast one

    # ---- failing ----

    def _failed(self, key: Any, admission: Admission, error: CaptureError) -> Any:
        """A graph could not be made: S0 and the error, or S1 and the result of the real call."""
        if self._options.on_violation == "raise":
            if admission.ran:
                admission.undo()
            raise error
        self._refused[key] = error
        self._count_eager(key, error)
        if not admission.ran:
            return self._fn(*admission.call.args, **admission.call.kwargs)
        admission.after.restore()
        return admission.result

    def _violated(self, key: Any, captured: Held, error: CaptureError, call: Call) -> Any:
        """What was promised at capture no longer holds."""
        choice = self._options.on_violation
        if choice == "recapture":
            self._warn(GuardWarning(f"{error.code} {error.rule}: {error.reason}; captured again"))
            self._graphs.drop(key)
            return self._admit_again(call)
        if choice == "warn":
            self._warn(GuardWarning(str(error)))
            captured.watch = self._watch_now(captured)
            if isinstance(captured, AutogradCaptured):
                self._graphs.arm(captured, call.leaves)
                return captured.call(call.leaves)
            self._graphs.arm(captured, call.leaves)
            return captured.hand_out(captured.run(call.leaves))
        return self._give_up(key, error, call.args, call.kwargs)

    def _watch_now(self, captured: Held) -> Watch:
        assert self._state is not None
        return watch_of(self._state, self._options.watch, frozenset(), captured.entry == "some")

    def _admit_again(self, call: Call) -> Any:
        key = self._key(call)
        try:
            return self._admit(key, call)
        except CaptureError as error:
            return self._give_up(key, error, call.args, call.kwargs)

    def _give_up(self, key: Any, error: CaptureError, args: Any, kwargs: Any) -> Any:
        """Raises, or runs eagerly when that was asked for."""
        if self._options.on_violation == "raise" or (self._options.on_violation == "warn" and error.stage != "replay"):
            raise error
        self._count_eager(key, error)
        return self._fn(*args, **kwargs)

    def _count_eager(self, key: Any, error: CaptureError) -> None:
        self._counts["eager"] += 1
        reason = f"{error.code} {error.rule}: {error.reason}"
        entry = self._fallbacks.get(reason)
        if entry is None:
            entry = self._fallbacks[reason] = Fallback(reason)
            self._warn(FallbackWarning(f"{self.__name__} runs eagerly: {error}"))
        entry.calls += 1

    def _warn(self, warning: Warning) -> None:
        warnings.warn(warning, stacklevel=4)

    def _warn_once(self, warning: Warning) -> None:
        if type(warning).__name__ not in self._told:
            self._told.add(type(warning).__name__)
            self._warn(warning)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _tell(self, admission: Admission) -> None:
        """What the caller should know after a capture."""
        for change in admission.host_changes:
            self._note(f"CG511 unrepeated-effect: `{change}` on the host happens at capture only, not on replay")
        for captured in self._graphs.values():
            report = captured.report
            if self._backend.times and report.replay_us and report.eager_us < 1.05 * report.replay_us:
                self._warn(
                    NotWorthwhile(
                        f"{self.__name__}: a replay takes {report.replay_us:.0f} us, eager {report.eager_us:.0f} us"
                    )
                )
                report.replay_us = report.replay_us or 0.0
                break

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
        device = str(self._state.device) if self._state else ""
        sources = "\n".join(captured.source for captured in self._graphs.values())
        return CaptureReport(
            self.__name__, self._options.mode, device, graphs, list(self._fallbacks.values()), list(self._notes),
            self.stats, self.memory(), sources,
        )  # fmt: skip

    @property
    def stats(self) -> dict[str, int]:
        """Counts: graphs, replays, captures, evictions, eager calls, shadowed and inlined calls."""
        replays = self._graphs.lost + sum(captured.replays[0] for captured in self._graphs.values())
        return {"graphs": len(self._graphs), "replays": replays, "evicted": self._graphs.evicted, **self._counts}

    def memory(self) -> dict[str, int]:
        """Bytes: `inputs` in buffers, `outputs` in static results, `pool` in the shared pool as the allocator sees
        it.
        """
        outputs = sum(
            out.untyped_storage().nbytes()
            for captured in self._graphs.values()
            for out in captured.outputs
            if isinstance(out, torch.Tensor)
        )
        pool = self._graphs.pool
        held = 0 if pool is None or self._backend.unavailable() else self._backend.pool_bytes(pool)
        return {"inputs": sum(c.static.nbytes for c in self._graphs.values()), "outputs": outputs, "pool": held}

    def invalidate(self, reason: str = "asked for") -> None:
        """Drops every graph; the next call captures again. Gradients and state stay as they are."""
        with _CAPTURES, self._lock:
            for key in list(self._graphs):
                self._graphs.drop(key)
            self._refused.clear()
            self._deferred.clear()
            self._forget_state()
            self._note(f"invalidated: {reason}")

    def reset(self) -> None:
        """Drops graphs, buffers, pool, counts and notes: the guard is as new."""
        with _CAPTURES, self._lock:
            self.invalidate()
            if self._lent is not None:
                self._lent()
            self._init()

    def _forget_state(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._state = None

    def _where(self) -> Where | None:
        target = inspect.unwrap(self._fn.forward if isinstance(self._fn, torch.nn.Module) else self._fn)
        code = getattr(getattr(target, "__func__", target), "__code__", None)
        return Where(code.co_filename, code.co_firstlineno, code.co_name) if code else None

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


def _nothing() -> None:
    """What a method's guard becomes in a pickle: its owner makes a new one."""


def _rebuild(fn: Any, options: Options, declared: dict[str, Any]) -> CaptureSafe:
    return CaptureSafe(fn, options, declared, None)


def capture_safe(
    fn: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    warmup: int = 3,
    stream: Any = None,
    pool: Any = None,
    capture_error_mode: str = "thread_local",
    buckets: Buckets | Callable[..., Any] | None = None,
    pad: Mapping[str, float | int | bool] | None = None,
    unpad: Mapping[int, int] | None = None,
    inputs: str = "copy",
    outputs: str | int | None = None,
    modules: Sequence[torch.nn.Module] = (),
    optimizers: Sequence[torch.optim.Optimizer] = (),
    generators: Sequence[torch.Generator] = (),
    scaler: Any = None,
    tensor_lr: bool = True,
    verify: str | int = "first",
    on_violation: str = "raise",
    max_graphs: int = 8,
    watch: str = "sampled",
    backend: GraphBackend | None = None,
) -> Any:
    """Guards a function, a method or a module: captured on its first call, proved, and replayed from then on.

    Use it as `@capture_safe`, `@capture_safe(mode=...)` or `capture_safe(module, ...)`. The first call runs eagerly
    and counts once: parameters, buffers, gradients, optimizer and scaler state and generators are then what one eager
    call leaves. Every tensor argument must be on one device; other arguments must be hashable and choose the graph.

    Args:
        fn: what is guarded. State that it reaches by closure, globals or `self` is found; state it can't be seen to
            reach is declared below.
        mode: "step" (default for functions): no autograd across the call, it may hold backward and optimizer.
            "forward" (default for modules): the same without gradients. "autograd": forward and backward graphs,
            gradients flow to arguments and parameters.
        warmup: calls before the capture, all but the first of them undone.
        stream, pool: a stream to capture on and a pool handle, else the guard's own.
        capture_error_mode: as in `torch.cuda.graph`; "thread_local" lets other threads use CUDA meanwhile.
        buckets: `{"x": (dim, [512, 1024, 2048])}`: calls are padded to the next size and replay its graph; all sizes
            are captured at the first call, the largest first. Or a function of the arguments whose hashable result
            becomes part of the key.
        pad: what fills the padding, by argument name; 0 where not given.
        unpad: `{output index: dim}` to cut back; without it the guard finds out by comparing shapes.
        inputs: "copy": into the guard's buffers; "alias": the caller passes the tensors of `input_buffers()`
            themselves.
        outputs: "alias": the graph's memory, overwritten by the next call (default); "clone" (default in mode
            "autograd"); or a ring depth.
        modules, optimizers, generators, scaler: further state to set back, watch and register.
        tensor_lr: turn the lr of capturable optimizers into a device tensor, so that schedulers reach the graph.
        verify: "first" (3 steps against eager, then the next 2 real calls), a number of steps, or "off".
        on_violation: "raise"; "eager": run eagerly, counted, with one warning per reason; "recapture" when a watched
            fact fails; "warn": go on with the graph.
        max_graphs: graphs kept; the one not used for longest is dropped.
        watch: "sampled", "full" or "off": how often the facts a graph relies on are looked at.
        backend: the device kind; CUDA when None.

    Raises:
        ValueError: an option that does not exist.
        CaptureError: on calls; the subclass, `.code` and `.where` tell what and where. With "raise" a failed call has
            no effect.
    """
    if fn is None:
        given = {k: v for k, v in locals().items() if k != "fn"}
        return lambda fn: capture_safe(fn, **given)
    if isinstance(fn, CaptureSafe):
        return fn
    mode = mode or ("forward" if isinstance(fn, torch.nn.Module) else "step")
    outputs = outputs if outputs is not None else ("clone" if mode == "autograd" else "alias")
    declared = Declared.of(buckets, pad) if isinstance(buckets, Mapping) else buckets
    if mode == "autograd" and isinstance(declared, Declared):
        raise ValueError('buckets: mode "autograd" has one graph per signature; use mode "step" or "forward"')
    options = Options(
        mode, warmup, stream, pool, capture_error_mode, declared, unpad, inputs, outputs, tensor_lr, verify,
        on_violation, max_graphs, watch,
    )  # fmt: skip
    extra: dict[str, Any] = {f"modules[{i}]": m for i, m in enumerate(modules)}
    extra |= {f"optimizers[{i}]": o for i, o in enumerate(optimizers)}
    extra |= {f"generators[{i}]": g for i, g in enumerate(generators)}
    if scaler is not None:
        extra["scaler"] = scaler
    return CaptureSafe(fn, options, extra, backend)
