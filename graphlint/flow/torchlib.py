"""The door between the walk and everything outside the project: which model answers for which name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphlint import ir
from graphlint.flow import contexts, graphs, handlers, modules, names, objects, pylib, stdlib, tensors
from graphlint.flow import events as ev
from graphlint.flow.names import symbol
from graphlint.flow.values import (
    NO,
    NONE,
    UNKNOWN,
    Bound,
    ClassValue,
    Closure,
    External,
    Holder,
    Host,
    Instance,
    Mapping,
    Partial,
    Symbol,
    Tensor,
    Value,
    Wrapped,
    const,
    tensors_in,
)
from graphlint.link import ClassInfo

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine


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


def prepare_instance(
    machine: Machine, obj: Instance, args: list[Value], keywords: dict[str, Value], at: ir.Span
) -> None:
    if obj.cls.is_module:
        obj.device = machine.default_device
        obj.slots["training"] = const(True) if machine.whole else Host("bool")


run_hooks = modules.run_hooks


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


def decorate(machine: Machine, func: Value, target: Value, at: ir.Span) -> Value | None:
    """What a decorator makes of a function; None when it can be looked through."""
    name = func.name if isinstance(func, Symbol) else ""
    if isinstance(func, Partial) and isinstance(func.func, Symbol):
        name = func.func.name
    if name in ("contextlib.contextmanager", "contextlib.asynccontextmanager") and isinstance(target, Closure):
        return Closure(
            target.func,
            target.module,
            target.scope,
            target.owner,
            target.defaults,
            "contextmanager",
            dict(target.facts),
        )
    if name in ("functools.lru_cache", "functools.cache") or (
        isinstance(func, External) and func.name in ("functools.lru_cache", "functools.cache")
    ):
        facts: dict[str, Any] = {"results": {}}
        size = None
        if isinstance(func, External):
            size = func.keywords.get("maxsize", func.args[0] if func.args else None)
        bounded = name == "functools.lru_cache" or (isinstance(func, External) and func.name == "functools.lru_cache")
        facts["bounded"] = bounded and not (isinstance(size, Host) and size.kind == "none")
        facts["at"] = at
        return Wrapped(target, "lru_cache", facts)
    if isinstance(target, Closure) and (
        name in contexts.GRAD_MODES or (isinstance(func, External) and func.name in contexts.GRAD_MODES)
    ):
        mode = contexts.grad_mode(func) if isinstance(func, External) else name == "torch.enable_grad"
        return Closure(
            target.func,
            target.module,
            target.scope,
            target.owner,
            target.defaults,
            target.wraps,
            {**target.facts, "grad_mode": mode},
        )
    if isinstance(func, External) and func.name == "functools.singledispatch.register":
        return stdlib.register(machine, func.facts["func"], [func.facts["cls"], target], at)
    if (
        isinstance(func, Bound)
        and isinstance(func.receiver, Wrapped)
        and func.receiver.kind == "dispatch"
        and func.func == "register"
    ):
        return stdlib.register(machine, func.receiver, [target], at)
    if name == "functools.singledispatch":
        return machine.call(func, [target], {}, at)
    if name == "torch.compile":
        return machine.call(func, [target], {}, at)
    if name in ("graphlint.capture_safe", "torch.cuda.make_graphed_callables"):
        return machine.call(func, [target], {}, at) if name == "graphlint.capture_safe" else None
    if isinstance(func, (Closure, Instance, ClassValue)) or (
        isinstance(func, Bound) and isinstance(func.func, Closure)
    ):
        made = machine.call(func, [target], {}, at)
        if isinstance(made, (Closure, Wrapped, Instance, Partial)) or (
            isinstance(made, Bound) and isinstance(made.func, Closure)
        ):
            return made
    return None


def before_enter(
    machine: Machine, func: Closure, args: list[Value], keywords: dict[str, Value], at: ir.Span
) -> Value | None:
    """A call of a context manager's generator only makes it; it runs at the `with`."""
    if func.wraps == "contextmanager":
        pending = Closure(
            func.func,
            func.module,
            func.scope,
            func.owner,
            func.defaults,
            "pending",
            {**func.facts, "args": args, "keywords": keywords},
        )
        return Bound(UNKNOWN, pending)
    if func.wraps == "pending":
        return UNKNOWN
    return None


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
        if machine.captures and not machine.open and not func.facts["bounded"]:
            _stored(machine, func, args, result, at)
    return result


def _stored(machine: Machine, func: Wrapped, args: list[Value], result: Value, at: ir.Span) -> None:
    """A cache without a bound keeps every result, like a dict."""
    store = func.facts.setdefault("store", Mapping(machine.site(at), machine.tick()))
    index = args[0] if len(args) == 1 else machine.items("tuple", args, at)
    machine.happen(ev.IndexEvent, at, store, index, result, False)
    machine.write(store, machine.key(index), result, at)


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


