"""Mode "autograd": a forward graph and a backward graph behind one autograd node.

torch's own `make_graphed_callables` hands every parameter through the node and returns the graph's own gradient
memory, which autograd may adopt as `p.grad`: the second micro-batch then overwrites the first. Here the node has one
input per differentiable argument and one anchor; the parameters' gradients are added to `p.grad` by a grouped call,
from memory of the graph into memory of the parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from graphlint.runtime.admit import Admission, _describe
from graphlint.runtime.backend import CaptureFailed, Graph, GraphBackend
from graphlint.runtime.compare import Values, copies, difference, noise
from graphlint.runtime.errors import TwoForwardsError, error_of
from graphlint.runtime.hotpath import (
    MISS,
    Source,
    tensor_check,
    write_context,
    write_plain,
    write_structure,
    write_training,
    write_watch,
)
from graphlint.runtime.inputs import StaticInputs
from graphlint.runtime.replay import Shared
from graphlint.runtime.report import GraphReport, Proof
from graphlint.runtime.spec import Spec, TensorSpec, Tree, flatten, unflatten
from graphlint.runtime.verify import vary
from graphlint.runtime.watch import Watch, watch_of


@dataclass
class AutogradCaptured:
    """A forward and a backward graph over the same activations.

    `turn` counts forwards: a backward whose forward is no longer the last one has lost its activations and says so.
    """

    spec: Spec
    forward: Graph
    backward: Graph | None
    static: StaticInputs
    outputs: list[Any]
    tree: Tree
    live: list[int]  # outputs that carry gradients
    grad_outputs: list[torch.Tensor]
    wanted: list[int]  # arguments that want gradients
    grad_inputs: list[torch.Tensor | None]
    params: list[torch.nn.Parameter]
    grad_params: list[torch.Tensor]
    flat: dict[torch.dtype, torch.Tensor]
    hooked: list[torch.nn.Parameter]
    grad_hooked: list[torch.Tensor]
    watch: Watch
    roots: list[torch.nn.Module]
    report: GraphReport
    shared: Shared
    outputs_mode: str
    keep: list[Any]
    entry: str = "any"
    shadows: int = 0
    user_key: Any = None
    pool: Any = None
    device: torch.device | None = None
    turn: int = 0
    spent: bool = False
    hot: Callable[[Any, Any], Any] | None = None
    source: str = ""
    replays: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        device = self.static.leaves[self.static.unique[0]].device if self.static.unique else self.params[0].device
        with torch.inference_mode(False):
            self.anchor = torch.empty(0, device=device, requires_grad=True)

    def call(self, leaves: list[Any]) -> Any:
        """One forward: loads the call, replays, and gives the result with autograd attached."""
        if self.backward is None:
            self.launch(leaves)
            tensors = [self.outputs[i] for i in self.live]
        else:
            extra = [leaves[i] for i in self.wanted]
            node: tuple[torch.Tensor, ...] = _Node.apply(self, leaves, self.anchor, *extra, *self.hooked)
            tensors = list(node)
        results = list(self.outputs)
        for i, tensor in zip(self.live, tensors, strict=True):
            results[i] = tensor
        return unflatten(self.tree, [self._own(i, out) for i, out in enumerate(results)])

    def _own(self, i: int, out: Any) -> Any:
        """Outputs without gradient are copied too, unless the memory of the graph was asked for."""
        if (
            self.outputs_mode == "clone"
            and isinstance(out, torch.Tensor)
            and (i not in self.live or self.backward is None)
        ):
            return out.clone()
        return out

    def launch(self, leaves: list[Any]) -> None:
        """Copies and replays the forward graph."""
        self.shared.in_order()  # before the copy: the last replay may still read the inputs
        self.static.load(leaves)
        self.forward.replay()
        self.replays[0] += 1
        self.turn += 1
        self.spent = False

    def pull(self, turn: int, grads: tuple[Any, ...]) -> None:
        """Replays the backward graph for the forward of that turn."""
        if turn != self.turn:
            raise TwoForwardsError(
                "another forward ran before this backward and overwrote its activations", stage="backward"
            )
        if self.spent:
            raise TwoForwardsError(
                "this backward has run already; the graph keeps activations for one", stage="backward"
            )
        self.spent = True
        for static, grad in zip(self.grad_outputs, grads, strict=True):
            if grad is None:
                static.zero_()
            else:
                static.copy_(grad)
        assert self.backward is not None
        self.backward.replay()

    def accumulate(self) -> None:
        """Adds the parameters' gradients to `p.grad`; where there is none, it gets memory of its own."""
        if not self.params:
            return
        held = [param.grad for param in self.params]
        missing = [i for i, grad in enumerate(held) if grad is None]
        if len(missing) == len(held):
            self._assign_all()
            return
        for i in missing:
            self.params[i].grad = self.grad_params[i].clone()
        there = [i for i, grad in enumerate(held) if grad is not None]
        torch._foreach_add_([held[i] for i in there], [self.grad_params[i] for i in there])

    def _assign_all(self) -> None:
        """All gradients at once: one copy per dtype, cut into views."""
        fresh: dict[torch.dtype, list[torch.Tensor]] = {}
        for dtype, flat in self.flat.items():
            mine = [grad for grad in self.grad_params if grad.dtype == dtype]
            fresh[dtype] = list(reversed(torch._C._nn.unflatten_dense_tensors(flat.clone(), mine)))
        for param, grad in zip(self.params, self.grad_params, strict=True):
            param.grad = fresh[grad.dtype].pop()

    def release(self) -> None:
        """Destroys both graphs."""
        self.hot = None
        self.forward.reset()
        if self.backward is not None:
            self.backward.reset()
        for held in (self.outputs, self.grad_outputs, self.grad_inputs, self.grad_params, self.grad_hooked, self.keep):
            held.clear()
        self.flat.clear()


