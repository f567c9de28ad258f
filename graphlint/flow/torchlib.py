"""The door between the walk and everything outside the project: which model answers for which name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow import graphs, modules, names, pylib, stdlib, tensors
from graphlint.flow.names import symbol
from graphlint.flow.values import (
    NO,
    NONE,
    REST,
    UNKNOWN,
    Bound,
    ClassValue,
    Closure,
    External,
    Holder,
    Host,
    Instance,
    Items,
    Mapping,
    ModuleValue,
    Partial,
    Symbol,
    Tensor,
    Unknown,
    Value,
    Wrapped,
    alternatives,
    const,
    join,
    tensors_in,
)
from graphlint.link import ClassInfo, Module

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine

Body = Callable[[Value], None]

# --- attributes ------------------------------------------------------------------------------------------------------


def tensor_attribute(machine: Machine, tensor: Tensor, name: str, at: ir.Span) -> Value:
    found = tensors.attribute(machine, tensor, name, at)
    return found if found is not None else Bound(tensor, name)


def unknown_attribute(machine: Machine, obj: Value, name: str, at: ir.Span) -> Value:
    """An attribute of nobody knows what: what its name alone says."""
    if name in ("shape",):
        return Host("size", marks=frozenset({"shape"}))
    if name == "device":
        return Host("device", marks=frozenset({"shape"}))
    if name == "dtype":
        return Host("dtype")
    return Bound(obj, name)


def external_attribute(machine: Machine, obj: External, name: str, at: ir.Span) -> Value:
    if obj.name == "super":
        return _super_attribute(machine, obj, name, at)
    if modules.is_module_name(obj.name) and name in ("weight", "bias", "running_mean", "running_var", "in_proj_weight"):
        return modules.weight(machine, obj, name, at)
    if obj.name == "torch.autograd.function.FunctionCtx" and name == "saved_tensors":
        saved = obj.slots.get("<saved>")
        return saved if saved is not None else machine.items("tuple", [machine.tensor(at, "cuda")], at, exact=False)
    if obj.name == "slice" or obj.name == "range":
        return Host("int")
    return Bound(obj, name)


def _super_attribute(machine: Machine, obj: External, name: str, at: ir.Span) -> Value:
    receiver, owner = obj.facts["receiver"], obj.facts["owner"]
    cls = receiver.cls
    found = cls.find_after(owner, name)
    if found is not None:
        closure = machine.method_closure(*found)
        return Bound(receiver, closure)
    return Bound(receiver, name)


def inherited_attribute(machine: Machine, obj: Instance, name: str, at: ir.Span) -> Value:
    """What an object of a project class has from a base outside: methods, and a few attributes."""
    if name == "training" and obj.cls.is_module:
        return Host("bool")
    if name == "grad" and obj.cls.is_a("torch.nn.Parameter"):
        return UNKNOWN
    return Bound(obj, name)


def defines(base: str, name: str) -> bool:
    """Whether the class outside probably has the method; good enough to name the call."""
    return base.startswith("torch.") or base == "threading.Thread"


# --- annotations -----------------------------------------------------------------------------------------------------

_PLAIN = {"int": "int", "float": "float", "bool": "bool", "str": "str"}


def annotated(machine: Machine, annotation: ir.Expr, module: Module, at: ir.Span, name: str) -> Value:
    """The value that an annotation promises; a class of the project gives one made-up object per class."""
    if isinstance(annotation, ir.Const):
        return _from_text(machine, str(annotation.value), module, at, name)
    if isinstance(annotation, ir.Binary) and annotation.op == "|":
        return join(annotated(machine, annotation.left, module, at, name), annotated(machine, annotation.right, module, at, name))
    if isinstance(annotation, ir.Subscript):
        return _generic(machine, annotation, module, at, name)
    if isinstance(annotation, ir.Const) and annotation.value is None:
        return NONE
    dotted = _dotted(annotation)
    return _from_text(machine, dotted, module, at, name) if dotted else Unknown(name)


def _dotted(node: ir.Expr) -> str:
    if isinstance(node, ir.Name):
        return node.id
    if isinstance(node, ir.Attr):
        inner = _dotted(node.obj)
        return f"{inner}.{node.name}" if inner else ""
    return ""


def _generic(machine: Machine, node: ir.Subscript, module: Module, at: ir.Span, name: str) -> Value:
    head = _dotted(node.obj).rpartition(".")[2]
    inner = node.index.items if isinstance(node.index, ir.Sequence) else (node.index,)
    if head == "Optional":
        return join(annotated(machine, inner[0], module, at, name), NONE)
    if head == "Union":
        return join(*[annotated(machine, one, module, at, name) for one in inner])
    if head in ("list", "List", "Sequence", "tuple", "Tuple", "Iterable"):
        return machine.items("list", [annotated(machine, inner[0], module, at, name)], at, exact=False)
    if head in ("dict", "Dict", "Mapping") and len(inner) == 2:
        made = Mapping(machine.site(at), machine.clock)
        made.slots[REST] = annotated(machine, inner[1], module, at, name)
        return made
    return Unknown(name)


def _from_text(machine: Machine, text: str, module: Module, at: ir.Span, name: str) -> Value:
    last = text.rpartition(".")[2]
    if last in ("Tensor", "FloatTensor", "LongTensor", "BoolTensor", "IntTensor") and "np" not in text:
        dtype = {"LongTensor": "int", "IntTensor": "int", "BoolTensor": "bool", "FloatTensor": "float"}.get(last, "?")
        return machine.tensor(at, "?", dtype)
    if text in _PLAIN:
        return Host(_PLAIN[text])
    if text == "None":
        return NONE
    if last == "device":
        return Host("device")
    if last == "dtype":
        return Host("dtype")
    if not text or not text.replace(".", "").replace("_", "").isalnum():
        return Unknown(name)
    parts = text.split(".")
    value = machine.member(module, parts[0])
    for part in parts[1:]:
        value = machine.attribute(value, part, at) if not isinstance(value, ModuleValue) else machine.member(value.module, part)
    if isinstance(value, ClassValue):
        return machine.made_up(value.cls, at)
    if isinstance(value, Symbol) and modules.is_module_name(value.name) and value.name != "torch.nn.Module":
        return External(value.name, machine.site(at), machine.clock)
    return Unknown(name)


# --- instances -------------------------------------------------------------------------------------------------------


def prepare_instance(machine: Machine, obj: Instance, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> None:
    if obj.cls.is_module:
        obj.device = machine.default_device
        obj.slots["training"] = const(True) if machine.whole else Host("bool")


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


def run_hooks(machine: Machine, obj: Value, when: str, args: list[Value], at: ir.Span) -> None:
    """Forward hooks that were registered on this module."""
    wanted = "register_forward_pre_hook" if when == "pre" else "register_forward_hook"
    for name, owner, hook in list(machine.hooks):
        if name == wanted and owner is obj:
            inputs = machine.items("tuple", args if when == "pre" else args[:-1], at)
            machine.call(hook, [obj, inputs] if when == "pre" else [obj, inputs, args[-1]], {}, at)


def before_write(machine: Machine, obj: Holder, name: str, value: Value, at: ir.Span) -> None:
    """An attribute of a module: a Parameter becomes one of its parameters."""
    if isinstance(obj, Instance) and obj.cls.is_module and isinstance(value, Tensor) and not value.storage.owner:
        old = obj.slots.get(name)
        if isinstance(old, Tensor) and old.storage.owner == "buffer":
            value.storage.owner = "buffer"


def set_tensor_attribute(machine: Machine, tensor: Tensor, name: str, value: Value, at: ir.Span) -> None:
    tensors.set_attribute(machine, tensor, name, value, at)


def set_symbol(machine: Machine, name: str, value: Value, at: ir.Span) -> None:
    """`torch.backends.x = ...`: a global switch."""
    machine.happen(ev.CallEvent, at, f"set {name}", None, (value,), {}, NONE)


# --- decorators ------------------------------------------------------------------------------------------------------


def decorate(machine: Machine, func: Value, target: Value, at: ir.Span) -> Value | None:
    """What a decorator makes of a function; None when it can be looked through."""
    name = func.name if isinstance(func, Symbol) else ""
    if isinstance(func, Partial) and isinstance(func.func, Symbol):
        name = func.func.name
    if name in ("contextlib.contextmanager", "contextlib.asynccontextmanager") and isinstance(target, Closure):
        return Closure(target.func, target.module, target.scope, target.owner, target.defaults, "contextmanager", dict(target.facts))
    if name in ("functools.lru_cache", "functools.cache") or (isinstance(func, External) and func.name in ("functools.lru_cache", "functools.cache")):
        facts: dict[str, Any] = {"results": {}}
        size = None
        if isinstance(func, External):
            size = func.keywords.get("maxsize", func.args[0] if func.args else None)
        bounded = name == "functools.lru_cache" or isinstance(func, External) and func.name == "functools.lru_cache"
        facts["bounded"] = bounded and not (isinstance(size, Host) and size.kind == "none")
        facts["at"] = at
        return Wrapped(target, "lru_cache", facts)
    if isinstance(target, Closure) and (name in GRAD_MODES or isinstance(func, External) and func.name in GRAD_MODES):
        mode = grad_mode(func) if isinstance(func, External) else name == "torch.enable_grad"
        return Closure(target.func, target.module, target.scope, target.owner, target.defaults, target.wraps, {**target.facts, "grad_mode": mode})
    if isinstance(func, External) and func.name == "functools.singledispatch.register":
        return stdlib.register(machine, func.facts["func"], [func.facts["cls"], target], at)
    if isinstance(func, Bound) and isinstance(func.receiver, Wrapped) and func.receiver.kind == "dispatch" and func.func == "register":
        return stdlib.register(machine, func.receiver, [target], at)
    if name == "functools.singledispatch":
        return machine.call(func, [target], {}, at)
    if name == "torch.compile":
        return machine.call(func, [target], {}, at)
    if name in ("graphlint.capture_safe", "torch.cuda.make_graphed_callables"):
        return machine.call(func, [target], {}, at) if name == "graphlint.capture_safe" else None
    if isinstance(func, (Closure, Instance, ClassValue)) or isinstance(func, Bound) and isinstance(func.func, Closure):
        made = machine.call(func, [target], {}, at)
        if isinstance(made, (Closure, Wrapped, Instance, Partial)) or isinstance(made, Bound) and isinstance(made.func, Closure):
            return made
    return None


def before_enter(machine: Machine, func: Closure, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value | None:
    """A call of a context manager's generator only makes it; it runs at the `with`."""
    if func.wraps == "contextmanager":
        pending = Closure(func.func, func.module, func.scope, func.owner, func.defaults, "pending", {**func.facts, "args": args, "keywords": keywords})
        return Bound(UNKNOWN, pending)
    if func.wraps == "pending":
        return UNKNOWN
    return None