def call_function_class(
    machine: Machine, cls: ClassInfo, args: list[Value], keywords: dict[str, Value], at: ir.Span
) -> Value:
    """`MyFunction.apply(...)`: its forward now, its backward when the backward pass runs."""
    found = cls.find("forward")
    result: Value = UNKNOWN
    if found is not None:
        closure = machine.method_closure(*found)
        wanted = [param for param in found[0].params if param.kind == "pos"]
        context = External("torch.autograd.function.FunctionCtx", machine.site(at), machine.tick())
        result = machine.enter(
            closure,
            [context, *args] if wanted and wanted[0].name in ("ctx", "self", "context", "_ctx") else args,
            keywords,
            at,
        )
    if cls not in machine.functions:
        machine.functions.append(cls)
    return result


def call_on_callable(
    machine: Machine, func: Value, name: str, args: list[Value], keywords: dict[str, Value], at: ir.Span
) -> Value:
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


def call(machine: Machine, event: ev.CallEvent) -> Value:
    """What a call outside the project gives back, and what it does to what the walk knows."""
    name = event.name
    handler = handlers.HANDLERS.get(name)
    if handler is not None:
        return handler(machine, event)
    if name.endswith((".get_state", ".get_rng_state")):  # of a generator: bytes on the host, also of a device's
        return machine.tensor(event.at, "cpu", "int", 1, sure=False)
    receiver = event.receiver
    if isinstance(receiver, Tensor):
        return tensors.method(machine, event, receiver, name.rpartition(".")[2])
    if isinstance(receiver, (External, Instance)):
        return objects.object_method(machine, event, receiver, name.rpartition(".")[2])
    if name.startswith("builtins."):
        return pylib.builtin(machine, event)
    if name.startswith("?."):
        return objects.unknown_method(machine, event, name[2:])
    head, _, last = name.rpartition(".")
    if head == "torch.cuda" and last in names.FACTORIES:
        return tensors.factory(machine, event, last)
    if (
        head == "torch"
        or head == "torch.nn.functional"
        or head in ("torch.special", "torch.linalg", "torch.fft", "torch._C._nn", "torch.ops.aten")
    ):
        if head == "torch" and last[:1].isupper() and last not in names.FACTORIES:
            return objects.made(machine, event)
        return tensors.function(machine, event, last)
    if modules.is_module_name(name):
        return modules.make(machine, event)
    if (
        name.startswith("torch.optim.")
        and last[:1].isupper()
        and ".lr_scheduler" not in name
        and "swa_utils" not in name
    ):
        return modules.make_optimizer(machine, event)
    if head == "torch.nn.init" or (head.startswith("torch") and last.endswith("_")):
        return _inplace_function(machine, event)
    if last[:1].isupper() or last in ("lru_cache",):
        return objects.made(machine, event)
    if head in (
        "math",
        "operator",
        "random",
        "time",
        "os",
        "numpy.random",
        "datetime",
        "uuid",
        "secrets",
    ) or name.startswith(("os.", "time.", "random.")):
        return _host_function(machine, event, head)
    if name.startswith(("numpy.", "np.")):
        return Host("ndarray")
    if (
        head in ("triton", "triton.runtime.driver")
        and last[:1].islower()
        and last not in ("jit", "autotune", "heuristics")
    ):
        return Host(
            "int", marks=frozenset(mark for arg in event.args for mark in machine.marks(arg))
        )  # cdiv, next_power_of_2
    if name.startswith(("torch.ops.", "flash_attn", "xformers", "transformer_engine", "triton", "torch.nn.")):
        given = [one for arg in (*event.args, *event.keywords.values()) for one in tensors_in(arg)]
        return machine.tensor(event.at, tensors._device_of(given) if given else "?") if given else UNKNOWN
    objects.run_callables(machine, event)
    return UNKNOWN


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
    """A variable of the environment has its default, as far as a region's branches go (see `truth`); what it is used
    for is only known to be text."""
    default = event.args[1] if len(event.args) > 1 else event.keywords.get("default", NONE)
    if isinstance(default, Host) and default.known:
        return Host(default.kind, default.value, default.origins, marks)
    return Host("str", marks=marks)


def _inplace_function(machine: Machine, event: ev.CallEvent) -> Value:
    for one in tensors_in(event.args[0]) if event.args else []:
        machine.happen(ev.InplaceEvent, event.at, one.storage, event.name.rpartition(".")[2], None, False)
    return (
        event.args[0]
        if event.args and isinstance(event.args[0], Tensor)
        else (machine.tensor(event.at, "cuda", "float", 0) if "norm" in event.name else UNKNOWN)
    )


__all__ = ["call", "decorate", "symbol"]
