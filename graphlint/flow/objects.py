"""Methods of objects from outside the project, and of what a project class inherits from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphlint import ir
from graphlint.flow import contexts, graphs, modules, names, stdlib, tensors
from graphlint.flow import events as ev
from graphlint.flow.values import (
    NONE,
    UNKNOWN,
    Bound,
    Closure,
    External,
    Host,
    Instance,
    Items,
    Unknown,
    Value,
    join,
    tensors_in,
)

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine


def run_callables(machine: Machine, event: ev.CallEvent) -> Value:
    """A function outside is handed one of the project's: it may well be run."""
    if not machine.open:
        return UNKNOWN
    result: Value = UNKNOWN
    for index, one in enumerate(event.args):
        if (
            isinstance(one, Closure)
            or (isinstance(one, Bound) and isinstance(one.func, Closure))
            or (index == 0 and isinstance(one, Instance) and one.cls.is_module)
        ):
            result = machine.call(one, list(event.args[index + 1 :]), {}, event.at)
    return result


def made(machine: Machine, event: ev.CallEvent) -> Value:
    """A constructor of a class outside the project."""
    made = External(event.name, machine.site(event.at), machine.tick())
    made.args, made.keywords = event.args, dict(event.keywords)
    made.made_in = machine.capture
    return made


def object_method(machine: Machine, event: ev.CallEvent, obj: External | Instance, name: str) -> Value:
    bases = [obj.name] if isinstance(obj, External) else obj.cls.outside()
    if name == "forward" and isinstance(obj, External) and modules.is_module_name(obj.name):
        return modules.forward(machine, event, obj)
    base = event.name.rpartition(".")[0]
    if name == "forward" and isinstance(obj, Instance) and is_layer(base):
        if base == "torch.nn.Sequential":
            return base_forward(machine, obj, base, list(event.args), event.keywords, event.at)
        return modules.forward(machine, event, as_base(obj, base))
    if name == "__init__" and isinstance(obj, Instance):
        init_base(machine, obj, list(event.args), event.keywords, event.at)
        return NONE
    if any(graphs.is_graph_class(base) for base in bases):
        return graphs.graph_method(machine, event, obj, name)
    if (
        any(base in graphs.CONTEXTS for base in bases)
        and isinstance(obj, (Instance, External))
        and name in ("__enter__", "__exit__")
    ):
        return _manual_context(machine, event, obj, name)
    if name == "__call__" and isinstance(obj, Instance) and (own := obj.cls.find("forward")) is not None:
        forward = Bound(obj, machine.method_closure(*own))
        return machine.call(forward, list(event.args), event.keywords, event.at)
    if any(base.startswith("torch.optim.") and "lr_scheduler" not in base for base in bases):
        return modules.optimizer_method(machine, event, obj, name)
    if modules.is_module(obj):
        return modules.method(machine, event, obj, name)
    if isinstance(obj, Instance) and name in ("_replace", "_asdict") and obj.cls.is_a("typing.NamedTuple"):
        return (
            stdlib.changed(machine, obj, event.keywords, event.at)
            if name == "_replace"
            else stdlib.as_mapping(machine, obj, event.at)
        )
    if isinstance(obj, Instance) and name == "start" and obj.cls.is_a("threading.Thread", "threading.Timer"):
        return _start_thread(machine, event, obj)
    if isinstance(obj, External):
        return _external_method(machine, event, obj, name)
    return UNKNOWN


def is_layer(base: str) -> bool:
    """Whether it is a module of torch with a forward of its own."""
    return modules.is_module_name(base) and base not in (
        "torch.nn.Module",
        "torch.nn.ModuleList",
        "torch.nn.ModuleDict",
    )


def base_forward(
    machine: Machine, obj: Instance, base: str, args: list[Value], keywords: dict[str, Value], at: ir.Span
) -> Value:
    """The forward that an object of a project class has from its base in torch."""
    if base == "torch.nn.Sequential":
        return modules.run_children(machine, obj, args, at)
    return machine.outside(f"{base}.forward", obj, args, keywords, at)


def as_base(obj: Instance, base: str) -> External:
    """The object seen as the torch module that its class derives from."""
    made = External(base, obj.site, obj.born)
    kept = obj.slots.get("<arguments>")
    if isinstance(kept, External):
        made.args, made.keywords = kept.args, kept.keywords
    made.device = obj.device
    made.slots["training"] = obj.slots.get("training", Host("bool"))
    return made


