"""Plays what makes graphs by itself: `torch.compile` with cudagraphs and `torch.cuda.make_graphed_callables`. Nothing
is compiled here."""

from __future__ import annotations

import functools
from typing import Any

import torch

from graphlint.runtime.dryrun.records import Event, Site
from graphlint.runtime.dryrun.session import Region, Session
from graphlint.runtime.dryrun.undo import gradients

_MANY_RECORDINGS = 9  # torch warns of as many sizes
_RECORDS = 2  # calls of a compiled function until it has recorded its graph


def play_compile(session: Session, model: Any = None, **kwargs: Any) -> Any:
    """Plays `torch.compile`: the function itself; a first call inside a region is noted, and outputs of a cudagraph
    mode go stale."""
    if model is None:
        return functools.partial(play_compile, session, **kwargs)
    options = kwargs.get("options") or {}
    graphs = (
        kwargs.get("mode") in ("reduce-overhead", "max-autotune")
        or options.get("triton.cudagraphs")
        or kwargs.get("backend") == "cudagraphs"
    )
    played = _Compiled(session, model, bool(graphs))

    @functools.wraps(model.forward if isinstance(model, torch.nn.Module) else model)
    def compiled(*args: Any, **inner: Any) -> Any:
        return played.call(args, inner)

    if isinstance(model, torch.nn.Module):
        compiled._orig_mod = model  # type: ignore[attr-defined]
    return compiled


class _Compiled:
    """A compiled function: the function itself, and what the calls of it would do to the graphs that it asks for."""

    def __init__(self, session: Session, model: Any, graphs: bool) -> None:
        self._session, self._model, self._graphs = session, model, graphs
        self._calls = 0
        self._outputs: list[int] = []
        self._recorded: set[tuple[Any, ...]] = set()

    def call(self, args: Any, kwargs: Any) -> Any:
        """One call by the user."""
        session = self._session
        if not self._calls:
            session.event("first-compiled-call", getattr(self._model, "__name__", type(self._model).__name__))
        if self._graphs:
            self._begin((args, kwargs))
        self._calls += 1
        mine = [tensor for tensor in _flat((args, kwargs)) if not hasattr(tensor, "_dynamo_static_input_type")]
        given = {session.roles.identity(tensor) for tensor in mine} if self._graphs else set()
        session.arguments |= given - set(self._outputs)  # those of the graph's own pool may be written
        try:
            result = self._model(*args, **kwargs)
        finally:
            session.arguments -= given
        if self._graphs:
            self._outputs = [session.roles.identity(tensor) for tensor in _flat(result)]
            for number in self._outputs:
                session.overwritten.pop(number, None)
        return result

    def _begin(self, given: Any) -> None:
        """The outputs of the call before go stale; sizes and addresses that are new are recorded."""
        session, site = self._session, self._session.site()
        session.overwritten.update((number, site) for number in self._outputs)
        if self._calls < _RECORDS and session.observer is not None:
            session.observer.records(site)
        weights = self._model.parameters() if isinstance(self._model, torch.nn.Module) else ()
        addresses = tuple(session.roles.identity(weight) for weight in weights)
        self._recorded.add((addresses, *(tuple(tensor.shape) for tensor in _flat(given))))
        if len(self._recorded) == _MANY_RECORDINGS:
            session.setup.events.append(
                Event("dynamic-recording", "the compiled function", site, str(_MANY_RECORDINGS))
            )


def make_graphed_callables(
    session: Session, callables: Any, sample_args: Any, num_warmup_iters: int = 3, **kwargs: Any
) -> Any:
    """Plays `torch.cuda.make_graphed_callables`: warms up, runs forward and backward as a region, and hands the
    callable back."""
    several = isinstance(callables, tuple)
    pairs = list(zip(callables if several else (callables,), sample_args if several else (sample_args,), strict=True))
    for function, args in pairs:
        _check(session, function)
        with session.silence():
            for _ in range(num_warmup_iters):
                _forward_backward(function, args)
        before, session.streams.current = session.streams.current, session.streams.new()
        session.open(Region("graphed-callable", session.site()))
        try:
            _forward_backward(function, args)
        finally:
            session.close()
            session.streams.current = before
    graphed = tuple(_Graphed(session, function).hand_out() for function, _ in pairs)
    return graphed if several else graphed[0]


def _check(session: Session, function: Any) -> None:
    """What torch refuses, and what it takes silently without gradients."""
    if isinstance(function, torch.nn.Module):
        if any(
            len(m._forward_hooks) or len(m._forward_pre_hooks) or len(m._backward_hooks) for m in function.modules()
        ):
            session.setup_event("graphed-hooks", "torch.cuda.make_graphed_callables")
    elif gradients({"callable": function}):
        session.setup_event("closed-over-parameters", "torch.cuda.make_graphed_callables")


class _Graphed:
    """A graphed callable: eager here, but it keeps count of forwards and of gradients that alias the graph's memory."""

    def __init__(self, session: Session, function: Any) -> None:
        self._session, self._function = session, function
        self._forward = function.forward if isinstance(function, torch.nn.Module) else function
        self._forwards = 0
        self._again: Site | None = None
        self._adopted = False

    def hand_out(self) -> Any:
        """The module itself with a watched forward, or a watched function, as torch does it."""
        if isinstance(self._function, torch.nn.Module):
            self._function.forward = self._call
            return self._function
        return functools.wraps(self._function)(self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module, training = self._function, torch.is_grad_enabled()
        if training and isinstance(module, torch.nn.Module):
            fresh = all(p.grad is None for p in module.parameters())
            if self._adopted and not fresh:
                self._session.setup_event("graphed-grads", "the graphed callable")
            self._adopted = fresh
        result = self._forward(*args, **kwargs)
        output = next((x for x in _flat(result) if x.requires_grad), None)
        if output is not None:
            self._forwards += 1
            self._again = self._session.site()
            output.register_hook(functools.partial(self._backward, self._forwards))
        return result

    def _backward(self, forward: int, gradient: torch.Tensor) -> None:
        """A backward whose forward was not the last one finds the activations of another."""
        if forward != self._forwards and self._again is not None:
            self._session.setup.events.append(Event("two-forwards", "the graphed callable", self._again))


def _forward_backward(function: Any, args: Any) -> None:
    """One forward and, where anything needs a gradient, one backward that leaves `.grad` alone."""
    outputs = [x for x in _flat(function(*args)) if x.requires_grad]
    wanted = [
        x
        for x in (*_flat(args), *(function.parameters() if isinstance(function, torch.nn.Module) else ()))
        if x.requires_grad
    ]
    if outputs and wanted:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(x) for x in outputs], allow_unused=True)


def _flat(tree: Any) -> list[torch.Tensor]:
    from graphlint.runtime.dryrun.modes import tensors

    return list(tensors(tree))
