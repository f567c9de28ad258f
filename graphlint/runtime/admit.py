"""From a call without a graph to a captured, proved one: warm up, capture, settle, verify. Each step leaves the world
as one eager call.

    S0 --watched call, undone--> S0 --the caller's real call--> S1 --warm-up, capture, verification, all undone--> S1

If anything fails, either the caller gets the error and the world is S0 again, as if nothing had been tried, or (when
eager was asked for) the caller gets the real call's result and the world is S1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphlint.runtime.backend import CaptureFailed, CaptureRequest, GraphBackend
from graphlint.runtime.buckets import Unpad
from graphlint.runtime.calls import Call
from graphlint.runtime.compare import Tolerance
from graphlint.runtime.errors import Where, error_of
from graphlint.runtime.found import Slot
from graphlint.runtime.inputs import StaticInputs
from graphlint.runtime.options import Options
from graphlint.runtime.refusals import (
    failure_of,
    refuse_exchange,
    refuse_live_attributes,
    refuse_lost_gradient,
    refuse_recurrence,
    refuse_watched,
)
from graphlint.runtime.replay import Captured
from graphlint.runtime.report import GraphReport
from graphlint.runtime.results import check_result
from graphlint.runtime.spec import Spec, Tree, flatten, unflatten_call
from graphlint.runtime.state import Snapshot, State
from graphlint.runtime.verify import Trial, private, verify
from graphlint.runtime.warmup import Watched, repeat, tensor_lr, watch_call
from graphlint.runtime.watch import watch_of

DEFAULT_STEPS = 3


@dataclass
class Admission:
    """What it takes to make graphs for one call; `result` is what the caller gets.

    `entry` is how gradients stand when the call begins (see Captured), `deferred` that the next call will tell.
    """

    fn: Callable[..., Any]
    call: Call
    options: Options
    state: State
    backend: GraphBackend
    stream: Any
    where: Where | None
    notes: list[str]
    warmup: int
    before: Snapshot = field(init=False)
    after: Snapshot = field(init=False)
    watched: Watched = field(default_factory=Watched)
    result: Any = None
    outputs: list[Any] = field(default_factory=list)
    entry: str = "any"
    changing: frozenset[str] = frozenset()
    host_changes: list[str] = field(default_factory=list)
    tree: Tree | None = None  # of the captured result
    bound: list[tuple[Slot, torch.Tensor]] = field(default_factory=list)  # places that the graph fills anew
    ran: bool = False
    canonical: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # gradients of a sister graph

    @property
    def room(self) -> int:
        """Bytes that snapshots may count on."""
        return self.backend.free_bytes(self.state.device)

    @property
    def unwatched(self) -> frozenset[str]:
        """Places that the call itself changes: on the host, or by binding another tensor."""
        return self.changing | {slot.label for slot, _ in self.bound}

    def real_call(self) -> None:
        """Watches the call without a trace, then runs it once for the caller. What the call itself raises goes to
        the caller.
        """
        call = self.call
        self.before = self.state.snapshot(self.room)
        mine = {leaf.untyped_storage().data_ptr() for leaf in call.leaves if isinstance(leaf, torch.Tensor)}
        self.watched = watch_call(
            lambda: self.fn(*call.args, **call.kwargs), mine, self.state, self.backend, self.stream, self.room
        )
        if self.watched.failed:
            self.notes.append(
                f"the watched call failed ({self.watched.failed}); the graph was made without what it shows"
            )
        elif self.options.mode != "step":
            self.state.copied = frozenset(self.watched.writes)
        self._find_hidden()
        refuse_watched(self)
        if self.options.tensor_lr and self.options.mode == "step":
            for label in tensor_lr(self.state, self.watched):
                self.notes.append(f"`{label}` is a device tensor now, so that schedulers reach the graph")
        with self.backend.on_stream(self.stream):
            self.result = self.fn(*call.args, **call.kwargs)
        self.ran = True
        changes = self.before.host_changes()
        self.changing = frozenset(change.label for change in changes)
        optimizers = tuple(self.state.found.optimizers)
        told = [change for change in changes if not optimizers or not change.label.startswith(optimizers)]
        self.host_changes = [f"{change.label}: {change.before!r} -> {change.after!r}" for change in told]
        self.after = self.state.snapshot(self.room)
        self.outputs, _, names = flatten(self.result)
        refuse_lost_gradient(self)
        if self.options.mode == "autograd":
            refuse_live_attributes(self)
        check_result(self.outputs, names, self._known(), self.where)

    def _find_hidden(self) -> None:
        """Tensors that gather gradients and that discovery did not reach are state all the same."""
        known = {id(tensor) for _, tensor in self.state.found.parameters()} | {id(leaf) for leaf in self.call.leaves}
        hidden = [t for t in self.watched.reads if t.requires_grad and t.is_leaf and id(t) not in known]
        if not hidden:
            return
        outside = {t.untyped_storage().data_ptr() for t in self.watched.reads}
        for tensor in hidden:
            if tensor.grad is not None and tensor.grad.untyped_storage().data_ptr() not in outside:
                tensor.grad = None  # born in the watched call
        self.state.found.hidden += hidden
        self.before = self.state.snapshot(self.room)

    def _known(self) -> set[int]:
        """Objects that the caller has anyway: arguments and state."""
        owners = [owner for _, owner in self.state.found.owners()]
        return {id(value) for value in (*self.call.leaves, *owners, *self.state.found.containers.values())}

    def undo(self) -> None:
        """Back to S0, as if nothing had been tried."""
        self.watched.undo()
        self.before.restore()

    def written_arguments(self) -> list[int]:
        """Leaves that the call changes in place."""
        spec, leaves = self.call.spec, self.call.leaves
        return [
            i
            for i in spec.tensor_indices
            if spec.aliases[i] == i and leaves[i].untyped_storage().data_ptr() in self.watched.writes
        ]

    def private(self, leaves: list[Any]) -> list[Any]:
        """The same call on copies of what it would change."""
        return private(leaves, self.call.spec, self.written_arguments())

    def decide_entry(self, deferred: bool) -> bool:
        """How gradients must stand at entry. False when only the next call can tell (see `Captured.entry`)."""
        self.entry = "any"
        had = any(grad is not None for _, grad in self._grads(self.before))
        got = [(param, grad) for param, grad in self._grads(self.after) if grad is not None]
        if self.options.mode != "step" or not got or self._grads_untouched(got):
            repeat(self._static_call(), self.warmup - 1, self.after, self.backend, self.stream)
            return True
        last = repeat(self._static_call(), max(1, self.warmup - 1), self.after, self.backend, self.stream)
        params = [param for _, param in self.state.found.parameters()]
        now = {id(param): grad for param, grad in zip(params, last, strict=True)}
        if all(now.get(id(param)) is not grad for param, grad in got):
            return True
        self.entry = "some" if had else "none"
        return self.entry == "some" or deferred

    def _grads(self, snapshot: Snapshot) -> list[tuple[Any, Any]]:
        return snapshot._parameters

    def _grads_untouched(self, got: list[tuple[Any, Any]]) -> bool:
        held = {id(grad) for _, grad in self._grads(self.before)}
        return not self.watched.failed and all(
            id(grad) in held and grad.untyped_storage().data_ptr() not in self.watched.writes for _, grad in got
        )

    def _static_call(self) -> Callable[[], Any]:
        """The call on buffers of its own, for warm-up."""
        leaves = private(self.call.leaves, self.call.spec, list(self.call.spec.tensor_indices))
        leaves = [
            leaves[self.call.spec.aliases[i]] if i in self.call.spec.tensor_indices else x for i, x in enumerate(leaves)
        ]
        for leaf, own in zip(leaves, self.call.leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and own.requires_grad:
                leaf.requires_grad_(True)
        args, kwargs = unflatten_call(self.call.spec.tree, leaves)
        return lambda: self.fn(*args, **kwargs)

    def clear_entry(self) -> None:
        """Gradients as the call finds them."""
        if self.entry == "none":
            for _, param in self.state.found.parameters():
                param.grad = None

    def capture(self, size: int, pool: Any) -> Captured:
        """Captures the call (at bucket `size`, if it has buckets). Raises CaptureError; the process is sane either
        way.
        """
        spec = self.call.spec_at(size)
        static = StaticInputs(spec, self.call.leaves, self.call.plan, size, self.options.mode == "autograd")
        static.load(self.leaves_for(size))
        self.after.restore()
        self.clear_entry()
        if self.call.plan:
            self._warm(static)
        outputs: Any = None
        try:
            graph, outputs = self.backend.capture(lambda: self._body(static), self._request(pool))
        except CaptureFailed as failed:
            raise failure_of(self, failed) from failed.first
        leaves, tree, _ = flatten(outputs)
        del outputs
        leaves = [_same_or(leaf, static) for leaf in leaves]
        grads = self.settle()
        written = self.written_arguments()
        report = GraphReport(_describe(spec), graph.node_counts(), input_bytes=static.nbytes)
        report.copied = [spec.names[i] for i in static.copied]
        watch = watch_of(self.state, self.options.watch, self.unwatched, self.entry == "some")
        report.watched = watch.promise
        captured = Captured(
            spec, graph, static, leaves, tree, self.entry, grads, written, watch,
            list(self.state.found.modules.values()), report, self.options.outputs,
            keep=self._outside(), bound=self.bound,
        )  # fmt: skip
        captured.unpad = self._unpad(leaves, size)
        captured.tolerance = self.tolerance
        return captured

    @property
    def tolerance(self) -> Tolerance:
        """How close replays must come: bitwise where deterministic algorithms are asked for and nothing is padded."""
        exact = torch.are_deterministic_algorithms_enabled() and self.call.plan is None
        return Tolerance(exact, self.watched.rounding)

    def leaves_for(self, size: int) -> list[Any]:
        """The call's leaves, cut where they are longer than a bucket."""
        plan = self.call.plan
        if plan is None or plan.length(self.call.leaves) <= size:
            return self.call.leaves
        return plan.shorten(self.call.leaves, size)

    def _warm(self, static: StaticInputs) -> None:
        """A bucket is another shape: it gets a warm-up of its own."""
        args, kwargs = static.call()
        for _ in range(max(1, self.warmup - 1)):
            with self.backend.on_stream(self.stream):
                self.fn(*args, **kwargs)
            self.after.restore()
            self.clear_entry()

    def _body(self, static: StaticInputs) -> Any:
        args, kwargs = static.call()
        if self.entry == "none" and self.canonical:
            self._begin_at_zero()
        if torch.is_autocast_enabled(self.backend.device_type):
            torch.clear_autocast_cache()  # a weight cast before the capture would be frozen ...
        try:
            return self.fn(*args, **kwargs)
        finally:
            if torch.is_autocast_enabled(self.backend.device_type):
                torch.clear_autocast_cache()  # ... and one cast inside must not leave it

    def _begin_at_zero(self) -> None:
        """A call that finds no gradients writes them where the graph that adds to them looks for them."""
        for param, grad in self.canonical:
            param.grad = grad
        torch._foreach_zero_([grad for _, grad in self.canonical])

    def _request(self, pool: Any) -> CaptureRequest:
        own = self.backend.generators(self.state.device)
        extra = tuple(g for g in self.state.generators if all(g is not o for o in own) and self._is_here(g.device))
        mode = self.options.capture_error_mode
        return CaptureRequest(self.state.device, self.stream, pool, mode, extra, True, self._other_streams())

    def _other_streams(self) -> tuple[int, ...]:
        """Streams that the watched call worked on beside the one it was started on."""
        return tuple(self.watched.streams)[1:]

    def _is_here(self, device: torch.device) -> bool:
        """A generator made for `cuda` has no device index and means the current one."""
        return device.type == self.state.device.type and device.index in (None, self.state.device.index)

    def settle(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sets the world to S1, but keeps what the graph bound anew (gradients, attributes) bound to the graph's
        memory. Gives the gradients that the graph writes; `bound` then tells the other places.
        """
        old = {slot.label: tensor for slot, tensor in self.after.bindings}
        moved = [
            (slot, new) for slot in self.state.slots()
            if isinstance(new := slot.get(), torch.Tensor) and new is not old.get(slot.label)
        ]  # fmt: skip
        self.after.restore()
        self.bound = []
        for slot, new in moved:
            if slot.kind != "hyperparameter":
                self._bind(slot, new, old.get(slot.label))
        if self.options.mode != "step":
            return []
        fresh = {id(new) for slot, new in moved if slot.kind == "gradient"}
        params = [p for _, p in self.state.found.parameters() if p.grad is not None]
        return [(p, p.grad) for p in params if p.grad is not None and (id(p.grad) in fresh or self.entry == "some")]

    def _bind(self, slot: Slot, new: torch.Tensor, was: Any) -> None:
        """Has one place hold the tensor that the graph writes, with the value it has at S1."""
        if isinstance(was, torch.Tensor) and same_view(was, new):  # of a parameter, say: it is there already
            self.bound.append((slot, was))
            return
        if slot.kind != "gradient":
            refuse_recurrence(self, slot.label)
            refuse_exchange(self, slot.label, new)
        bound = new.detach() if new.requires_grad and slot.kind != "parameter" else new
        if isinstance(was, torch.Tensor) and was.shape == new.shape:
            with torch.inference_mode(False), torch.no_grad():
                bound.copy_(was)
            slot.set(bound)
        if slot.kind in ("tensor", "buffer"):
            self.bound.append((slot, bound))

    def _outside(self) -> list[torch.Tensor]:
        """Tensors outside the call that the graph reads: held, so that their memory is not given to others."""
        mine = {leaf.untyped_storage().data_ptr() for leaf in self.call.leaves if isinstance(leaf, torch.Tensor)}
        mine |= {g.untyped_storage().data_ptr() for _, g in self.before._parameters if g is not None}
        return [t for t in self.watched.reads if t.untyped_storage().data_ptr() not in mine]

    def _unpad(self, outputs: list[Any], size: int) -> Unpad:
        """Which dimensions of the outputs at bucket `size` follow the length."""
        plan = self.call.plan
        if plan is None:
            return Unpad()
        if self.options.unpad is not None:
            return Unpad({i: (dim,) for i, dim in self.options.unpad.items()})
        length = plan.length(self.call.leaves)
        if length < size:
            return Unpad.compare(self.outputs, length, outputs, size)
        if size == 1:
            return Unpad()
        args, kwargs = unflatten_call(self.call.spec.tree, plan.shorten(self.private(self.call.leaves), size - 1))
        base = self.state.snapshot(self.room)
        with self.backend.on_stream(self.stream):
            short = flatten(self.fn(*args, **kwargs))[0]
        base.restore()
        return Unpad.compare(short, size - 1, outputs, size)

    def prove(self, captured: Captured) -> None:
        """Verifies the graph; afterwards the world is S1."""
        self.tree = captured.tree
        steps = self.options.verify
        if steps == "off":
            captured.report.proofs.append(_skipped())
            return
        base = self.state.snapshot(self.room)
        count = DEFAULT_STEPS if steps == "first" else int(steps)
        trial = Trial(
            captured, self._eager_leaves, self.state, base, self.backend, self.watched,
            self.private(self.leaves_for(captured.static.size)),
            self.call.spec,
            self.room, captured.tolerance, self.where, captured.report.proofs, self.host_changes,
        )  # fmt: skip
        trial.prepare = self.clear_entry
        verify(trial, count, deep=steps != "first")

    def _eager_leaves(self, leaves: list[Any]) -> list[Any]:
        """One eager call; raises StaleScalarError when its result is nested otherwise than the captured one."""
        args, kwargs = unflatten_call(self.call.spec.tree, leaves)
        with self.backend.on_stream(self.stream):
            outputs, tree, _ = flatten(self.fn(*args, **kwargs))
        if self.tree is not None and tree != self.tree:
            raise error_of("frozen-scalar")(
                "the result of another call is nested otherwise: Python takes another way than at capture",
                rule="frozen-scalar",
                stage="verify",
                where=self.where,
            )
        return outputs


def same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors show the same memory the same way."""
    alike = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return alike and bool(a.data_ptr() == b.data_ptr())


def _same_or(leaf: Any, static: StaticInputs) -> Any:
    """An output that is one of the buffers stays that very object, so that the caller gets his own argument back."""
    if isinstance(leaf, torch.Tensor):
        for i in static.unique:
            own = static.leaves[i]
            if leaf.numel() and same_view(leaf, own):
                return own
        return leaf.detach()
    return leaf


def _skipped() -> Any:
    from graphlint.runtime.report import Proof

    return Proof("verification", "skipped", 'verify="off"')


def _describe(spec: Spec) -> str:
    return ", ".join(f"{name}: {leaf}" for name, leaf in zip(spec.names, spec.leaves, strict=True)) or "no arguments"