def _manual_context(machine: Machine, event: ev.CallEvent, obj: External | Instance, name: str) -> Value:
    """`ctx.__enter__()` and `super().__enter__()` of a capture context."""
    if name == "__enter__":
        inner = obj
        if isinstance(obj, Instance):
            kept = obj.slots.get("<arguments>")
            inner = External(
                next(base for base in obj.cls.outside() if base in graphs.CONTEXTS),
                machine.site(event.at),
                machine.clock,
            )
            if isinstance(kept, External):
                inner.args, inner.keywords = kept.args, kept.keywords
        assert isinstance(inner, External)
        capture = graphs.begin_context(machine, inner, event.at)
        machine.memo[("entered", id(obj))] = capture
        return obj
    capture = machine.memo.pop(("entered", id(obj)), None)
    if capture is not None and capture in machine.open:
        graphs.end(machine, capture, event.at)
    return NONE


def _external_method(machine: Machine, event: ev.CallEvent, obj: External, name: str) -> Value:
    if obj.name == "contextlib.ExitStack" and name == "enter_context":
        return contexts.enter_context(machine, event, obj)
    if obj.name == "contextlib.ExitStack" and name in ("close", "__exit__"):
        contexts.close_stack(machine, obj, event.at)
        return NONE
    if obj.name in ("threading.Thread", "threading.Timer") and name == "start":
        return _start_thread(machine, event, obj)
    if (name == "join" and obj.name.startswith("threading.")) or (
        name in ("result", "get") and obj.name == "concurrent.futures.Future"
    ):
        obj.facts.setdefault("joined", event.clock)
        return NONE if name == "join" else UNKNOWN
    if obj.name in contexts.EXECUTORS and name in ("submit", "apply_async", "map"):
        return _submit(machine, event, obj)
    if obj.name in contexts.EXECUTORS and name in ("shutdown", "close", "join"):
        contexts.wait_for_workers(machine, obj)
        return NONE
    if obj.name == "torch.autograd.function.FunctionCtx":
        if name == "save_for_backward":
            obj.slots["<saved>"] = machine.items("tuple", list(event.args), event.at)
        return NONE
    if obj.name == "torch.cuda.stream" and name in ("__enter__", "__exit__"):
        return (
            contexts.enter_stream(machine, event, obj)
            if name == "__enter__"
            else contexts.leave_stream(machine, event, obj)
        )
    if obj.name == "torch.distributed.Work":
        return Host("bool") if name in ("is_completed", "is_success") else NONE
    if obj.name in ("torch.cuda.Stream", "torch.cuda.Event"):
        if name == "record_event":
            made = External("torch.cuda.Event", machine.site(event.at), machine.tick())
            made.facts["recorded"] = (event.clock, event.capture, obj)
            return made
        if name == "record":
            obj.facts["recorded"] = (
                event.clock,
                event.capture,
                event.args[0] if event.args else (machine.streams[-1] if machine.streams else None),
            )
            return NONE
        return Host("bool") if name == "query" else NONE
    if obj.name == "torch.amp.GradScaler":
        return _scaler(machine, event, obj, name)
    if obj.name.startswith("torch.optim.lr_scheduler."):
        return NONE
    if obj.name == "torch.Generator":
        return obj if name in ("manual_seed", "set_state") else UNKNOWN
    if obj.name == "collections.defaultdict":
        return UNKNOWN
    if obj.name.startswith("torch.distributions."):
        return (
            machine.tensor(event.at, _distribution_device(obj), "float", None)
            if name in ("sample", "rsample", "log_prob", "entropy", "cdf")
            else UNKNOWN
        )
    if obj.name in ("numpy.random.Generator", "numpy.random.RandomState", "random.Random"):
        return Host("any", marks=frozenset({"random"}))
    if obj.name in ("queue.Queue", "queue.SimpleQueue", "queue.LifoQueue") and name in ("put", "put_nowait", "get"):
        return _queued(machine, obj, name, event.args)
    if obj.name == "torch.multiprocessing.Queue":
        return UNKNOWN
    run_callables(machine, event)
    return UNKNOWN


