"""The graphs of one guard: found by key, dropped by age, each with its fast path, and the pool that they share."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from graphlint.runtime import autograd
from graphlint.runtime.admit import Admission
from graphlint.runtime.autograd import AutogradCaptured
from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.fastpath import build_hot
from graphlint.runtime.hotpath import MISS
from graphlint.runtime.options import Options
from graphlint.runtime.replay import Captured, Shared
from graphlint.runtime.watch import Fact

HOT_GRAPHS = 4
Held = Captured | AutogradCaptured
FastPath = Callable[[Any, Any], Any]


def miss(args: Any, kwargs: Any) -> Any:
    """The fast path of a guard without graphs."""
    return MISS


class Graphs(OrderedDict[Any, Held]):
    """Key -> graph, the one used last at the end.

    Args:
        options, backend: those of the guard.
        line_up: told the fast paths that a call should try, the likeliest first, whenever they change.
        kept: called by a fast path whose last result is held where none was before.

    Attributes:
        shared: what the fast paths share; set before the first graph is armed.
        evicted, lost: graphs dropped for age, and how often all dropped ones had been replayed.
    """

    def __init__(
        self,
        options: Options,
        backend: GraphBackend,
        line_up: Callable[[tuple[FastPath, ...]], None],
        kept: Callable[[Captured, Any, Any], Any],
    ) -> None:
        super().__init__()
        self.options = options
        self.backend = backend
        self.kept = kept
        self.shared: Shared | None = None
        self.evicted = 0
        self.lost = 0
        self.pool: Any = None
        self._pool_users = 0
        self._tell = line_up
        self._hot: list[FastPath] = []

    # ---- coming and going ----

    def add(self, key: Any, captured: Held, leaves: list[Any]) -> None:
        """Files a graph; while there are too many, the one that was not used for longest goes."""
        self[key] = captured
        while len(self) > self.options.max_graphs:
            self.drop(next(iter(self)))
            self.evicted += 1
        if not captured.shadows and (isinstance(captured, AutogradCaptured) or captured.lending is None):
            self.arm(captured, leaves)

    def drop(self, key: Any) -> None:
        """Destroys a graph once the device is done with it; gradients in its memory move to memory of their own."""
        captured = self.pop(key)
        self.lost += captured.replays[0]
        self.disarm(captured)
        if captured.device is not None and not self.backend.unavailable():
            self.backend.synchronize(captured.device)
        if isinstance(captured, Captured) and captured.entry != "some":
            for param, grad in captured.grads:
                if param.grad is grad:
                    param.grad = grad.clone()
        self.release(captured)

    def release(self, captured: Held) -> None:
        """Destroys a graph that was never filed, or no longer is."""
        captured.release()
        if captured.pool is not None and captured.pool is self.pool:
            self._pool_users -= 1

    def sister_grads(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The gradients that a graph of this guard adds to."""
        sisters = (c for c in self.values() if isinstance(c, Captured) and c.entry == "some")
        return next((list(c.grads) for c in sisters), [])

    def dirty(self) -> None:
        """Has the next replay of every graph look at all its facts."""
        for captured in self.values():
            captured.watch.dirty[0] = True

    # ---- memory ----

    def pool_for(self, admission: Admission) -> Any:
        """One pool for all graphs of the guard, so that they use the same scratch memory.

        A graph whose gradients live on in its pool after a replay gets one of its own: another graph's scratch could
        lie there.
        """
        if self.options.pool is not None:
            return self.options.pool
        if self.options.mode == "step" and any(grad is not None for _, grad in admission._grads(admission.after)):
            return self.own_pool(admission)
        if self._pool_users == 0:
            self.pool = self.backend.new_pool(admission.state.device)  # a pool dies with its last graph
        return self.pool

    def own_pool(self, admission: Admission) -> Any:
        """A pool for one graph alone."""
        return self.options.pool or self.backend.new_pool(admission.state.device)

    def took(self, captured: Held, pool: Any) -> None:
        """Notes that a graph was captured into a pool."""
        captured.pool = pool
        self._pool_users += pool is self.pool

    # ---- fast paths ----

    def arm(self, captured: Held, leaves: list[Any]) -> None:
        """Makes the fast path of a graph and puts it in front."""
        assert self.shared is not None
        self.disarm(captured)  # its old fast path must not count as a holder of results
        for other in self.values():  # they differ in a flag that the fast path looks at only in turn
            if other is not captured and other.hot is not None and _alike(other, captured):
                self.disarm(other)
        broken = functools.partial(self._broken, captured)
        user = self.options.buckets if callable(self.options.buckets) else None
        if isinstance(captured, AutogradCaptured):
            captured.hot = autograd.build_hot(captured, leaves, self.backend, broken, self.route, user)
        else:
            captured.hot = build_hot(
                captured, leaves, self.shared, self.backend, broken, self.kept, self.route,
                (user, captured.user_key) if user is not None else None, self.options.inputs == "alias",
            )  # fmt: skip
        others = [c.hot for c in reversed(self.values()) if c.hot is not None and c is not captured]
        self._line_up([captured.hot, *others])

    def disarm(self, captured: Held) -> None:
        """Sends calls of a graph to the slow path until it is armed again."""
        self._line_up([hot for hot in self._hot if hot is not captured.hot])
        captured.hot = None

    def route(self, length: int) -> FastPath | None:
        """The fast path of the bucket that holds a length."""
        for captured in self.values():
            plan = captured.static.plan
            if plan is not None and captured.hot is not None and length <= plan.sizes[-1]:
                if captured.static.size == plan.choose(length):
                    return captured.hot
        return None

    def _broken(self, captured: Held, fact: Fact | None, args: Any, kwargs: Any) -> Any:
        """A fact fails or a state was loaded: the slow path looks at everything before the next replay."""
        self.disarm(captured)
        return MISS

    def _line_up(self, hot: list[FastPath]) -> None:
        self._hot = hot[:HOT_GRAPHS]
        self._tell(tuple(self._hot))


def _alike(a: Held, b: Held) -> bool:
    """Whether one fast path can't tell the calls of the other from its own."""
    return a.spec == b.spec and a.entry == b.entry and a.user_key == b.user_key
