"""Mode "autograd": a forward graph and a backward graph behind one autograd node.

torch's own `make_graphed_callables` hands every parameter through the node and returns the graph's own gradient
memory, which autograd may adopt as `p.grad`: the second micro-batch then overwrites the first. Here the node has one
input per differentiable argument and one anchor; the parameters' gradients are added to `p.grad` by a grouped call,
from memory of the graph into memory of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphlint.runtime.backend import Graph, GraphBackend
from graphlint.runtime.buckets import Unpad
from graphlint.runtime.errors import TwoForwardsError
from graphlint.runtime.found import Slot
from graphlint.runtime.hotpath import (
    MISS,
    Source,
    tensor_check,
    write_context,
    write_plain,
    write_route,
    write_structure,
    write_training,
    write_watch,
)
from graphlint.runtime.inputs import StaticInputs
from graphlint.runtime.replay import Shared, bind
from graphlint.runtime.report import GraphReport
from graphlint.runtime.spec import Spec, TensorSpec, Tree, unflatten
from graphlint.runtime.watch import Watch


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
    device: torch.device
    written: list[int] = field(default_factory=list)  # arguments that the forward changes in place
    unpad: Unpad = field(default_factory=Unpad)
    bound: list[tuple[Slot, torch.Tensor]] = field(default_factory=list)  # attributes that the forward binds anew
    entry: str = "any"
    shadows: int = 0
    user_key: Any = None
    pool: Any = None
    turn: int = 0
    length: int = 0  # of the last forward, where there are buckets
    spent: bool = False
    hot: Callable[[Any, Any], Any] | None = None
    source: str = ""
    replays: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        with torch.inference_mode(False):
            self.anchor = torch.empty(0, device=self.device, requires_grad=True)

    def call(self, leaves: list[Any]) -> Any:
        """One forward: loads the call, replays, and gives the result with autograd attached."""
        if self.backward is None:
            self.launch(leaves)
            tensors = [self.cut(i, self.outputs[i]) for i in self.live]
        else:
            extra = [leaves[i] for i in self.wanted]
            node: tuple[torch.Tensor, ...] = _Node.apply(self, leaves, self.anchor, *extra, *self.hooked)
            tensors = list(node)
        results = [self.cut(i, out) for i, out in enumerate(self.outputs)]
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

    def cut(self, i: int, out: Any) -> Any:
        """Output `i`, or its gradient, without padding."""
        for dim in self.unpad.dims.get(i, ()):
            out = out.narrow(dim, 0, self.length)
        return out

    def cut_input(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of argument `i` without padding."""
        plan = self.static.plan
        return grad if plan is None or i not in plan.dims else grad.narrow(plan.dims[i], 0, self.length)

    def launch(self, leaves: list[Any]) -> None:
        """Copies and replays the forward graph."""
        self.shared.in_order()  # before the copy: the last replay may still read the inputs
        self.static.load(leaves)
        self.forward.replay()
        self.replays[0] += 1
        self.turn += 1
        self.spent = False
        if self.static.plan is not None:
            self.length = self.static.plan.length(leaves)
        bind(self.bound)
        with torch.no_grad():
            for i in self.written:
                leaves[i].copy_(self.static.leaves[i])

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
        for i, static, grad in zip(self.live, self.grad_outputs, grads, strict=True):
            if grad is None or i in self.unpad.dims:
                static.zero_()  # padding gets no gradient
            if grad is not None:
                self.cut(i, static).copy_(grad)
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
        self.bound.clear()
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
            live = [captured.cut(i, captured.outputs[i]) for i in captured.live]
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
            inputs = zip(captured.wanted, captured.grad_inputs, strict=True)
            fresh = [None if g is None else captured.cut_input(i, g) for i, g in inputs] + [*captured.grad_hooked]
            out = [g.clone() if g is not None and need else None for g, need in zip(fresh, needed, strict=True)]
        return (None, None, None, *out)


def build_hot(
    captured: AutogradCaptured,
    leaves: list[Any],
    backend: GraphBackend,
    broken: Callable[[Any, Any, Any], Any],
    route: Callable[[int], Any],
    user_key: Callable[..., Any] | None = None,
) -> Callable[[Any, Any], Any]:
    """The generated check in front of `captured.call`; calls of another bucket go where `route` says, those for which
    `user_key` gives another value than at capture to another graph.
    """
    out = Source()
    spec, static = captured.spec, captured.static
    out.constants.update(MISS=MISS, busy=captured.shared.busy, capturing=backend.capturing_now, run=captured.call)
    out.add("if busy[0] or capturing(): return MISS")
    names = write_structure(out, spec)
    write_plain(out, spec, names, static.leaves)
    write_context(out, spec, backend.device_type, checked=False)
    write_training(out, captured.roots)
    if user_key is not None:
        out.constants["user_key"] = user_key
        out.add(f"if user_key(*args, **kwargs) != {out.constant(captured.user_key)}: return MISS")
    if static.plan is not None:
        write_route(out, static.plan, static.size, names, route)
    for i in spec.tensor_indices:
        if spec.aliases[i] != i:
            out.add(f"if {names[i]} is not {names[spec.aliases[i]]}: return MISS")
    if static.unique:
        free = static.plan.dims if static.plan else {}
        specs = [leaf for i in static.unique if isinstance(leaf := spec.leaves[i], TensorSpec)]
        dynamic = {at: free[i] for at, i in enumerate(static.unique) if i in free}
        out.constants["check"] = tensor_check([leaves[i] for i in static.unique], specs, dynamic)
        out.add(f"if not check({', '.join(names[i] for i in static.unique)}): return MISS")
    write_watch(out, captured.watch, broken)
    out.add(f"return run([{', '.join(names)}])")
    function = out.build()
    captured.source = function.__doc__ or ""
    return function
