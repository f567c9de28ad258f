"""A captured call, ready to be replayed the slow way: any call of its spec. The fast way is `fastpath.py`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphlint.runtime.backend import Graph
from graphlint.runtime.buckets import Unpad
from graphlint.runtime.compare import Tolerance
from graphlint.runtime.found import Slot
from graphlint.runtime.inputs import StaticInputs
from graphlint.runtime.lending import Holders, Lending, Place, autograd_uses, caller, storage_uses
from graphlint.runtime.report import GraphReport
from graphlint.runtime.spec import Spec, Tree, unflatten
from graphlint.runtime.turn import Turn
from graphlint.runtime.watch import Watch


@dataclass
class Shared:
    """What all graphs of one guard share: the turn, the last stream, and the switch that sends calls to the slow
    path.
    """

    turn: Turn
    busy: list[int]
    last_stream: list[int]
    stream_id: Callable[[], int]
    after_stream: Callable[[int], None]
    pointer: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)  # the last stream, as the driver wants it

    def __post_init__(self) -> None:
        self.pointer.value = self.last_stream[0]

    def follow(self, stream: int) -> None:
        """The current stream `stream` waits for the last replay, which ran on another one: it may still read the
        inputs.
        """
        self.after_stream(self.last_stream[0])
        self.last_stream[0] = stream
        self.pointer.value = stream

    def in_order(self) -> None:
        """The same, if the last replay did run on another stream."""
        here = self.stream_id()
        if here != self.last_stream[0]:
            self.follow(here)


@dataclass
class Captured:
    """One graph and everything around it.

    `entry` says how gradients must be when a call begins: "none", "some", or "any" where the call does not care.
    `grads` are the gradients that the graph writes; they are bound again after a replay where somebody dropped them.
    """

    spec: Spec
    graph: Graph
    static: StaticInputs
    outputs: list[Any]
    tree: Tree
    entry: str
    grads: list[tuple[torch.Tensor, torch.Tensor]]
    written: list[int]
    watch: Watch
    roots: list[torch.nn.Module]
    report: GraphReport
    outputs_mode: str | int = "alias"
    unpad: Unpad = field(default_factory=Unpad)
    keep: list[Any] = field(default_factory=list)
    bound: list[tuple[Slot, torch.Tensor]] = field(default_factory=list)  # attributes that the call binds anew
    lending: Lending | None = None
    tolerance: Tolerance = field(default_factory=lambda: Tolerance(exact=True))
    shadows: int = 0
    user_key: Any = None
    pool: Any = None
    device: torch.device | None = None
    hot: Callable[[Any, Any], Any] | None = None
    source: str = ""
    replays: list[int] = field(default_factory=lambda: [0])
    ring: list[list[Any]] = field(default_factory=list)
    _last: list[Any] = field(default_factory=list)  # the views that were handed out last

    def __post_init__(self) -> None:
        self.tensors = [i for i, out in enumerate(self.outputs) if isinstance(out, torch.Tensor)]
        buffers = {id(self.static.leaves[i]) for i in self.static.unique}
        self.made = [i for i in self.tensors if id(self.outputs[i]) not in buffers]  # not an argument handed back
        if isinstance(self.outputs_mode, int):
            with torch.inference_mode(False), torch.no_grad():
                self.ring = [
                    [torch.empty_like(self.outputs[i].detach()) for i in self.made] for _ in range(self.outputs_mode)
                ]

    def run(self, leaves: list[Any]) -> list[Any]:
        """Loads a call, replays, and gives the output leaves (static memory, cut to the call's length)."""
        self.static.load(leaves)
        self.launch(leaves)
        return self.results(leaves)

    def launch(self, leaves: list[Any]) -> None:
        """Replays and does what the graph can't: bind dropped gradients, write changed arguments back."""
        self.graph.replay()
        self.replays[0] += 1
        if self.grads and self.grads[0][0].grad is not self.grads[0][1]:
            self.bind_grads()
        bind(self.bound)
        if self.written:
            self.write_back(leaves)

    def bind_grads(self) -> None:
        """Puts the graph's gradients where eager would have put new ones."""
        for param, grad in self.grads:
            param.grad = grad

    def adopt_grads(self) -> None:
        """Takes over gradients that were bound elsewhere since: their values move into the tensors that the graph
        adds to.
        """
        with torch.no_grad():
            for param, grad in self.grads:
                if param.grad is not None and param.grad is not grad:
                    grad.copy_(param.grad)
                    param.grad = grad

    def write_back(self, leaves: list[Any]) -> None:
        """Arguments that the call changes in place are changed for the caller too."""
        with torch.no_grad():
            for i in self.written:
                leaves[i].copy_(self.static.leaves[i])

    def results(self, leaves: list[Any]) -> list[Any]:
        """The static outputs, unpadded; an output that is an argument is the caller's own tensor."""
        outputs = self.outputs
        if self.static.plan is not None and self.unpad.dims:
            outputs = self.cut(self.static.plan.length(leaves))
        return [self._own(out, leaves) for out in outputs]

    def cut(self, length: int) -> list[Any]:
        """Outputs without padding: views that nobody else has, so that those which are kept can be counted."""
        self._last = self.unpad.cut(self.outputs, length)
        return self._last

    def _own(self, out: Any, leaves: list[Any]) -> Any:
        for i in self.static.unique:
            if out is self.static.leaves[i]:
                return leaves[i]
        return out

    def hand_out(self, outputs: list[Any]) -> Any:
        """The result as the user gets it: the static memory itself, a copy, or a turn of the ring."""
        if self.outputs_mode == "alias":
            lend = self.lending is not None and self.lending.lessons > 0
            return unflatten(self.tree, self.lending.lend(outputs) if self.lending and lend else outputs)
        with torch.no_grad():
            if self.outputs_mode == "clone":
                return unflatten(self.tree, [o.clone() if i in self.made else o for i, o in enumerate(outputs)])
            turn = self.ring[self.replays[0] % len(self.ring)]
            cut = list(outputs)
            for target, i in zip(turn, self.made, strict=True):
                target.copy_(self.outputs[i])
                cut[i] = target
            if self.static.plan is not None and self.unpad.dims:
                cut = [
                    c if c is o or o.shape == c.shape else c[tuple(slice(0, n) for n in o.shape)]
                    for c, o in zip(cut, outputs, strict=True)
                ]
            return unflatten(self.tree, cut)

    def part_with_outputs(self) -> None:
        """Gives tensors that the caller kept memory of their own: a replay would overwrite them."""
        assert self.lending is not None
        with torch.inference_mode(False), torch.no_grad():
            for i in self.lending.fresh:
                theirs = self._last[i] if self._last else self.outputs[i]
                if theirs is self.outputs[i]:
                    self.outputs[i] = theirs.data  # a version of its own, for autograd may have saved theirs
                theirs.data = theirs.detach().clone()
        self._last = []
        self.lending.forget_holders()

    def copy_outputs(self) -> None:
        """From now on results are copies."""
        self.outputs_mode = "clone"
        self.lending = None

    def holders(self) -> tuple[int, int]:
        """How many names and views, beside the graph's own, hold one of the last results, and how many of those are
        views; the largest of each.
        """
        most = views = 0
        for i, base in self.lending.base.items() if self.lending else ():
            now = self.count(i)
            asleep = base.path if self.hot is None else 0  # names that the fast path would have
            most = max(most, now.names + now.views - base.names - base.views + asleep)
            views = max(views, now.views - base.views)
        return most, views

    def is_held_anew(self) -> bool:
        """Whether a result is held where the caller did not let go of one before."""
        most, _ = self.holders()
        if not most or self.lending is None:
            return False
        return most > self.lending.allowed or not self.lending.knows(Place.of(caller()))

    def count(self, i: int) -> Holders:
        """What holds output `i` now, the graph's own names and views included."""
        lent = self._last if self._last else self.outputs
        names = sys.getrefcount(lent[i]) + autograd_uses(lent[i])
        return Holders(names, storage_uses(self.outputs[i].untyped_storage()._cdata))

    def release(self) -> None:
        """Destroys the graph and drops its memory."""
        self.hot = None
        self.graph.reset()
        self.outputs.clear()
        self.ring.clear()
        self._last = []
        self.keep.clear()
        self.bound.clear()
        self.grads.clear()


def bind(bound: list[tuple[Slot, torch.Tensor]]) -> None:
    """Has each place hold the graph's tensor, as the call would have bound a new one."""
    for slot, tensor in bound:
        if slot.get() is not tensor:
            slot.set(tensor)