# --- calls of wrappers and objects -----------------------------------------------------------------------------------


def call_wrapped(machine: Machine, func: Wrapped, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    if func.kind == "compile":
        return graphs.call_compiled(machine, func, args, keywords, at)
    if func.kind == "graphed":
        return graphs.call_graphed(machine, func, args, at)
    if func.kind == "lru_cache":
        return _cached(machine, func, args, keywords, at)
    if func.kind == "capture-safe":
        return _capture_safe(machine, func, args, keywords, at)
    if func.kind == "dispatch":
        return stdlib.dispatched(machine, func, args, keywords, at)
    return machine.call(func.func, args, keywords, at)


def _cached(machine: Machine, func: Wrapped, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    key = tuple(machine.key(one) for one in args)
    results = func.facts["results"]
    usable = all(part is not NO for part in key) and not keywords
    if usable and key in results:
        found: Value = results[key]
        return found
    if not usable and machine.open and "result" in func.facts:
        warmed: Value = func.facts["result"]  # asked before the capture, most likely with the same arguments
        return warmed
    result = machine.call(func.func, args, keywords, at)
    if not machine.open:
        func.facts["result"] = result
    for one in tensors_in(result):
        if func.facts["bounded"]:
            one.storage.owner = "lru"
    if usable:
        results[key] = result
    return result


def _capture_safe(machine: Machine, func: Wrapped, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    if machine.open:
        return machine.call(func.func, args, keywords, at)
    capture = graphs.begin(machine, "capture-safe", "graphlint.capture_safe", func.facts["at"], None, {})
    capture.frame = func.facts["frame"]
    capture.mode = "thread_local"
    capture.tags.add("guarded")
    return graphs.in_capture(machine, capture, at, lambda: machine.call(func.func, args, keywords, at))  # type: ignore[no-any-return]


def call_external(machine: Machine, obj: External, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    """An object from outside is called."""
    if modules.is_module_name(obj.name):
        return modules.call(machine, obj, args, keywords, at)
    if obj.name == "collections.namedtuple":
        return stdlib.named_tuple(machine, obj, args, keywords, at)
    if obj.name == "functools.lru_cache" and args:
        return decorate(machine, obj, args[0], at) or args[0]
    return machine.outside(f"{obj.name}.__call__", obj, args, keywords, at)


def call_function_class(machine: Machine, cls: ClassInfo, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    """`MyFunction.apply(...)`: its forward now, its backward when the backward pass runs."""
    found = cls.find("forward")
    result: Value = UNKNOWN
    if found is not None:
        closure = machine.method_closure(*found)
        wanted = [param for param in found[0].params if param.kind == "pos"]
        context = External("torch.autograd.function.FunctionCtx", machine.site(at), machine.tick())
        result = machine.enter(closure, [context, *args] if wanted and wanted[0].name in ("ctx", "self", "context", "_ctx") else args, keywords, at)
    if cls not in machine.functions:
        machine.functions.append(cls)
    return result


def call_on_callable(machine: Machine, func: Value, name: str, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    """A method of a function object."""
    if isinstance(func, Wrapped) and name == "cache_clear":
        machine.happen(ev.CallEvent, at, "functools.cache_clear", func, tuple(args), keywords, NONE)
        func.facts.get("results", {}).clear()
        return NONE
    if isinstance(func, Wrapped) and func.kind == "dispatch" and name == "register":
        return stdlib.register(machine, func, args, at)
    if name in ("__call__", "forward"):
        return machine.call(func, args, keywords, at)
    return UNKNOWN


# --- with ------------------------------------------------------------------------------------------------------------


def captures(manager: Value) -> bool:
    return isinstance(manager, External) and graphs.is_context(manager.name, frozenset())


def with_external(machine: Machine, manager: Value, body: Body, at: ir.Span, whole: ir.Span) -> None:
    """A context manager from outside the project."""
    if isinstance(manager, Instance) and manager.cls.is_a(*graphs.CONTEXTS):
        kept = manager.slots.get("<arguments>")
        inner = External(next(base for base in manager.cls.outside() if base in graphs.CONTEXTS), machine.site(at), machine.clock)
        if isinstance(kept, External):
            inner.args, inner.keywords = kept.args, kept.keywords
        manager = inner
    if isinstance(manager, External):
        if graphs.is_context(manager.name, machine.declared):
            capture = graphs.begin_context(machine, manager, whole)
            try:
                body(manager)
            finally:
                if capture in machine.open:
                    graphs.end(machine, capture, at)
            return
        if manager.name in ("torch.cuda.stream", "torch.cuda.Stream", "torch.cuda.StreamContext"):
            _on_stream(machine, manager, body, at)
            return
        if manager.name == "contextlib.ExitStack":
            body(manager)
            _close_stack(machine, manager, at)
            return
        if manager.name in GRAD_MODES:
            outer, machine.grad_mode = machine.grad_mode, grad_mode(manager)
            try:
                body(manager)
            finally:
                machine.grad_mode = outer
            return
        if manager.name in ("torch.amp.autocast",):
            machine.autocast.append((manager, machine.tick()))
            body(manager)
            machine.autocast.pop()
            return
        if graphs.is_graph_class(manager.name):
            capture = graphs.begin(machine, "graph", manager.name, whole, manager, {})
            body(manager)
            if capture in machine.open:
                graphs.end(machine, capture, at)
            return
        if manager.name.startswith("cupy.cuda.") and manager.name.endswith("Stream"):
            machine.happen(ev.StreamEvent, at, manager, "enter")
            body(manager)
            machine.happen(ev.StreamEvent, at, manager, "leave")
            return
        if manager.name in EXECUTORS:
            body(manager)
            _wait_for_workers(machine, manager)
            return
    if isinstance(manager, Host) and manager.kind == "device":
        before, machine.default_device = machine.default_device, tensors.device_text(machine, manager)
        body(manager)
        machine.default_device = before
        return
    veil = isinstance(manager, (Unknown, Bound))
    machine.veils += veil
    body(manager)
    machine.veils -= veil


GRAD_MODES = frozenset({"torch.no_grad", "torch.inference_mode", "torch.enable_grad", "torch.set_grad_enabled"})


def grad_mode(switch: External) -> bool:
    """Whether autograd records under `torch.no_grad()` and its kin; not where that is unknown."""
    given = switch.args[0] if switch.args else switch.keywords.get("mode")
    if switch.name in ("torch.no_grad", "torch.enable_grad"):
        return switch.name == "torch.enable_grad"
    value = given.value if isinstance(given, Host) and given.known else None
    return value is True if switch.name == "torch.set_grad_enabled" else value is False


def _set_grad(machine: Machine, event: ev.CallEvent) -> Value:
    """`torch.set_grad_enabled(...)`: from here on, or for a `with`."""
    made = External("torch.set_grad_enabled", machine.site(event.at), machine.clock)
    made.args, made.keywords = event.args, event.keywords
    return made


def _on_stream(machine: Machine, manager: External, body: Body, at: ir.Span) -> None:
    stream = manager if manager.name == "torch.cuda.Stream" else (manager.args[0] if manager.args else manager.keywords.get("stream", UNKNOWN))
    if isinstance(stream, Host) and stream.kind == "none":
        body(UNKNOWN)
        return
    machine.happen(ev.StreamEvent, at, stream, "enter")
    depth = len(machine.streams)
    machine.streams.append(stream)
    try:
        body(manager)
    finally:
        del machine.streams[depth:]
        machine.happen(ev.StreamEvent, at, stream, "leave")


def _enter_stream(machine: Machine, event: ev.CallEvent, manager: External) -> Value:
    """`context.__enter__()` of `torch.cuda.stream(...)`."""
    stream = manager.args[0] if manager.args else manager.keywords.get("stream", UNKNOWN)
    machine.happen(ev.StreamEvent, event.at, stream, "enter")
    machine.streams.append(stream)
    return manager


def _leave_stream(machine: Machine, event: ev.CallEvent, manager: External) -> Value:
    if machine.streams:
        machine.happen(ev.StreamEvent, event.at, machine.streams.pop(), "leave")
    return NONE


def _close_stack(machine: Machine, stack: External, at: ir.Span) -> None:
    for what in reversed(stack.facts.pop("entered", [])):
        if isinstance(what, ev.Capture):
            if what in machine.open:
                graphs.end(machine, what, at)
        elif isinstance(what, External) and machine.streams and machine.streams[-1] is what:
            machine.streams.pop()
            machine.happen(ev.StreamEvent, at, what, "leave")


def _enter_context(machine: Machine, event: ev.CallEvent, stack: External) -> Value:
    """`stack.enter_context(manager)`: entered until the stack closes."""
    manager = event.args[0] if event.args else UNKNOWN
    entered = stack.facts.setdefault("entered", [])
    for one in alternatives(manager):
        if isinstance(one, External) and graphs.is_context(one.name, machine.declared):
            entered.append(graphs.begin_context(machine, one, event.at))
            return one
        if isinstance(one, External) and one.name == "torch.cuda.stream" and one.args:
            machine.happen(ev.StreamEvent, event.at, one.args[0], "enter")
            machine.streams.append(one.args[0])
            entered.append(one.args[0])
            return one
    return manager


# --- calls by name ---------------------------------------------------------------------------------------------------


def call(machine: Machine, event: ev.CallEvent) -> Value:
    """What a call outside the project gives back, and what it does to what the walk knows."""
    name = event.name
    handler = _HANDLERS.get(name)
    if handler is not None:
        return handler(machine, event)
    receiver = event.receiver
    if isinstance(receiver, Tensor):
        return tensors.method(machine, event, receiver, name.rpartition(".")[2])
    if isinstance(receiver, (External, Instance)):
        return _object_method(machine, event, receiver, name.rpartition(".")[2])
    if name.startswith("builtins."):
        return pylib.builtin(machine, event)
    if name.startswith("?."):
        return _unknown_method(machine, event, name[2:])
    head, _, last = name.rpartition(".")
    if head == "torch.cuda" and last in names.FACTORIES:
        return tensors.factory(machine, event, last)
    if head == "torch" or head == "torch.nn.functional" or head in ("torch.special", "torch.linalg", "torch.fft", "torch._C._nn", "torch.ops.aten"):
        if head == "torch" and last[:1].isupper() and last not in names.FACTORIES:
            return _made(machine, event)
        return tensors.function(machine, event, last)
    if modules.is_module_name(name):
        return modules.make(machine, event)
    if name.startswith("torch.optim.") and last[:1].isupper() and ".lr_scheduler" not in name and "swa_utils" not in name:
        return modules.make_optimizer(machine, event)
    if head == "torch.nn.init" or (head.startswith("torch") and last.endswith("_")):
        return _inplace_function(machine, event)
    if last[:1].isupper() or last in ("lru_cache",):
        return _made(machine, event)
    if head in ("math", "operator", "random", "time", "os", "numpy.random", "datetime", "uuid", "secrets") or name.startswith(("os.", "time.", "random.")):
        return _host_function(machine, event, head)
    if name.startswith(("numpy.", "np.")):
        return Host("ndarray")
    if head in ("triton", "triton.runtime.driver") and last[:1].islower() and last not in ("jit", "autotune", "heuristics"):
        return Host("int", marks=frozenset(mark for arg in event.args for mark in machine.marks(arg)))  # cdiv, next_power_of_2
    if name.startswith(("torch.ops.", "flash_attn", "xformers", "transformer_engine", "triton", "torch.nn.")):
        given = [one for arg in (*event.args, *event.keywords.values()) for one in tensors_in(arg)]
        return machine.tensor(event.at, tensors._device_of(given) if given else "?") if given else UNKNOWN
    _run_callables(machine, event)
    return UNKNOWN


def _run_callables(machine: Machine, event: ev.CallEvent) -> Value:
    """A function outside is handed one of the project's: it may well be run."""
    if not machine.open:
        return UNKNOWN
    result: Value = UNKNOWN
    for index, one in enumerate(event.args):
        if isinstance(one, Closure) or (isinstance(one, Bound) and isinstance(one.func, Closure)) or (index == 0 and isinstance(one, Instance) and one.cls.is_module):
            result = machine.call(one, list(event.args[index + 1 :]), {}, event.at)
    return result


def _made(machine: Machine, event: ev.CallEvent) -> Value:
    """A constructor of a class outside the project."""
    made = External(event.name, machine.site(event.at), machine.tick())
    made.args, made.keywords = event.args, dict(event.keywords)
    made.made_in = machine.capture
    return made


def _object_method(machine: Machine, event: ev.CallEvent, obj: External | Instance, name: str) -> Value:
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
    if any(base in graphs.CONTEXTS for base in bases) and isinstance(obj, (Instance, External)) and name in ("__enter__", "__exit__"):
        return _manual_context(machine, event, obj, name)
    if name == "__call__" and isinstance(obj, Instance) and obj.cls.find("forward"):
        return machine.call(Bound(obj, machine.method_closure(*obj.cls.find("forward"))), list(event.args), event.keywords, event.at)  # type: ignore[misc]
    if any(base.startswith("torch.optim.") and "lr_scheduler" not in base for base in bases):
        return modules.optimizer_method(machine, event, obj, name)
    if modules.is_module(obj):
        return modules.method(machine, event, obj, name)
    if isinstance(obj, Instance) and name in ("_replace", "_asdict") and obj.cls.is_a("typing.NamedTuple"):
        return stdlib.changed(machine, obj, event.keywords, event.at) if name == "_replace" else stdlib.as_mapping(machine, obj, event.at)
    if isinstance(obj, Instance) and name == "start" and obj.cls.is_a("threading.Thread", "threading.Timer"):
        return _start_thread(machine, event, obj)
    if isinstance(obj, External):
        return _external_method(machine, event, obj, name)
    return UNKNOWN


def is_layer(base: str) -> bool:
    """Whether it is a module of torch with a forward of its own."""
    return modules.is_module_name(base) and base not in ("torch.nn.Module", "torch.nn.ModuleList", "torch.nn.ModuleDict")


def base_forward(machine: Machine, obj: Instance, base: str, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    """The forward that an object of a project class has from its base in torch."""
    if base == "torch.nn.Sequential":
        value = args[0] if args else UNKNOWN
        for key, inner in list(obj.slots.items()):
            if isinstance(key, int):
                value = machine.call(inner, [value], {}, at)
        return value
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
            inner = External(next(base for base in obj.cls.outside() if base in graphs.CONTEXTS), machine.site(event.at), machine.clock)
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
        return _enter_context(machine, event, obj)
    if obj.name == "contextlib.ExitStack" and name in ("close", "__exit__"):
        _close_stack(machine, obj, event.at)
        return NONE
    if obj.name in ("threading.Thread", "threading.Timer") and name == "start":
        return _start_thread(machine, event, obj)
    if name == "join" and obj.name.startswith("threading.") or name in ("result", "get") and obj.name == "concurrent.futures.Future":
        obj.facts.setdefault("joined", event.clock)
        return NONE if name == "join" else UNKNOWN
    if obj.name in EXECUTORS and name in ("submit", "apply_async", "map"):
        return _submit(machine, event, obj)
    if obj.name in EXECUTORS and name in ("shutdown", "close", "join"):
        _wait_for_workers(machine, obj)
        return NONE
    if obj.name == "torch.autograd.function.FunctionCtx":
        if name == "save_for_backward":
            obj.slots["<saved>"] = machine.items("tuple", list(event.args), event.at)
        return NONE
    if obj.name == "torch.cuda.stream" and name in ("__enter__", "__exit__"):
        return _enter_stream(machine, event, obj) if name == "__enter__" else _leave_stream(machine, event, obj)
    if obj.name == "torch.distributed.Work":
        return Host("bool") if name in ("is_completed", "is_success") else NONE
    if obj.name in ("torch.cuda.Stream", "torch.cuda.Event"):
        if name == "record_event":
            made = External("torch.cuda.Event", machine.site(event.at), machine.tick())
            made.facts["recorded"] = (event.clock, event.capture, obj)
            return made
        if name == "record":
            obj.facts["recorded"] = (event.clock, event.capture, event.args[0] if event.args else (machine.streams[-1] if machine.streams else None))
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
        return machine.tensor(event.at, _distribution_device(obj), "float", None) if name in ("sample", "rsample", "log_prob", "entropy", "cdf") else UNKNOWN
    if obj.name in ("torch.multiprocessing.Queue", "queue.Queue"):
        return UNKNOWN
    _run_callables(machine, event)
    return UNKNOWN


def _distribution_device(obj: External) -> str:
    given = [one for arg in (*obj.args, *obj.keywords.values()) for one in tensors_in(arg)]
    return tensors._device_of(given)


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


EXECUTORS = frozenset({"concurrent.futures.ThreadPoolExecutor", "multiprocessing.pool.ThreadPool", "multiprocessing.dummy.Pool"})


def _start_thread(machine: Machine, event: ev.CallEvent, obj: External | Instance) -> Value:
    """A thread starts: what it runs is walked apart, so that the checks know what it would do beside a capture."""
    target: Value = UNKNOWN
    args: list[Value] = []
    if isinstance(obj, Instance):
        found = obj.cls.find("run")
        if found is not None:
            target = Bound(obj, machine.method_closure(*found))
    else:
        target = obj.keywords.get("function" if obj.name == "threading.Timer" else "target", obj.args[1] if len(obj.args) > 1 else UNKNOWN)
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


def _wait_for_workers(machine: Machine, pool: External) -> None:
    for future in pool.facts.get("futures", []):
        future.facts.setdefault("joined", machine.clock)


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


def _unknown_method(machine: Machine, event: ev.CallEvent, name: str) -> Value:
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
    _run_callables(machine, event)
    return Unknown(name)


def _host_function(machine: Machine, event: ev.CallEvent, head: str) -> Value:
    origins = frozenset(cell for arg in event.args for cell in machine.origins(arg))
    marks = frozenset(mark for arg in event.args for mark in machine.marks(arg))
    if head in ("random", "numpy.random", "secrets", "uuid"):
        marks |= {"random"}
    elif head in ("time", "datetime") or event.name.startswith("time."):
        marks |= {"clock"}
    elif event.name in ("os.environ.get", "os.getenv"):
        return _variable(event, marks | {"env"})
    elif event.name.startswith("os."):
        return Host("any", marks=marks)
    return Host("ndarray" if head == "numpy.random" else "any", origins=origins, marks=marks)


def _variable(event: ev.CallEvent, marks: frozenset[str]) -> Value:
    """A variable of the environment has its default, as far as a region's branches go (see `truth`); what it is used for is only known to be text."""
    default = event.args[1] if len(event.args) > 1 else event.keywords.get("default", NONE)
    if isinstance(default, Host) and default.known:
        return Host(default.kind, default.value, default.origins, marks)
    return Host("str", marks=marks)


def _inplace_function(machine: Machine, event: ev.CallEvent) -> Value:
    for one in tensors_in(event.args[0]) if event.args else []:
        machine.happen(ev.InplaceEvent, event.at, one.storage, event.name.rpartition(".")[2], None, False)
    return event.args[0] if event.args and isinstance(event.args[0], Tensor) else (machine.tensor(event.at, "cuda", "float", 0) if "norm" in event.name else UNKNOWN)


# --- single names ----------------------------------------------------------------------------------------------------


def _true(machine: Machine, event: ev.CallEvent) -> Value:
    return const(True)


def _false(machine: Machine, event: ev.CallEvent) -> Value:
    return const(False)


def _nothing(machine: Machine, event: ev.CallEvent) -> Value:
    return NONE


def _capturing(machine: Machine, event: ev.CallEvent) -> Value:
    """`is_current_stream_capturing()`: known, for the walk knows whether a region is open."""
    real = any(one.kind != "compile" for one in machine.open)
    return Host("bool", real, marks=frozenset({"capturing"}))


def _compiling(machine: Machine, event: ev.CallEvent) -> Value:
    return const(any(one.kind == "compile" for one in machine.open))


def _device_made(machine: Machine, event: ev.CallEvent) -> Value:
    first = event.args[0] if event.args else event.keywords.get("type", UNKNOWN)
    text = tensors.device_text(machine, first)
    return Host("device", text if text and text != "?" else NO)


def _current_stream(machine: Machine, event: ev.CallEvent) -> Value:
    if machine.streams:
        return machine.streams[-1]
    if machine.default_stream is None:
        machine.default_stream = External("torch.cuda.Stream", ("", 0), 0)
        machine.default_stream.facts["default"] = True
    return machine.default_stream


def _default_stream(machine: Machine, event: ev.CallEvent) -> Value:
    if machine.default_stream is None:
        machine.default_stream = External("torch.cuda.Stream", ("", 0), 0)
        machine.default_stream.facts["default"] = True
    return machine.default_stream


def _collective(machine: Machine, event: ev.CallEvent) -> Value:
    """A collective gives a handle when it is asynchronous, else nothing."""
    wanted = event.keywords.get("async_op")
    if event.name.endswith((".isend", ".irecv")) or isinstance(wanted, Host) and wanted.value is True:
        return External("torch.distributed.Work", machine.site(event.at), machine.tick())
    return NONE if wanted is None or isinstance(wanted, Host) and wanted.value is False else UNKNOWN


def _set_stream(machine: Machine, event: ev.CallEvent) -> Value:
    if event.args:
        if machine.streams:
            machine.streams[-1] = event.args[0]
        else:
            machine.streams.append(event.args[0])
    return NONE


def _parameter(machine: Machine, event: ev.CallEvent) -> Value:
    given = event.args[0] if event.args else event.keywords.get("data", UNKNOWN)
    owner = "buffer" if event.name.endswith("Buffer") else "param"
    for one in tensors_in(given):
        made = machine.tensor(event.at, one.device, one.dtype, one.rank, dims=one.dims)
        break
    else:
        made = machine.tensor(event.at, machine.default_device, "float")
    made.storage.owner = owner
    wanted = event.keywords.get("requires_grad", event.args[1] if len(event.args) > 1 else None)
    needs = owner == "param" and not (isinstance(wanted, Host) and wanted.value is False)
    return replace(made, grad=needs, leaf=needs)


def _default_device(machine: Machine, event: ev.CallEvent) -> Value:
    if event.args:
        machine.default_device = tensors.device_text(machine, event.args[0]) or "cpu"
    return NONE


def _partial(machine: Machine, event: ev.CallEvent) -> Value:
    return Partial(event.args[0], tuple(event.args[1:]), dict(event.keywords)) if event.args else UNKNOWN


def _wraps(machine: Machine, event: ev.CallEvent) -> Value:
    return External("functools.wraps", machine.site(event.at), machine.clock)


def _identity(machine: Machine, event: ev.CallEvent) -> Value:
    return event.args[0] if event.args else UNKNOWN


def _graphed(machine: Machine, event: ev.CallEvent) -> Value:
    return graphs.graphed_callables(machine, event, event.name.startswith("transformer_engine"))


def _guard(machine: Machine, event: ev.CallEvent) -> Value:
    if not event.args:
        return Partial(Symbol("graphlint.capture_safe"), (), dict(event.keywords))
    return Wrapped(event.args[0], "capture-safe", {"at": event.at, "frame": event.frame})


def _checkpoint(machine: Machine, event: ev.CallEvent) -> Value:
    return machine.call(event.args[0], list(event.args[1:]), {}, event.at) if event.args else UNKNOWN


def _deepcopy(machine: Machine, event: ev.CallEvent) -> Value:
    """A copy has memory of its own: modules and tensors are made anew."""
    return _copied(machine, event.args[0] if event.args else UNKNOWN, event.at, {})


def _copied(machine: Machine, value: Value, at: ir.Span, seen: dict[int, Value]) -> Value:
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Tensor):
        fresh = machine.tensor(at, value.device, value.dtype, value.rank, grad=value.grad)
        fresh.storage.owner = value.storage.owner
        return fresh
    made: Any
    if isinstance(value, Instance):
        made = Instance(value.cls, machine.site(at), machine.tick(), value.synthetic)
        made.device = value.device
    elif isinstance(value, External):
        made = External(value.name, machine.site(at), machine.tick())
        made.args, made.keywords, made.device = value.args, value.keywords, value.device
    elif isinstance(value, Items):
        made = Items(value.kind, [], machine.site(at), machine.tick())
        made.exact = value.exact
    elif isinstance(value, Mapping):
        made = Mapping(machine.site(at), machine.tick())
    else:
        return value
    seen[id(value)] = made
    for key, inner in list(value.slots.items()):
        made.slots[key] = _copied(machine, inner, at, seen)
    return made  # type: ignore[no-any-return]


def _deque(machine: Machine, event: ev.CallEvent) -> Value:
    source = event.args[0] if event.args else None
    return machine.items("list", source.values if isinstance(source, Items) else [], event.at, True)


def _ordered(machine: Machine, event: ev.CallEvent) -> Value:
    made = Mapping(machine.site(event.at), machine.tick())
    if event.args and isinstance(event.args[0], Mapping):
        made.slots.update(event.args[0].slots)
    return made


def _defaultdict(machine: Machine, event: ev.CallEvent) -> Value:
    made = Mapping(machine.site(event.at), machine.tick())
    made.factory = event.args[0] if event.args else None
    return made


def _backward(machine: Machine, event: ev.CallEvent) -> Value:
    """`loss.backward()`: gradients appear, and the Python of the backward pass runs now."""
    for key, gradient in list(machine.gradients.slots.items()):
        if isinstance(gradient, Host) and gradient.kind == "none":
            machine.drop(machine.gradients, key)  # made anew when somebody looks at it
    graphs.run_backward(machine, event.at)
    return NONE


def _autograd_grad(machine: Machine, event: ev.CallEvent) -> Value:
    graphs.run_backward(machine, event.at)
    return machine.items("tuple", [machine.tensor(event.at, "cuda", "float")], event.at, exact=False)


def _clip(machine: Machine, event: ev.CallEvent) -> Value:
    for one in tensors_in(event.args[0]) if event.args else []:
        grad = tensors.gradient(machine, one, event.at)
        for tensor in tensors_in(grad):
            machine.happen(ev.InplaceEvent, event.at, tensor.storage, "clip", None, False)
    return machine.tensor(event.at, "cuda", "float", 0)


def _unflattened(machine: Machine, event: ev.CallEvent) -> Value:
    """`vector_to_parameters(vector, parameters)` puts slices of the vector behind the parameters."""
    storages = tuple(one.storage for value in event.args[1:2] for one in tensors_in(value))
    if storages and machine.captures:
        machine.happen(ev.MoveEvent, event.at, event.args[1], storages, "vector_to_parameters")
    return NONE


def _module_device(machine: Machine, event: ev.CallEvent) -> Value:
    return Symbol("torch.cuda")


def _apply(machine: Machine, event: ev.CallEvent) -> Value:
    return _checkpoint(machine, event)


def _logger(machine: Machine, event: ev.CallEvent) -> Value:
    return External("logging.Logger", machine.site(event.at), machine.tick())


def _is_tensor(machine: Machine, event: ev.CallEvent) -> Value:
    answers = {pylib.is_instance(one, "Tensor") for one in (alternatives(event.args[0]) if event.args else ())}
    answer = answers.pop() if len(answers) == 1 else None
    return Host("bool") if answer is None else const(answer)


def _tree_map(machine: Machine, event: ev.CallEvent) -> Value:
    if len(event.args) < 2:
        return UNKNOWN
    made = _mapped(machine, event.args[0], event.args[1], [*event.args[2:]], event.at, 3)
    return made


def _mapped(machine: Machine, func: Value, tree: Value, more: list[Value], at: ir.Span, depth: int) -> Value:
    if isinstance(tree, Items) and depth:
        others = [one.values if isinstance(one, Items) and len(one.slots) == len(tree.slots) else [UNKNOWN] * len(tree.slots) for one in more]
        values = [_mapped(machine, func, one, [column[index] for column in others], at, depth - 1) for index, one in enumerate(tree.values)]
        return machine.items(tree.kind, values, at, tree.exact)
    if isinstance(tree, Mapping) and depth:
        made = Mapping(machine.site(at), machine.tick())
        for key, one in list(tree.slots.items()):
            rest = [other.slots.get(key, UNKNOWN) if isinstance(other, Mapping) else UNKNOWN for other in more]
            made.slots[key] = _mapped(machine, func, one, rest, at, depth - 1)
        return made
    return machine.call(func, [tree, *more], {}, at)


def _foreach_copy(machine: Machine, event: ev.CallEvent) -> Value:
    for one in tensors_in(event.args[0]) if event.args else []:
        machine.happen(ev.InplaceEvent, event.at, one.storage, "copy_", event.args[1] if len(event.args) > 1 else None, False)
    return NONE


_HANDLERS: dict[str, Callable[[Any, ev.CallEvent], Value]] = {
    "torch.cuda.is_available": _true, "torch.cuda.is_initialized": _true, "torch.backends.cuda.is_built": _true,
    "torch.cuda.is_current_stream_capturing": _capturing, "torch.cuda.graphs.is_current_stream_capturing": _capturing,
    "torch.compiler.is_compiling": _compiling, "torch._dynamo.is_compiling": _compiling, "torch.compiler.is_dynamo_compiling": _compiling,
    "torch.jit.is_scripting": _false, "torch.jit.is_tracing": _false, "torch.onnx.is_in_onnx_export": _false,
    "torch.device": _device_made, "torch.cuda.current_stream": _current_stream, "torch.cuda.default_stream": _default_stream,
    **{f"torch.distributed.{name}": _collective for name in names.COLLECTIVES},
    "torch.cuda.set_stream": _set_stream, "torch.nn.Parameter": _parameter, "torch.nn.Buffer": _parameter, "torch.set_default_device": _default_device,
    **stdlib.HANDLERS,
    "functools.partial": _partial, "functools.wraps": _wraps, "functools.wraps.__call__": _identity, "functools.update_wrapper": _identity,
    "torch.cuda.make_graphed_callables": _graphed, "transformer_engine.pytorch.make_graphed_callables": _graphed,
    "torch.compile": graphs.compiled, "graphlint.capture_safe": _guard, "torch.utils.checkpoint.checkpoint": _checkpoint,
    "logging.getLogger": _logger, "logging.Logger.getChild": _logger, "copy.deepcopy": _deepcopy, "copy.copy": _deepcopy, "collections.deque": _deque, "collections.OrderedDict": _ordered, "collections.defaultdict": _defaultdict,
    "torch.Tensor.backward": _backward, "torch.autograd.backward": _backward, "torch.autograd.grad": _autograd_grad, "?.backward": _backward,
    "torch.nn.utils.clip_grad_norm_": _clip, "torch.nn.utils.clip_grad_value_": _clip, "torch.get_device_module": _module_device,
    "torch.is_tensor": _is_tensor, "torch.utils._pytree.tree_map": _tree_map, "torch._foreach_copy_": _foreach_copy,
    "torch.cuda.synchronize": _nothing, "torch.cuda.set_device": _nothing, "torch.cuda.empty_cache": _nothing,
    "torch.func.functional_call": _apply, "torch.cuda.current_device": lambda machine, event: Host("int"),
    "torch.no_grad": lambda machine, event: External("torch.no_grad", ("", 0), machine.clock), "torch.inference_mode": _made, "torch.set_grad_enabled": _set_grad,
    "torch.enable_grad": lambda machine, event: External("torch.enable_grad", ("", 0), machine.clock),
    "torch.no_grad.__call__": _identity, "torch.inference_mode.__call__": _identity, "torch.enable_grad.__call__": _identity, "torch.amp.autocast.__call__": _identity,
    "torch.Generator": _made, "typing.cast": lambda machine, event: event.args[-1] if event.args else UNKNOWN,
    "torch.cuda.graph": _made, "torch.cuda.stream": _made, "torch.npu.graph": _made, "torch.xpu.graph": _made, "torch.musa.graph": _made, "torch.hpu.graph": _made, "torch.mlu.graph": _made,
    "torch.amp.autocast": _made, "torch.cuda.graph_pool_handle": _made, "torch.nn.utils.vector_to_parameters": _unflattened, "torch.nn.utils.convert_parameters.vector_to_parameters": _unflattened,
    "torch.npu.stream": _made, "torch.xpu.stream": _made, "contextlib.nullcontext": _made,
}  # fmt: skip

__all__ = ["annotated", "call", "decorate", "symbol", "with_external"]
