"""Makes the graphs of a guard: what is found once, and for each new call the phases of `admit.py`, one graph per
bucket, the largest first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphlint.runtime import discover
from graphlint.runtime.admit import Admission
from graphlint.runtime.autograd_capture import capture_autograd, prove_autograd
from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.calls import Call, Reader
from graphlint.runtime.errors import CaptureError, GuardWarning, NotWorthwhile
from graphlint.runtime.graphs import Graphs, Held
from graphlint.runtime.ledger import Ledger
from graphlint.runtime.lending import Lending, fresh_outputs, shares
from graphlint.runtime.options import Options
from graphlint.runtime.phases import BUSY
from graphlint.runtime.replay import Captured, Shared
from graphlint.runtime.report import Proof
from graphlint.runtime.shadow import SHADOW_CALLS
from graphlint.runtime.state import State
from graphlint.runtime.turn import Turn
from graphlint.runtime.watch import hook_loads

COPIES = 3  # of each result may be alive while it is learned whether they are kept


class Maker:
    """The workshop of one guard.

    Attributes:
        reader: reads calls.
        state: what the function can reach; None until its first call.
        stream: the side stream of warm-up and capture; its own is given back when the guard is reset or gone.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        options: Options,
        declared: Mapping[str, Any],
        backend: GraphBackend,
        graphs: Graphs,
        ledger: Ledger,
        turn: Turn,
    ) -> None:
        self.fn = fn
        self.options = options
        self.backend = backend
        self.reader = Reader(fn, options, backend)
        self.state: State | None = None
        self.stream: Any = options.stream
        self._declared = dict(declared)
        self._graphs = graphs
        self._ledger = ledger
        self._turn = turn
        self._deferred: set[Any] = set()
        self._lent: Any = None
        self._handles: list[Any] = []

    def found(self, call: Call) -> State:
        """The state within reach, found once; modules and optimizers among the arguments are added."""
        if self.state is not None:
            discover.add_arguments(self.state.found, call.leaves, call.spec.names)
            self.state.add_generators(self.state.found.generators)
        else:
            found = discover.discover(self.fn, self._declared)
            discover.add_arguments(found, call.leaves, call.spec.names)
            device = self.reader.device(call, found)
            self.state = State(found, device, self.backend.generators(device))
            self._handles = hook_loads(found, self._graphs.dirty)
        return self.state

    def admission(self, call: Call) -> Admission:
        """The phases of a call, not begun. Raises CaptureError for what can't be captured at all."""
        state = self.found(call)
        self.reader.refuse_wrapped(state.found)
        if self.stream is None:
            self.stream = self.backend.new_stream(state.device)
            self._lent = weakref.finalize(self, self.backend.give_back, self.stream)
            self._lent.atexit = False
        if self._graphs.shared is None:
            stream_id = self.backend.stream_id(state.device)
            after = functools.partial(self.backend.after_stream, state.device)
            self._graphs.shared = Shared(self._turn, BUSY, [stream_id()], stream_id, after)
        admission = Admission(
            self.fn, call, self.options, state, self.backend, self.stream, self.reader.where, self._ledger.notes,
            self.reader.warmup(state.found),
        )  # fmt: skip
        admission.canonical = self._graphs.sister_grads()
        return admission

    def make(self, key: Any, admission: Admission, ahead: bool = False) -> bool:
        """Captures and verifies every graph that the call needs: one, or one per bucket, the largest first. False
        when only the next call can tell how its gradients stand, and it is not captured `ahead`.
        """
        if not admission.decide_entry(deferred=ahead or key in self._deferred):
            self._deferred.add(key)
            self._ledger.note("captured at the second call: whether gradients are kept between calls shows only then")
            admission.after.restore()
            return False
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
        if made and self._graphs.evicted >= 2 * self.options.max_graphs:
            self._ledger.thrashing(self.options.max_graphs)
        return True

    def _sizes(self, call: Call) -> Sequence[int]:
        return sorted(call.plan.sizes, reverse=True) if call.plan else (0,)

    def _sized_key(self, key: Any, admission: Admission, size: int) -> Any:
        _, training, extra, _ = key
        return (admission.call.spec_at(size), training, extra, admission.entry)

    def _capture(self, key: Any, admission: Admission, size: int) -> Held:
        held = (
            self._forward_and_backward(key, admission, size)
            if self.options.mode == "autograd"
            else self._one(key, admission, size)
        )
        held.device = admission.state.device
        self._ledger.counts["captures"] += 1
        return held

    def _forward_and_backward(self, key: Any, admission: Admission, size: int) -> Held:
        steps = self.options.verify
        assert self._graphs.shared is not None
        pool = self._graphs.own_pool(admission)
        both = capture_autograd(admission, size, pool, self._graphs.shared)
        both.pool = pool
        both.user_key = key[2]
        try:
            if steps != "off":
                prove_autograd(admission, both, 3 if steps == "first" else int(steps))
        except BaseException as error:
            if not self._goes_on(both, error):
                both.release()
                raise
        return both

    def _one(self, key: Any, admission: Admission, size: int) -> Held:
        pool = self._graphs.pool_for(admission)
        captured = admission.capture(size, pool)
        self._graphs.took(captured, pool)
        captured.user_key = key[2]
        try:
            admission.prove(captured)
        except BaseException as error:
            if not self._goes_on(captured, error):
                self._graphs.release(captured)
                raise
        if self.options.verify != "off":
            captured.shadows = SHADOW_CALLS
        _begin_lending(captured, admission)
        return captured

    def _goes_on(self, held: Held, error: BaseException) -> bool:
        """Whether a graph that failed its verification is used all the same, as was asked for."""
        if self.options.on_violation != "warn" or not isinstance(error, CaptureError):
            return False
        held.report.proofs.append(Proof("verification", "failed", error.reason))
        self._ledger.warn(GuardWarning(str(error)))
        return True

    def tell(self, admission: Admission) -> None:
        """What the caller should know after a capture."""
        for change in admission.host_changes:
            self._ledger.note(f"CG511 unrepeated-effect: `{change}` on the host happens at capture only, not on replay")
        for captured in self._graphs.values():
            report = captured.report
            if self.backend.times and report.replay_us and report.eager_us < 1.05 * report.replay_us:
                told = f"a replay takes {report.replay_us:.0f} us, eager {report.eager_us:.0f} us"
                self._ledger.warn(NotWorthwhile(f"{self._ledger.name}: {told}"))
                break

    def give_back(self) -> None:
        """Gives the stream back, if it is the guard's own."""
        if self._lent is not None:
            self._lent()

    def forget(self) -> None:
        """Drops what was found; it is looked for again at the next call."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._deferred.clear()
        self.state = None


def _begin_lending(captured: Captured, admission: Admission) -> None:
    """The first results are copies, until it is known whether the caller keeps them."""
    if captured.outputs_mode != "alias":
        return
    state = [tensor for _, tensor in admission.after.bindings if isinstance(tensor, torch.Tensor)]
    fresh = fresh_outputs(captured.outputs, [*captured.keep, *state])
    buffers = [captured.static.leaves[i] for i in captured.static.unique]
    if any(shares(captured.outputs[i], buffer) for i in captured.made for buffer in buffers):
        captured.outputs_mode = "clone"  # a view of an argument: the next call's copy comes before any look
        return
    lent = [i for i in fresh if i in captured.made]
    if COPIES * sum(captured.outputs[i].nbytes for i in lent) > admission.room:
        admission.notes.append(
            "results are too large for copies: each is the graph's memory, valid until the next call"
        )
        return
    captured.lending = Lending(lent)
