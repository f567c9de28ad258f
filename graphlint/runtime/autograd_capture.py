"""Makes and proves the two graphs of mode "autograd": warm-up of both directions, two captures over the same
activations, replays against eager with gradients and all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from graphlint.runtime.admit import Admission, _describe
from graphlint.runtime.autograd import AutogradCaptured
from graphlint.runtime.backend import CaptureFailed, Graph
from graphlint.runtime.compare import Before, Values, copies, difference, noise
from graphlint.runtime.errors import CaptureError, error_of
from graphlint.runtime.inputs import StaticInputs
from graphlint.runtime.refusals import failure_of
from graphlint.runtime.replay import Shared
from graphlint.runtime.report import GraphReport, Proof
from graphlint.runtime.spec import flatten
from graphlint.runtime.state import Snapshot, State
from graphlint.runtime.verify import private, state_before, vary
from graphlint.runtime.watch import watch_of


def capture_autograd(admission: Admission, size: int, pool: Any, shared: Shared) -> AutogradCaptured:
    """Captures forward and backward of a call (at bucket `size`, if it has buckets). Raises CaptureError; the process
    is sane either way.
    """
    call = admission.call
    spec = call.spec_at(size)
    static = StaticInputs(spec, call.leaves, call.plan, size, call.spec.context.grad)
    static.load(admission.leaves_for(size))
    admission.after.restore()
    _warm_backward(admission, static)
    try:
        forward, raw = admission.backend.capture(lambda: admission._body(static), admission._request(pool))
    except CaptureFailed as failed:
        raise failure_of(admission, failed) from failed.first
    leaves, tree, _ = flatten(raw)
    live = [i for i, out in enumerate(leaves) if isinstance(out, torch.Tensor) and out.requires_grad]
    parts = _Parts.of(admission, static, [leaves[i] for i in live])
    backward: Graph | None = None
    if live:
        try:
            backward, grads = admission.backend.capture(parts.gradients, admission._request(pool))
        except CaptureFailed as failed:
            forward.reset()
            raise failure_of(admission, failed) from failed.first
        parts.take(*grads)
    admission.settle()
    outputs = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if not live:
        live = [i for i, out in enumerate(outputs) if isinstance(out, torch.Tensor)]
    report = GraphReport(_describe(spec), forward.node_counts(), input_bytes=static.nbytes)
    report.copied = [spec.names[i] for i in static.copied]
    watch = watch_of(admission.state, admission.options.watch, admission.unwatched, False)
    report.watched = watch.promise
    mode = admission.options.outputs
    unpad = admission._unpad(outputs, size)
    return AutogradCaptured(
        spec, forward, backward, static, outputs, tree, live, parts.grad_outputs, parts.wanted, parts.grad_inputs,
        parts.params, parts.grad_params, parts.flat, parts.hooked, parts.grad_hooked, watch,
        list(admission.state.found.modules.values()), report, shared, "alias" if mode == "alias" else "clone",
        admission._outside(), admission.state.device, admission.written_arguments(), unpad, admission.bound,
    )  # fmt: skip


@dataclass
class _Parts:
    """What the backward graph is made of while it is captured."""

    outputs: list[torch.Tensor]
    grad_outputs: list[torch.Tensor]
    wanted: list[int]
    inputs: list[torch.Tensor]
    params: list[torch.nn.Parameter]
    hooked: list[torch.nn.Parameter]
    grad_inputs: list[torch.Tensor | None] = field(default_factory=list)
    grad_params: list[torch.Tensor] = field(default_factory=list)
    grad_hooked: list[torch.Tensor] = field(default_factory=list)
    flat: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, admission: Admission, static: StaticInputs, outputs: list[torch.Tensor]) -> _Parts:
        """Sorts what wants a gradient; parameters with hooks go through autograd itself, so that their hooks run."""
        wanted = [i for i in static.unique if static.leaves[i].requires_grad] if outputs else []
        params = [p for _, p in admission.state.found.parameters() if p.requires_grad]
        hooks = [p for p in params if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
        plain = [p for p in params if all(p is not h for h in hooks)]
        with torch.inference_mode(False):
            grads = [torch.ones_like(out.detach()) for out in outputs]
        return cls(outputs, grads, wanted, [static.leaves[i] for i in wanted], plain, hooks)

    def gradients(self) -> tuple[list[Any], dict[torch.dtype, torch.Tensor]]:
        """The body of the backward graph: gradients, and those of the parameters once more in one piece per dtype."""
        targets = [*self.inputs, *self.params, *self.hooked]
        if not targets:
            return [], {}
        with without_hooks(self.hooked):  # their hooks run when autograd gets the gradient, on every replay
            grads = list(torch.autograd.grad(self.outputs, targets, self.grad_outputs, allow_unused=True))
        mine = [g for g in grads[len(self.inputs) : len(self.inputs) + len(self.params)] if g is not None]
        flat = {}
        for dtype in {g.dtype for g in mine}:
            flat[dtype] = torch._C._nn.flatten_dense_tensors([g.contiguous() for g in mine if g.dtype == dtype])
        return grads, flat

    def take(self, grads: list[Any], flat: dict[torch.dtype, torch.Tensor]) -> None:
        """Keeps what the capture gave; parameters that the outputs don't depend on drop out."""
        n, m = len(self.inputs), len(self.params)
        self.grad_inputs = grads[:n]
        pairs = [(p, g) for p, g in zip(self.params, grads[n : n + m], strict=True) if g is not None]
        self.params = [p for p, _ in pairs]
        self.flat = flat
        views = {
            d: list(reversed(torch._C._nn.unflatten_dense_tensors(f, [g for _, g in pairs if g.dtype == d])))
            for d, f in flat.items()
        }
        self.grad_params = [views[g.dtype].pop() for _, g in pairs]
        hooked = [(p, g) for p, g in zip(self.hooked, grads[n + m :], strict=True) if g is not None]
        self.hooked, self.grad_hooked = [p for p, _ in hooked], [g for _, g in hooked]
        self.outputs = []


