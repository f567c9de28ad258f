"""Capture and replay: what opens a region, what closes it, what a replay is, and callables that capture by
themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow import liveness, names
from graphlint.flow.state import MAX_ENTRY_STEPS, MAX_REGION_STEPS
from graphlint.flow.values import (
    NONE,
    UNKNOWN,
    Bound,
    Closure,
    External,
    Holder,
    Host,
    Instance,
    Items,
    Mapping,
    Partial,
    Storage,
    Symbol,
    Tensor,
    Value,
    Wrapped,
    alternatives,
)

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine

GRAPH_CLASSES = frozenset(
    {
        f"torch.{backend}.{name}"
        for backend in names.BACKENDS
        for name in ("CUDAGraph", "NPUGraph", "XPUGraph", "MUSAGraph", "HPUGraph", "Graph")
    }
)
CONTEXTS = frozenset(
    {f"torch.{backend}.graph" for backend in names.BACKENDS} | {"warp.ScopedCapture", "wp.ScopedCapture"}
)
CUDAGRAPH_MODES = ("reduce-overhead", "max-autotune")


def is_graph_class(name: str) -> bool:
    return name in GRAPH_CLASSES


def begin(
    machine: Machine,
    kind: str,
    api: str,
    at: ir.Span,
    graph: Holder | None,
    words: dict[str, Value] | None = None,
    backward: bool = False,
) -> ev.Capture:
    """Opens a capture here and now."""
    words = words or {}
    mode = words.get("capture_error_mode")
    stream = words.get("stream")
    capture = ev.Capture(kind, api, at, machine.frame, graph, machine.tick())
    capture.mode = (
        mode.value if isinstance(mode, Host) and isinstance(mode.value, str) else ("global" if mode is None else "?")
    )
    capture.sure = not machine.doubt
    capture.doubt = machine.doubt
    capture.loop = machine.frame.loops > 0
    capture.backward = backward
    capture.autocast = next((clock for one, clock in machine.autocast if not _uncached(one)), 0)
    capture.outer = machine.capture
    if isinstance(stream, External):
        capture.stream = stream
    elif kind == "graph":
        capture.stream = External("torch.cuda.Stream", machine.site(at), machine.tick())
        capture.stream.facts["capture"] = True
    else:
        capture.stream = machine.streams[-1] if machine.streams else None
    pool = words.get("pool")
    if pool is not None:
        capture.tags.add("pool")
    capture.memory = (
        next((one for one in alternatives(pool) if isinstance(one, Holder)), None) if pool is not None else None
    )
    if isinstance(graph, External):
        capture.memory = graph.facts["pool"] = capture.memory or (
            External("pool", machine.site(at), machine.clock) if pool is None else None
        )
    stack: list[tuple[ev.Frame, ir.Span, int]] = [(machine.frame, at, _sure_loops(machine, machine.frame))]
    while (above := stack[-1][0].parent) is not None and (span := stack[-1][0].call_at) is not None:
        stack.append((above, span, _sure_loops(machine, above)))
    capture.stack = tuple(stack)
    if not machine.captures:
        machine.budget += MAX_ENTRY_STEPS if machine.whole else MAX_REGION_STEPS
    if machine.veils:
        capture.tags.add("veiled")
    if machine.whole and kind in ("graph", "manual", "graphed-callable"):
        capture.alive = liveness.graphs_alive(machine.frame)
    machine.captures.append(capture)
    machine.open.append(capture)
    if graph is not None:
        graphs = getattr(graph, "facts", None)
        if isinstance(graphs, dict):
            graphs.setdefault("captures", []).append(capture)
    if capture.stream is not None and kind == "graph":
        machine.streams.append(capture.stream)
        capture.tags.add("stream")
    return capture


def _sure_loops(machine: Machine, frame: ev.Frame) -> int:
    """The loops of a frame around this moment; none where a test inside the innermost decides in which rounds it comes
    here."""
    return frame.loops if machine.doubt <= frame.loop_doubt else 0


def _uncached(autocast: External) -> bool:
    words = [autocast.keywords.get("cache_enabled"), autocast.keywords.get("enabled"), *autocast.args[3:4]]
    return any(isinstance(one, Host) and one.value is False for one in words)


def end(machine: Machine, capture: ev.Capture, at: ir.Span) -> None:
    """Closes a capture; whatever it pushed goes too."""
    if capture in machine.open:
        while machine.open and machine.open[-1] is not capture:
            machine.open.pop()
        machine.open.pop()
    capture.end = machine.tick()
    if "stream" in capture.tags and machine.streams and machine.streams[-1] is capture.stream:
        machine.streams.pop()
    machine.happen(ev.EndEvent, at, capture)


def in_capture(machine: Machine, capture: ev.Capture, at: ir.Span, run: Callable[[], Any]) -> Any:
    """Runs something in an open capture and closes it."""
    try:
        return run()
    finally:
        end(machine, capture, at)


# --- context managers ------------------------------------------------------------------------------------------------


def is_context(name: str, declared: frozenset[str]) -> bool:
    return name in CONTEXTS or name in declared


def begin_context(machine: Machine, manager: External, at: ir.Span) -> ev.Capture:
    """`torch.cuda.graph(...)` is entered."""
    graph = (
        manager.args[0]
        if manager.args
        else next(
            (
                manager.keywords[key]
                for key in ("cuda_graph", "xpu_graph", "npu_graph", "graph")
                if key in manager.keywords
            ),
            None,
        )
    )
    words = dict(manager.keywords)
    for index, name in ((1, "pool"), (2, "stream"), (3, "capture_error_mode")):
        if len(manager.args) > index:
            words.setdefault(name, manager.args[index])
    holders = [one for one in alternatives(graph) if isinstance(one, Holder)] if graph is not None else []
    kind = "warp" if "ScopedCapture" in manager.name else "graph"
    capture = begin(machine, kind, manager.name, at, holders[0] if holders else None, words)
    if len(holders) > 1:
        capture.tags.add("one-of")  # which graph it is was not seen
    return capture


def replay(machine: Machine, graph: Value | None, at: ir.Span) -> None:
    holders = [one for one in alternatives(graph) if isinstance(one, Holder)] if graph is not None else []
    locals_: dict[int, dict[Any, Value]] = {}
    frame: ev.Frame | None = machine.frame
    while frame is not None:
        locals_.setdefault(id(frame.func), dict(frame.scope.slots))
        frame = frame.parent
    for one in holders[:3] or [None]:  # type: ignore[list-item]
        machine.happen(
            ev.ReplayEvent,
            at,
            one,
            machine.streams[-1] if machine.streams else None,
            locals_,
            len(holders) > 1,
            _held(machine, one),
        )


def _held(machine: Machine, graph: Holder | None) -> frozenset[Storage] | None:
    """What is alive, looked at once for each capture, when its function has returned."""
    captures = getattr(graph, "facts", {}).get("captures", ())
    if not captures or "looked" in captures[-1].tags or machine.open:
        return None
    frame: ev.Frame | None = machine.frame
    while frame is not None:
        if frame is captures[-1].frame:
            return None
        frame = frame.parent
    captures[-1].tags.add("looked")
    return liveness.tensors_alive(
        machine.frame,
        [one for key, one in machine.memo.items() if key[0] in ("class", "made") and isinstance(one, Holder)],
    )


def graph_method(machine: Machine, event: ev.CallEvent, graph: External | Instance, name: str) -> Value:
    """A method of a CUDAGraph."""
    if name == "capture_begin":
        words = dict(event.keywords)
        if event.args:
            words["pool"] = event.args[0]
        same = next((one for one in machine.open if one.at == event.at and one.frame.func is machine.frame.func), None)
        if same is not None:  # the same call on another graph that it may be
            same.tags.add("one-of")
            return NONE
        begin(machine, "manual", "torch.cuda.CUDAGraph.capture_begin", event.at, graph, words)
        return NONE
    if name == "capture_end":
        open_ = next((one for one in reversed(machine.open) if one.graph is graph), None)
        if open_ is None:
            open_ = next((one for one in reversed(machine.open) if one.kind == "manual"), None)
        if open_ is not None:
            end(machine, open_, event.at)
        return NONE
    if name == "replay":
        replay(machine, graph, event.at)
        return NONE
    if name == "pool" and isinstance(graph, External):
        own: Value | None = graph.facts.setdefault("pool", External("pool", machine.site(event.at), machine.clock))
        return own if own is not None else UNKNOWN
    return UNKNOWN


# --- callables that capture ------------------------------------------------------------------------------------------


@contextmanager
def side_stream(machine: Machine, at: ir.Span) -> Iterator[None]:
    """What runs in it runs on a stream of its own, as warm-ups do."""
    stream = External("torch.cuda.Stream", machine.site(at), machine.tick())
    machine.happen(ev.StreamEvent, at, stream, "enter")
    depth = len(machine.streams)
    machine.streams.append(stream)
    try:
        yield
    finally:
        del machine.streams[depth:]
        machine.happen(ev.StreamEvent, at, stream, "leave")


def graphed_callables(machine: Machine, event: ev.CallEvent, te: bool = False) -> Value:
    """`make_graphed_callables(callables, sample_args)`: forward and backward are captured at this call."""
    args, words, at = event.args, event.keywords, event.at
    target = args[0] if args else words.get("callables", words.get("modules", UNKNOWN))
    samples = args[1] if len(args) > 1 else words.get("sample_args", UNKNOWN)
    several = isinstance(target, Items) and target.exact
    targets = target.values if several and isinstance(target, Items) else [target]
    given = samples.values if several and isinstance(samples, Items) and samples.exact else [samples] * len(targets)
    kwargs = words.get("sample_kwargs")
    made: list[Value] = []
    named = (
        {str(key): value for key, value in kwargs.slots.items() if key != "*"} if isinstance(kwargs, Mapping) else {}
    )
    rounds = words.get("num_warmup_iters")
    if not (isinstance(rounds, Host) and rounds.value == 0):
        for one, sample in zip(
            targets, given, strict=False
        ):  # it warms up by itself: what is made on first use is there when the capture begins
            given_here = list(sample.values) if isinstance(sample, Items) and sample.exact else [sample]
            with side_stream(machine, at):
                machine.call(one, given_here, named, at)
                run_backward(machine, at)
    for one, sample in zip(targets, given, strict=False):
        capture = begin(
            machine,
            "graphed-callable",
            event.name,
            at,
            External("torch.cuda.CUDAGraph", machine.site(at), machine.tick()),
            {},
            backward=True,
        )
        capture.mode = "thread_local" if machine.target >= (2, 14) and "capture_error_mode" in words else "global"
        inputs = list(sample.values) if isinstance(sample, Items) and sample.exact else [sample]

        def run(one: Value = one, inputs: list[Value] = inputs) -> Value:
            result = machine.call(one, inputs, named, at)
            run_backward(machine, at)
            return result

        result = in_capture(machine, capture, at, run)
        made.append(Wrapped(one, "graphed", {"capture": capture, "result": result, "inputs": inputs}))
    if several:
        return machine.items("tuple", made, at)
    return made[0]


def call_graphed(machine: Machine, func: Wrapped, args: list[Value], at: ir.Span) -> Value:
    """A graphed callable runs: a replay whose results stand in the same memory each time."""
    capture = func.facts["capture"]
    machine.happen(ev.ReplayEvent, at, capture.graph, machine.streams[-1] if machine.streams else None)
    machine.happen(ev.CallEvent, at, "<graphed>.__call__", func, tuple(args), {}, UNKNOWN)
    return static_outputs(machine, func.facts.get("result", UNKNOWN), capture, at)


def static_outputs(machine: Machine, result: Value, capture: ev.Capture, at: ir.Span) -> Value:
    """The outputs of a callable that captures: the same storages at every call."""
    if isinstance(result, Tensor):
        result.storage.via = capture
        return replace(result, grad=True)
    if isinstance(result, Items):
        return machine.items(
            result.kind, [static_outputs(machine, one, capture, at) for one in result.values], at, result.exact
        )
    return result


def compiled(machine: Machine, event: ev.CallEvent) -> Value:
    """`torch.compile(f, ...)`, or `torch.compile(...)` to be applied to one."""
    target = event.args[0] if event.args else event.keywords.get("model")
    words = {key: value for key, value in event.keywords.items() if key != "model"}
    if target is None or (isinstance(target, Host) and target.kind == "none"):
        return Partial(Symbol("torch.compile"), (), words)
    facts: dict[str, Any] = {
        "keywords": words,
        "calls": 0,
        "at": event.at,
        "frame": event.frame,
        "graphs": uses_graphs(words),
    }
    made = Wrapped(target, "compile", facts)
    machine.compiled.append(made)
    return made


def uses_graphs(words: dict[str, Value]) -> bool:
    """Whether these options of `torch.compile` turn CUDA graphs on."""
    mode, backend, options = words.get("mode"), words.get("backend"), words.get("options")
    if isinstance(backend, Host) and backend.value == "cudagraphs":
        return True
    if isinstance(options, Mapping):
        flag = options.slots.get("triton.cudagraphs")
        if isinstance(flag, Host) and flag.known:
            return bool(flag.value)
    if isinstance(backend, Host) and isinstance(backend.value, str) and backend.value not in ("inductor", ""):
        return False
    return any(
        isinstance(one, Host) and one.value in CUDAGRAPH_MODES
        for one in (alternatives(mode) if mode is not None else ())
    )


def call_compiled(machine: Machine, func: Wrapped, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    """A compiled callable runs. With CUDA graphs it is a region of its own, whose outputs the next call overwrites."""
    func.facts["calls"] += 1
    event = machine.happen(ev.CallEvent, at, "<compiled>.__call__", func, tuple(args), keywords, UNKNOWN)
    event.keywords = {
        **keywords,
        "<first>": Host("bool", func.facts["calls"] == 1),
        "<grad>": Host("bool", bool(machine.grad_mode)),
    }
    if not func.facts["graphs"] or machine.open:
        result = machine.call(func.func, args, keywords, at)
        event.result = result
        return result
    known = func.facts.get("capture")
    if known is None:
        capture = begin(machine, "compile", "torch.compile", func.facts["at"], None, {}, backward=True)
        capture.frame = func.facts["frame"]
        func.facts["capture"] = capture

        def run() -> Value:
            result = machine.call(func.func, args, keywords, at)
            run_backward(machine, at)
            return result

        result = in_capture(machine, capture, at, run)
        func.facts["result"] = result
        known = capture
    else:
        result = func.facts.get("result", UNKNOWN)
    outputs = fresh_outputs(machine, func.facts.get("result", UNKNOWN), known, at, func.facts["calls"])
    event.result = outputs
    return outputs


def fresh_outputs(machine: Machine, result: Value, capture: ev.Capture, at: ir.Span, call: int) -> Value:
    """The outputs of one compiled call: a value of its own for each call, so that a later call can be seen to overwrite
    it."""
    if isinstance(result, Tensor):
        storage = Storage(machine.site(at), capture, machine.tick())
        storage.via = capture
        return replace(result, storage=storage, device=result.device)
    if isinstance(result, Items):
        return machine.items(
            result.kind, [fresh_outputs(machine, one, capture, at, call) for one in result.values], at, result.exact
        )
    return result


def run_backward(machine: Machine, at: ir.Span) -> None:
    """What Python code the backward pass runs: custom `Function.backward`s, tensor hooks, module backward hooks."""
    for key, grad in list(machine.gradients.slots.items()):
        if isinstance(grad, Host) and grad.kind == "none":  # dropped by zero_grad, and now there again
            machine.drop(machine.gradients, key)
    pending, machine.functions = machine.functions, []
    for cls in pending:
        found = cls.find("backward")
        if found is None:
            continue
        count = len([param for param in found[0].params if param.kind == "pos"]) - 1
        context = External("torch.autograd.function.FunctionCtx", machine.site(at), machine.tick())
        context.facts["saved"] = True
        gradients: list[Value] = [machine.tensor(at, "cuda", "float") for _ in range(max(count, 1))]
        machine.enter(machine.method_closure(*found), [context, *gradients], {}, at)
    for name, owner, hook in list(machine.hooks):
        if name in (
            "tensor",
            "register_full_backward_hook",
            "register_backward_hook",
            "register_post_accumulate_grad_hook",
        ):
            fresh: Value = machine.tensor(at, "cuda", "float")
            args = (
                [fresh]
                if name in ("tensor", "register_post_accumulate_grad_hook")
                else [owner, machine.items("tuple", [fresh], at), machine.items("tuple", [fresh], at)]
            )
            if isinstance(hook, (Closure, Bound, Partial)):
                machine.call(hook, args, {}, at)


__all__ = [
    "begin",
    "begin_context",
    "call_compiled",
    "call_graphed",
    "compiled",
    "end",
    "graph_method",
    "graphed_callables",
    "in_capture",
    "is_context",
    "is_graph_class",
    "replay",
    "run_backward",
    "uses_graphs",
]