def _distribution_device(obj: External) -> str:
    given = [one for arg in (*obj.args, *obj.keywords.values()) for one in tensors_in(arg)]
    return tensors._device_of(given)


def _queued(machine: Machine, queue: External, name: str, args: tuple[Value, ...]) -> Value:
    """What was put into a queue comes out of it."""
    held = queue.slots.get("<held>")
    if name != "get":
        for one in args[:1]:
            machine.put(queue, "<held>", one if held is None else join(held, one))
        return NONE
    return held if held is not None else UNKNOWN


def _scaler(machine: Machine, event: ev.CallEvent, obj: External, name: str) -> Value:
    if name == "scale":
        return event.args[0] if event.args else UNKNOWN
    if name == "step" and event.args:
        target = event.args[0]
        if isinstance(target, External):
            target.facts.setdefault("steps", []).append((event.clock, event.capture))
        return NONE
    if name == "get_scale":
        return Host("float", marks=frozenset({"data"}))
    return NONE


def _start_thread(machine: Machine, event: ev.CallEvent, obj: External | Instance) -> Value:
    """A thread starts: what it runs is walked apart, so that the checks know what it would do beside a capture."""
    target: Value = UNKNOWN
    args: list[Value] = []
    if isinstance(obj, Instance):
        found = obj.cls.find("run")
        if found is not None:
            target = Bound(obj, machine.method_closure(*found))
    else:
        target = obj.keywords.get(
            "function" if obj.name == "threading.Timer" else "target", obj.args[1] if len(obj.args) > 1 else UNKNOWN
        )
        given = obj.keywords.get("args")
        args = given.values if isinstance(given, Items) and given.exact else []
    _beside(machine, event, obj, target, args)
    return NONE


def _submit(machine: Machine, event: ev.CallEvent, pool: External) -> Value:
    """`pool.submit(f, ...)`: runs on a thread of the pool until its result is asked for or the pool is closed."""
    future = External("concurrent.futures.Future", machine.site(event.at), machine.tick())
    pool.facts.setdefault("futures", []).append(future)
    _beside(machine, event, future, event.args[0] if event.args else UNKNOWN, list(event.args[1:]))
    return future


def _beside(machine: Machine, event: ev.CallEvent, owner: Value, target: Value, args: list[Value]) -> None:
    """Walks what another thread runs: outside all captures, on its own default stream."""
    first = len(machine.events)
    outside, machine.open, machine.streams = (machine.open, machine.streams), [], []
    if not isinstance(target, Unknown):
        machine.doubt += 1
        machine.call(target, args, {}, event.at)
        machine.doubt -= 1
    machine.open, machine.streams = outside
    machine.threads.append((owner, event.clock, machine.events[first:]))


def unknown_method(machine: Machine, event: ev.CallEvent, name: str) -> Value:
    """A method of an unknown object: a tensor where only tensors have it."""
    if name in ("item", "tolist"):
        return Host("any", marks=frozenset({"data"}))
    if name == "replay":
        graphs.replay(machine, None, event.at)
        return UNKNOWN
    if name in ("size", "dim", "numel"):
        return Host("int", marks=frozenset({"shape"}))
    if name in ("cpu", "cuda"):
        return machine.tensor(event.at, name, sure=False)
    if name in names.HOST_METHODS - {"type", "storage", "untyped_storage"}:
        return Host("any", marks=frozenset({"shape"}))
    if name in names.TENSOR_ONLY:
        dtype = "bool" if name in names.BOOLEAN else ("int" if name in names.INTEGER else "?")
        return machine.tensor(event.at, "?", dtype)
    run_callables(machine, event)
    return Unknown(name)


def init_base(machine: Machine, obj: Instance, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> None:
    """`__init__` of a class outside: containers keep their parts, contexts their arguments."""
    if obj.cls.is_a(*modules.CONTAINERS):
        source = args[0].values if len(args) == 1 and isinstance(args[0], Items) else args
        for index, one in enumerate(source):
            machine.put(obj, index, one)
    _keep_arguments(machine, obj, args, keywords)


def _keep_arguments(machine: Machine, obj: Instance, args: list[Value], keywords: dict[str, Value]) -> None:
    kept = External("arguments", ("", 0), machine.clock)
    kept.args, kept.keywords = tuple(args), dict(keywords)
    obj.slots["<arguments>"] = kept