@contextlib.contextmanager
def without_hooks(params: list[torch.nn.Parameter]) -> Iterator[None]:
    """The gradient hooks of these parameters do not run inside."""
    saved = [(hooks, list(hooks.items())) for param in params if (hooks := param._backward_hooks)]
    for hooks, _ in saved:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in saved:
            hooks.update(items)


def _warm_backward(admission: Admission, static: StaticInputs) -> None:
    """Warm-up of both directions; it leaves gradients alone."""
    args, kwargs = static.call()
    for _ in range(admission.warmup):
        with admission.backend.on_stream(admission.stream):
            leaves = flatten(admission.fn(*args, **kwargs))[0]
            live = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if live:
                parts = _Parts.of(admission, static, live)
                parts.gradients()
        admission.after.restore()


def prove_autograd(admission: Admission, captured: AutogradCaptured, steps: int) -> None:
    """Results, gradients and state of replays against eager, on inputs that change; raises ReplayMismatchError."""
    admission.tree = captured.tree
    base = eager_state = graph_state = admission.state.snapshot(admission.room)
    noises: dict[str, float] = {}
    bitwise, padded = True, captured.static.plan is not None
    tolerance = admission.tolerance
    try:
        for step in range(1, steps + 1):
            leaves, _ = vary(admission.leaves_for(captured.static.size), admission.call.spec, step)
            if step == 1:
                runs = [_eager_side(admission, base, leaves, captured) for _ in range(2)]
                noises = {k: v for k, v in noise(*runs).items() if v}
            began = functools.partial(_before, eager_state, admission.state)
            want, want_random, eager_state = _step(_eager_side, admission, eager_state, leaves, captured)
            have, have_random, graph_state = _step(_graph_side, admission, graph_state, leaves, captured)
            first, same = difference(want, have, noises, tolerance, functools.partial(began, want))
            bitwise &= same
            if first is not None:
                raise _mismatch(admission, f"at step {step} {first}", padded)
            if any(not torch.equal(a, b) for a, b in zip(want_random, have_random, strict=True)):
                reason = f"after step {step} the generators stand elsewhere than after eager"
                raise error_of("frozen-rng")(reason, rule="frozen-rng", stage="verify", where=admission.where)
        how = "bitwise" if bitwise else tolerance.words
        captured.report.proofs.append(
            Proof("replay against eager", "proved", f"{steps} forward and backward equal, {how}")
        )
    finally:
        base.restore()
        captured.turn += 1  # nobody's backward may use these activations


