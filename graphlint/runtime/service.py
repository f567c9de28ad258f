"""The way of a call that no fast path takes: find its graph or have one made, look at all that the graph relies on,
replay, and say what went wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphlint.runtime.admit import Admission
from graphlint.runtime.ahead import Born, adopt, withdraw
from graphlint.runtime.autograd import AutogradCaptured
from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.calls import Call
from graphlint.runtime.diagnose import explained
from graphlint.runtime.errors import CaptureError, FallbackWarning, GuardWarning, NoDeviceError, SignatureError
from graphlint.runtime.graphs import FastPath, Graphs, Held
from graphlint.runtime.hotpath import MISS
from graphlint.runtime.ledger import Ledger
from graphlint.runtime.maker import Maker
from graphlint.runtime.options import Options
from graphlint.runtime.phases import CAPTURES, busy, is_part_of_it
from graphlint.runtime.replay import Captured
from graphlint.runtime.report import Proof
from graphlint.runtime.shadow import shadow
from graphlint.runtime.spec import unflatten_call
from graphlint.runtime.turn import Turn
from graphlint.runtime.watch import Watch, watch_of

EAGER: Any = type("Eager", (), {"__repr__": lambda self: "EAGER"})()  # the call is to be run as it is


class Service:
    """Serves the calls of one guard.

    Args:
        fn, name, declared: what is guarded, what it is called, and state that was declared, by label.
        line_up: told the fast paths that a call should try, the likeliest first.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        options: Options,
        declared: Mapping[str, Any],
        backend: GraphBackend,
        line_up: Callable[[tuple[FastPath, ...]], None],
    ) -> None:
        self.fn = fn
        self.options = options
        self.backend = backend
        self.graphs = Graphs(options, backend, line_up, self.kept)
        self.ledger = Ledger(name)
        self.turn = Turn()
        self.refused: dict[Any, CaptureError] = {}
        self.born: Born = []  # state that a capture ahead knows and the caller's first call is still to give birth to
        self.maker = Maker(fn, options, declared, backend, self.graphs, self.ledger, self.turn)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serves a call: by replay, by the phases that make a graph, or eagerly where that was asked for."""
        out = self._call(args, kwargs)
        return self.fn(*args, **kwargs) if out is EAGER else out

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if reason := self.backend.unavailable():
            return self._give_up(NoDeviceError(reason, stage="preflight"))
        if is_part_of_it() or self.backend.capturing():
            self.ledger.counts["inlined"] += 1
            return EAGER
        with CAPTURES, self.turn:
            try:
                return self._serve(args, kwargs)
            except CaptureError as error:
                return self._give_up(error)

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Finds the graph of a call, or makes it. Raises CaptureError."""
        call = self.maker.reader.read(args, kwargs)
        key = self.key(call)
        captured = self.graphs.get(key)
        if captured is not None:
            return self._first_call(call) if self.born else self._replay(key, captured, call)
        if key in self.refused:
            raise self.refused[key]
        return self._admit(key, call)

    def key(self, call: Call) -> Any:
        """What the graph of a call is filed under."""
        return self.maker.reader.key(call, self.maker.found(call).found, {**self.graphs, **self.refused})

    def _admit(self, key: Any, call: Call) -> Any:
        """Makes the graph of a call; gives the result of the one eager call that the caller gets."""
        admission = self.maker.admission(call)
        try:
            with busy():
                admission.real_call()
                self._adopt(admission)
                self.maker.make(key, admission)
        except CaptureError as error:
            return self._failed(key, admission, error)
        except BaseException:
            if admission.ran:  # not the user's own exception: interrupted, or a fault of the guard
                admission.undo()
            raise
        self.maker.tell(admission)
        return admission.result

    # ---- ahead of the first call ----

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Makes the graph of such a call and leaves the world as if nothing had been done; whether it stands."""
        if reason := self.backend.unavailable():
            return self._give_up_ahead(NoDeviceError(reason, stage="preflight"))
        if is_part_of_it() or self.backend.capturing():
            return False
        with CAPTURES, self.turn:
            try:
                call = self.maker.reader.read(args, kwargs)
                key = self.key(call)
                if key not in self.graphs:
                    self._ahead(key, call)
            except CaptureError as error:
                return self._give_up_ahead(error)
        return True

    def _ahead(self, key: Any, call: Call) -> None:
        admission = self.maker.admission(call)
        try:
            with busy():
                admission.real_call()
                self._adopt(admission)
                self.maker.make(key, admission, ahead=True)
        except BaseException as error:
            told = self._explained(admission, error) if isinstance(error, CaptureError) else error
            if admission.ran:
                admission.undo()
            raise told from told.__cause__
        self.born = withdraw(admission, {slot.label for slot, _ in admission.bound})
        for captured in self.graphs.values() if self.born else ():
            self.graphs.disarm(captured)  # no fast path before the call that gives birth
        self.maker.tell(admission)

    def _adopt(self, admission: Admission) -> None:
        """Has state that was just born live where graphs that were captured ahead know it."""
        if self.born:
            self.born = adopt(self.born)
            admission.after = admission.state.snapshot(admission.room)

    def _first_call(self, call: Call) -> Any:
        """The first call after a capture ahead, eager: it gives birth to state that the graph needs."""
        with busy(), self.backend.on_stream(self.maker.stream):
            result = self.fn(*call.args, **call.kwargs)
        self.born = adopt(self.born)
        self.ledger.note("captured ahead: the first call ran eagerly, since state is born in it")
        return result

    def _give_up_ahead(self, error: CaptureError) -> bool:
        self.ledger.refused(error)
        if self.options.on_violation != "eager":
            raise error
        self.ledger.warn_once(FallbackWarning(f"{self.ledger.name} can't be captured ahead: {error}"), error.rule)
        return False

    # ---- replaying ----

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
        self.graphs.move_to_end(key)
        if isinstance(captured, AutogradCaptured):
            self.graphs.arm(captured, call.leaves)
            return captured.call(call.leaves)
        self._look_at_results(captured)
        if captured.lending is not None and captured.lending.pinned:
            return self._capture_anew(key, captured, call)
        if captured.shadows:
            return self._shadow(key, captured, call)
        if self.options.inputs == "alias":
            _check_own(captured, call)
        self._order()
        return self._answer(captured, call)

    def _answer(self, captured: Captured, call: Call) -> Any:
        """Replays; from now on the fast path does, unless results are still lent as copies."""
        if captured.lending is None or not captured.lending.learning:
            self.graphs.arm(captured, call.leaves)
        return captured.hand_out(captured.run(call.leaves))

    def _shadow(self, key: Any, captured: Captured, call: Call) -> Any:
        """One of the first real calls, compared with eager."""
        maker = self.maker
        assert maker.state is not None
        self.ledger.counts["shadowed"] += 1
        self._order()
        try:
            with busy():
                results = shadow(self.fn, captured, call, maker.state, self.backend, maker.stream, maker.reader.where)
        except CaptureError as error:
            if self.options.on_violation != "warn":
                self.graphs.drop(key)
                self.refused[key] = error
                raise
            captured.shadows = 0
            captured.report.proofs.append(Proof("fresh inputs", "failed", error.reason))
            self.ledger.warn(GuardWarning(str(error)))
            results = captured.run(call.leaves)
        if not captured.shadows and captured.lending is None:
            self.graphs.arm(captured, call.leaves)
        return captured.hand_out(results)

    def _order(self) -> None:
        """The current stream waits for the last replay's."""
        assert self.graphs.shared is not None
        self.graphs.shared.in_order()

    # ---- results that are kept ----

    def _look_at_results(self, captured: Captured) -> None:
        """Whether the caller keeps results, told from copies or, once those are over, from what is held now."""
        if captured.lending is None:
            return
        if captured.lending.learning:
            if captured.lending.kept():
                captured.copy_outputs()
                self.ledger.copies()
        elif captured.is_held_anew():
            self.kept(captured, (), {})

    def kept(self, captured: Captured, args: Any, kwargs: Any) -> Any:
        """A result is held where none was before. It gets memory of its own, and the next ones are copies: for good,
        or until it is clear that the caller lets go of them here too.
        """
        assert captured.lending is not None
        most, views = captured.holders()
        known = captured.lending.again()
        captured.lending.pinned = views > 0
        if not views:
            captured.part_with_outputs()
        if most > 1 or not known:
            captured.outputs_mode = "clone"
            captured.lending = captured.lending if views else None
            self.ledger.kept()
        self.graphs.disarm(captured)
        return MISS  # the slow path goes on when the fast one has given its turn back

    def _capture_anew(self, key: Any, captured: Captured, call: Call) -> Any:
        """A view of a result holds the graph's output memory: that graph goes, another one is made for this call."""
        mode, taught = captured.outputs_mode, captured.lending.taught if captured.lending else 1
        known = {id(other) for other in self.graphs.values() if other is not captured}
        self.graphs.drop(key)
        self.ledger.note("captured again: a view of a result was held when the next call came")
        result = self._admit(self.key(call), call)
        for other in self.graphs.values():
            if id(other) not in known and isinstance(other, Captured) and other.lending is not None:
                other.lending.taught = taught
                if mode == "clone":
                    other.copy_outputs()
        return result

    # ---- failing ----

    def _failed(self, key: Any, admission: Admission, error: CaptureError) -> Any:
        """A graph could not be made: S0 and the error, or S1 and the result of the real call."""
        error = self._explained(admission, error)
        if self.options.on_violation != "eager":
            if admission.ran:
                admission.undo()
            raise error
        self.refused[key] = error.without_frames()
        if not admission.ran:
            raise error
        self.ledger.refused(error)
        self.ledger.eager(error)
        admission.after.restore()
        return admission.result

    def _explained(self, admission: Admission, error: CaptureError) -> CaptureError:
        """The error after a dry run of the call; its own failure must not hide the first one."""
        if not admission.ran or error.cause is None:
            return error
        try:
            with busy(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                admission.after.restore()
                args, kwargs = unflatten_call(admission.call.spec.tree, admission.private(admission.call.leaves))
                generators = admission.state.generators
                return explained(error, self.fn, args, kwargs, generators, self.backend.device_type == "cpu")
        except Exception:
            return error
        except BaseException:
            admission.undo()
            raise

    def _violated(self, key: Any, captured: Held, error: CaptureError, call: Call) -> Any:
        """What was promised at capture no longer holds."""
        choice = self.options.on_violation
        if choice == "recapture":
            self.ledger.warn(GuardWarning(f"{error.code} {error.rule}: {error.reason}; captured again"))
            self.graphs.drop(key)
            return self._admit(self.key(call), call)
        if choice == "warn":
            self.ledger.warn(GuardWarning(str(error)))
            captured.watch = self._watch_now(captured)
            if isinstance(captured, AutogradCaptured):
                self.graphs.arm(captured, call.leaves)
                return captured.call(call.leaves)
            return self._answer(captured, call)
        raise error

    def _watch_now(self, captured: Held) -> Watch:
        assert self.maker.state is not None
        return watch_of(self.maker.state, self.options.watch, frozenset(), captured.entry == "some")

    def _give_up(self, error: CaptureError) -> Any:
        """Raises, or has the call run eagerly when that was asked for."""
        self.ledger.refused(error)
        if self.options.on_violation != "eager":
            raise error
        self.ledger.eager(error)
        return EAGER

    # ---- looking and letting go ----

    def memory(self) -> dict[str, int]:
        """Bytes in input buffers, in static results, and in the pools of all graphs as the allocator sees them."""
        outputs = sum(
            out.untyped_storage().nbytes()
            for captured in self.graphs.values()
            for out in captured.outputs
            if isinstance(out, torch.Tensor)
        )
        pools = {id(c.pool): c.pool for c in self.graphs.values() if c.pool is not None}
        held = 0 if self.backend.unavailable() else sum(map(self.backend.pool_bytes, pools.values()))
        return {"inputs": sum(c.static.nbytes for c in self.graphs.values()), "outputs": outputs, "pool": held}

    def forget(self, reason: str) -> None:
        """Drops every graph and what was found; the next call starts from the beginning."""
        with CAPTURES, self.turn:
            for key in list(self.graphs):
                self.graphs.drop(key)
            self.refused.clear()
            self.born.clear()
            self.maker.forget()
            self.ledger.note(f"invalidated: {reason}")


def _check_own(captured: Captured, call: Call) -> None:
    for i in captured.static.unique:
        if call.leaves[i] is not captured.static.leaves[i]:
            raise SignatureError(
                f"argument `{captured.spec.names[i]}` is not the guard's own buffer, as inputs='alias' promises",
                cure="Fill the tensors of `.input_buffers()` and pass those.",
            )