class _Node(torch.autograd.Function):
    """The one node that autograd sees."""

    @staticmethod
    def forward(
        ctx: Any, captured: AutogradCaptured, leaves: list[Any], anchor: torch.Tensor, *wanted: torch.Tensor
    ) -> Any:
        with captured.shared.turn:
            captured.launch(leaves)
            ctx.captured, ctx.turn = captured, captured.turn
            ctx.set_materialize_grads(False)
            live = [captured.outputs[i] for i in captured.live]
            return tuple(o.clone() if captured.outputs_mode == "clone" else o.detach() for o in live)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        captured: AutogradCaptured = ctx.captured
        with captured.shared.turn, torch.no_grad():
            captured.pull(ctx.turn, grads)
            if torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
                captured.accumulate()  # not under torch.autograd.grad(loss, inputs), which must leave p.grad alone
            needed = ctx.needs_input_grad[3:]
            fresh = [*captured.grad_inputs, *captured.grad_hooked]
            out = [g.clone() if g is not None and need else None for g, need in zip(fresh, needed, strict=True)]
        return (None, None, None, *out)


def capture_autograd(admission: Admission, pool: Any, shared: Shared) -> AutogradCaptured:
    """Captures forward and backward of a call. Raises CaptureError; the process is sane either way."""
    spec = admission.call.spec
    static = StaticInputs(spec, admission.call.leaves, None, 0, admission.call.spec.context.grad)
    static.load(admission.call.leaves)
    admission.after.restore()
    _warm_backward(admission, static)
    try:
        forward, raw = admission.backend.capture(lambda: admission._body(static), admission._request(pool))
    except CaptureFailed as failed:
        raise admission._translated(failed) from failed.first
    leaves, tree, _ = flatten(raw)
    live = [i for i, out in enumerate(leaves) if isinstance(out, torch.Tensor) and out.requires_grad]
    parts = _Parts.of(admission, static, [leaves[i] for i in live])
    backward: Graph | None = None
    if live:
        try:
            backward, grads = admission.backend.capture(parts.gradients, admission._request(pool))
        except CaptureFailed as failed:
            forward.reset()
            raise admission._translated(failed) from failed.first
        parts.take(*grads)
    admission.after.restore()
    outputs = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if not live:
        live = [i for i, out in enumerate(outputs) if isinstance(out, torch.Tensor)]
    report = GraphReport(_describe(spec), forward.node_counts(), input_bytes=static.nbytes)
    report.copied = [spec.names[i] for i in static.copied]
    watch = watch_of(admission.state, admission.options.watch, admission.changing, False)
    report.watched = watch.promise
    mode = admission.options.outputs
    return AutogradCaptured(
        spec, forward, backward, static, outputs, tree, live, parts.grad_outputs, parts.wanted, parts.grad_inputs,
        parts.params, parts.grad_params, parts.flat, parts.hooked, parts.grad_hooked, watch,
        list(admission.state.found.modules.values()), report, shared, "alias" if mode == "alias" else "clone",
        admission._outside(),
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
    for _ in range(admission.options.warmup):
        with admission.backend.on_stream(admission.stream):
            leaves = flatten(admission.fn(*args, **kwargs))[0]
            live = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if live:
                parts = _Parts.of(admission, static, live)
                parts.gradients()
        admission.after.restore()


def build_hot(
    captured: AutogradCaptured, leaves: list[Any], backend: GraphBackend, broken: Callable[[Any, Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """The generated check in front of `captured.call`."""
    out = Source()
    spec, static = captured.spec, captured.static
    out.constants.update(MISS=MISS, busy=captured.shared.busy, capturing=backend.capturing_now, run=captured.call)
    out.add("if busy[0] or capturing(): return MISS")
    names = write_structure(out, spec)
    write_plain(out, spec, names, static.leaves)
    write_context(out, spec, backend.device_type, checked=False)
    write_training(out, captured.roots)
    for i in spec.tensor_indices:
        if spec.aliases[i] != i:
            out.add(f"if {names[i]} is not {names[spec.aliases[i]]}: return MISS")
    if static.unique:
        specs = [leaf for i in static.unique if isinstance(leaf := spec.leaves[i], TensorSpec)]
        out.constants["check"] = tensor_check([leaves[i] for i in static.unique], specs, {})
        out.add(f"if not check({', '.join(names[i] for i in static.unique)}): return MISS")
    write_watch(out, captured.watch, broken)
    out.add(f"return run([{', '.join(names)}])")
    function = out.build()
    captured.source = function.__doc__ or ""
    return function


def prove_autograd(admission: Admission, captured: AutogradCaptured, steps: int) -> None:
    """Results, gradients and state of replays against eager, on inputs that change; raises ReplayMismatchError."""
    admission.tree = captured.tree
    base = admission.state.snapshot(admission.room)
    noises: dict[str, float] = {}
    bitwise = True
    try:
        for step in range(1, steps + 1):
            leaves, _ = vary(admission.call.leaves, admission.call.spec, step)
            if step == 1:
                runs = [_eager_side(admission, base, leaves, captured) for _ in range(2)]
                noises = {k: v for k, v in noise(*runs).items() if v}
            want = _eager_side(admission, base, leaves, captured)
            have = _graph_side(admission, base, leaves, captured)
            first, same = difference(want, have, noises, True)
            bitwise &= same
            if first is not None:
                raise error_of("replay-mismatch")(
                    f"at step {step} {first}", rule="replay-mismatch", stage="verify", where=admission.where
                )
        how = "bitwise" if bitwise else "within eager's own noise"
        captured.report.proofs.append(
            Proof("replay against eager", "proved", f"{steps} forward and backward equal, {how}")
        )
    finally:
        base.restore()
        captured.turn += 1  # nobody's backward may use these activations


def _eager_side(admission: Admission, base: Any, leaves: list[Any], captured: AutogradCaptured) -> Values:
    base.restore()
    mine = [_leaf_copy(leaf, own) for leaf, own in zip(leaves, admission.call.leaves, strict=True)]
    outputs = admission._eager_leaves(mine)
    values: Values = {f"output[{i}]": o for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)}
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
    captured.launch(leaves)
    values: Values = {f"output[{i}]": o for i, o in enumerate(captured.outputs) if isinstance(o, torch.Tensor)}
    if captured.backward is not None:
        with torch.no_grad():
            captured.pull(captured.turn, tuple(torch.ones_like(captured.outputs[i]) for i in captured.live))
        grads = [*captured.grad_inputs, *captured.grad_params, *captured.grad_hooked]
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