def _mismatch(admission: Admission, reason: str, padded: bool) -> CaptureError:
    """What most likely happened, beside where it showed."""
    rule = "padding-changes-result" if padded else "replay-mismatch"
    if admission.host_changes and not padded:
        rule = "frozen-scalar"
        reason += f"; on the host `{admission.host_changes[0]}` changes with each call and is frozen in the graph"
    return error_of(rule)(reason, rule=rule, stage="verify", where=admission.where)


def _step(
    side: Callable[..., Values], admission: Admission, start: Snapshot, leaves: list[Any], captured: AutogradCaptured
) -> tuple[Values, list[torch.Tensor], Snapshot]:
    """One step of one side: its values, the generators' states, and where it stands afterwards."""
    values = side(admission, start, leaves, captured)
    random = [gen.get_state() for gen in admission.state.generators]
    return values, random, admission.state.snapshot(admission.room)


def _before(base: Any, state: State, values: Values) -> Before:
    """The state before, and gradients, which begin at nothing."""
    before = state_before(base, state)
    gradients = {label: "gradient" for label in values if label.startswith("gradient[")}
    return Before(before.values, before.kinds | gradients)


def _eager_side(admission: Admission, base: Any, leaves: list[Any], captured: AutogradCaptured) -> Values:
    base.restore()
    mine = private(leaves, admission.call.spec, captured.written)
    mine = [_leaf_copy(leaf, own) for leaf, own in zip(mine, admission.call.leaves, strict=True)]
    outputs = admission._eager_leaves(mine)
    values: Values = {f"output[{i}]": o for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)}
    values |= {f"argument {captured.spec.names[i]}": mine[i] for i in captured.written}
    targets = [mine[i] for i in captured.wanted] + captured.params + captured.hooked
    live = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if live and targets:
        with admission.backend.on_stream(admission.stream), without_hooks(captured.hooked):
            grads = torch.autograd.grad(live, targets, [torch.ones_like(o) for o in live], allow_unused=True)
        values.update({f"gradient[{i}]": g for i, g in enumerate(grads) if g is not None})
    return _with_state(admission, copies(values))


def _graph_side(admission: Admission, base: Any, leaves: list[Any], captured: AutogradCaptured) -> Values:
    base.restore()
    captured.static.poison()
    mine = private(leaves, admission.call.spec, captured.written)
    captured.launch(mine)
    outputs = [captured.cut(i, out) for i, out in enumerate(captured.outputs)]
    values: Values = {f"output[{i}]": o for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)}
    values |= {f"argument {captured.spec.names[i]}": mine[i] for i in captured.written}
    if captured.backward is not None:
        with torch.no_grad():
            captured.pull(captured.turn, tuple(torch.ones_like(outputs[i]) for i in captured.live))
        inputs = zip(captured.wanted, captured.grad_inputs, strict=True)
        grads = [None if g is None else captured.cut_input(i, g) for i, g in inputs]
        grads += [*captured.grad_params, *captured.grad_hooked]
        values.update({f"gradient[{i}]": g for i, g in enumerate(grads) if g is not None})
    return _with_state(admission, copies(values))


def _with_state(admission: Admission, values: Values) -> Values:
    tensors = admission.state.tensors()
    values.update(
        copies({k: v for k, v in tensors.items() if v.device == admission.state.device and not k.endswith(".grad")})
    )
    return values


def _leaf_copy(leaf: Any, own: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and own.requires_grad:
        return leaf.detach().clone().requires_grad_(True)
    return leaf
