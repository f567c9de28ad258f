"""A function behind a guard: what a call goes through, from the fast path to a failed capture."""

from __future__ import annotations

import contextlib
import functools
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
from graphlint.runtime.admit import Admission
from graphlint.runtime.autograd import AutogradCaptured
from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.calls import Call, Reader
from graphlint.runtime.errors import (
    CaptureError,
    GuardWarning,
    NoDeviceError,
    NotWorthwhile,
    SignatureError,
)
from graphlint.runtime.graphs import FastPath, Graphs, Held, miss
from graphlint.runtime.hotpath import MISS
from graphlint.runtime.ledger import Ledger
from graphlint.runtime.lending import ENTRIES, Lending, fresh_outputs, shares
from graphlint.runtime.options import Options
from graphlint.runtime.replay import Captured, Shared
from graphlint.runtime.report import CaptureReport, Proof
from graphlint.runtime.shadow import SHADOW_CALLS, shadow
from graphlint.runtime.state import State
from graphlint.runtime.turn import Turn
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


def _is_part_of_it() -> bool:
    """Whether this call comes from within a guard's phases: from its thread, or from autograd's, which Python did
    not start.
    """
    return _OWNER[0] == threading.get_ident() or isinstance(threading.current_thread(), threading._DummyThread)


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
        self._reader = Reader(fn, options, self._backend)
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
        self._ledger = Ledger(self._name)
        self._state: State | None = None
        self._stream: Any = self._options.stream
        self._lent: Any = None  # gives the stream back when the guard is reset or gone
        self._handles: list[Any] = []
        self._turn = Turn()

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
        self._ledger.counts["inlined"] += 1
        return self._fn(*args, **kwargs)

    def _slow(self, args: Any, kwargs: Any) -> Any:
        reason = self._backend.unavailable()
        if reason:
            return self._give_up("no-device", NoDeviceError(reason, stage="preflight"), args, kwargs)
        if (_BUSY[0] and _is_part_of_it()) or self._backend.capturing():
            return self._inline(args, kwargs)
        with _CAPTURES, self._turn:
            return self._serve(args, kwargs)

    def _serve(self, args: Any, kwargs: Any) -> Any:
        """Finds the graph of a call, or makes it."""
        try:
            call = self._reader.read(args, kwargs)
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

    def _key(self, call: Call) -> Any:
        return self._reader.key(call, self._found(call).found, {**self._graphs, **self._refused})

    # ---- making graphs ----

    def _found(self, call: Call) -> State:
        """The state within reach, found once; modules and optimizers among the arguments are added."""
        if self._state is not None:
            discover.add_arguments(self._state.found, call.leaves, call.spec.names)
            self._state.add_generators(self._state.found.generators)
        else:
            found = discover.discover(self._fn, self._declared)
            discover.add_arguments(found, call.leaves, call.spec.names)
            device = self._reader.device(call, found)
            self._state = State(found, device, self._backend.generators(device))
            self._handles = hook_loads(found, self._dirty)
        return self._state

    def _admit(self, key: Any, call: Call) -> Any:
        """Warm-up, capture, verification of a new call; gives the caller's result."""
        state = self._found(call)
        self._reader.refuse_wrapped(state.found)
        if self._stream is None:
            self._stream = self._backend.new_stream(state.device)
            self._lent = weakref.finalize(self, self._backend.give_back, self._stream)
            self._lent.atexit = False
        if self._graphs.shared is None:
            stream_id = self._backend.stream_id(state.device)
            after = functools.partial(self._backend.after_stream, state.device)
            self._graphs.shared = Shared(self._turn, _BUSY, [stream_id()], stream_id, after)
        admission = Admission(
            self._fn, call, self._options, state, self._backend, self._stream, self._reader.where, self._ledger.notes
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

    def _make(self, key: Any, admission: Admission) -> None:
        """Captures and verifies every graph that the call needs: one, or one per bucket, the largest first."""
        if not admission.decide_entry(deferred=key in self._deferred):
            self._deferred.add(key)
            self._ledger.note("captured at the second call: whether gradients are kept between calls shows only then")
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
            self._ledger.thrashing(self._options.max_graphs)

    def _sizes(self, call: Call) -> Sequence[int]:
        return sorted(call.plan.sizes, reverse=True) if call.plan else (0,)

    def _sized_key(self, key: Any, admission: Admission, size: int) -> Any:
        _, training, extra, _ = key
        return (admission.call.spec_at(size), training, extra, admission.entry)

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
            self._ledger.counts["captures"] += 1
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
        self._begin_lending(captured, admission)
        self._ledger.counts["captures"] += 1
        return captured

    def _begin_lending(self, captured: Captured, admission: Admission) -> None:
        """The first results are copies, until it is known whether the caller keeps them."""
        if captured.outputs_mode != "alias":
            return
        state = [tensor for _, tensor in admission.after.bindings if isinstance(tensor, torch.Tensor)]
        fresh = fresh_outputs(captured.outputs, [*captured.keep, *state])
        buffers = [captured.static.leaves[i] for i in captured.static.unique]
        if any(shares(captured.outputs[i], buffer) for i in captured.made for buffer in buffers):
            captured.outputs_mode = "clone"  # a view of an argument: the next call's copy comes before any look
            return
        captured.lending = Lending([i for i in fresh if i in captured.made])

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
        if captured.lending is not None:
            if captured.lending.pinned:
                return self._capture_anew(key, captured, call)
            if captured.lending.kept():
                captured.copy_outputs()
                self._ledger.copies()
        if captured.shadows:
            try:
                return self._shadow(captured, call)
            except CaptureError as error:
                self._graphs.drop(key)
                self._refused[key] = error
                return self._give_up(key, error, call.args, call.kwargs)
        if self._options.inputs == "alias":
            self._check_own(captured, call)
        self._order()
        return self._answer(captured, call)

    def _answer(self, captured: Captured, call: Call) -> Any:
        """Replays; from now on the fast path does, unless results are still lent as copies."""
        if captured.lending is None or not captured.lending.learning:
            self._graphs.arm(captured, call.leaves)
        return captured.hand_out(captured.run(call.leaves))

    def _capture_anew(self, key: Any, captured: Captured, call: Call) -> Any:
        """A view of a result holds the graph's output memory: that graph goes, another one is made for this call."""
        mode, taught = captured.outputs_mode, captured.lending.taught if captured.lending else 1
        known = {id(other) for other in self._graphs.values() if other is not captured}
        self._graphs.drop(key)
        self._ledger.note("captured again: a view of a result was held when the next call came")
        result = self._admit_again(call)
        for other in self._graphs.values():
            if id(other) not in known and isinstance(other, Captured) and other.lending is not None:
                other.lending.taught = taught
                if mode == "clone":
                    other.copy_outputs()
        return result

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
        self._ledger.counts["shadowed"] += 1
        self._order()
        with _busy():
            results = shadow(self._fn, captured, call, self._state, self._backend, self._stream, self._reader.where)
        if not captured.shadows and captured.lending is None:
            self._graphs.arm(captured, call.leaves)
        return captured.hand_out(results)

    def _line_up(self, hot: tuple[FastPath, ...]) -> None:
        """The fast paths that a call tries, the likeliest first."""
        self._first = hot[0] if hot else miss
        self._others = hot[1:]

    def _dirty(self) -> None:
        """A module or an optimizer loaded a state."""
        self._graphs.dirty()

    def _check_own(self, captured: Captured, call: Call) -> None:
        for i in captured.static.unique:
            if call.leaves[i] is not captured.static.leaves[i]:
                raise SignatureError(
                    f"argument `{captured.spec.names[i]}` is not the guard's own buffer, as inputs='alias' promises",
                    cure="Fill the tensors of `.input_buffers()` and pass those.",
                )

    def _kept(self, captured: Captured, args: Any, kwargs: Any) -> Any:
        """A result is held where none was before. It gets memory of its own, and the next ones are copies: for good,
        or until it is clear that the caller lets go of them here too.
        """
        assert captured.lending is not None
        names, views = captured.holders()
        known = captured.lending.again()
        captured.lending.pinned = views > 0
        if not views:
            captured.part_with_outputs()
        if names + views > 1 or not known:
            captured.outputs_mode = "clone"
            captured.lending = captured.lending if views else None
            self._ledger.kept()
        self._graphs.disarm(captured)
        return MISS  # the slow path goes on, outside the lock of the fast one

    # ---- failing ----

    def _failed(self, key: Any, admission: Admission, error: CaptureError) -> Any:
        """A graph could not be made: S0 and the error, or S1 and the result of the real call."""
        if self._options.on_violation != "eager":
            if admission.ran:
                admission.undo()
            raise error
        self._refused[key] = error
        self._ledger.eager(error)
        if not admission.ran:
            return self._fn(*admission.call.args, **admission.call.kwargs)
        admission.after.restore()
        return admission.result

    def _violated(self, key: Any, captured: Held, error: CaptureError, call: Call) -> Any:
        """What was promised at capture no longer holds."""
        choice = self._options.on_violation
        if choice == "recapture":
            self._ledger.warn(GuardWarning(f"{error.code} {error.rule}: {error.reason}; captured again"))
            self._graphs.drop(key)
            return self._admit_again(call)
        if choice == "warn":
            self._ledger.warn(GuardWarning(str(error)))
            captured.watch = self._watch_now(captured)
            if isinstance(captured, AutogradCaptured):
                self._graphs.arm(captured, call.leaves)
                return captured.call(call.leaves)
            return self._answer(captured, call)
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
        if self._options.on_violation != "eager":
            raise error
        self._ledger.eager(error)
        return self._fn(*args, **kwargs)

    def _tell(self, admission: Admission) -> None:
        """What the caller should know after a capture."""
        for change in admission.host_changes:
            self._ledger.note(f"CG511 unrepeated-effect: `{change}` on the host happens at capture only, not on replay")
        for captured in self._graphs.values():
            report = captured.report
            if self._backend.times and report.replay_us and report.eager_us < 1.05 * report.replay_us:
                self._ledger.warn(
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
            self._name, self._options.mode, device, graphs, list(self._ledger.fallbacks.values()),
            list(self._ledger.notes), self.stats, self.memory(), sources,
        )  # fmt: skip

    @property
    def stats(self) -> dict[str, int]:
        """Counts: graphs, replays, captures, evictions, eager calls, shadowed and inlined calls."""
        replays = self._graphs.lost + sum(captured.replays[0] for captured in self._graphs.values())
        return {"graphs": len(self._graphs), "replays": replays, "evicted": self._graphs.evicted, **self._ledger.counts}

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
        with _CAPTURES, self._turn:
            for key in list(self._graphs):
                self._graphs.drop(key)
            self._refused.clear()
            self._deferred.clear()
            self._forget_state()
            self._ledger.note(f"invalidated: {reason}")

    def reset(self) -> None:
        """Drops graphs, buffers, pool, counts and notes: the guard is as new."""
        with _CAPTURES, self._turn:
            self.invalidate()
            if self._lent is not None:
                self._lent()
            self._init()

    def _forget_state(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._state = None

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
