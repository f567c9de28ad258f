"""`nn.Module`s, parameters, optimizers: objects with memory of their own, and what moves or replaces that memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow import tensors
from graphlint.flow.values import (
    DEFAULT,
    NONE,
    UNKNOWN,
    Bound,
    ClassValue,
    External,
    Holder,
    Host,
    Instance,
    Items,
    Key,
    Mapping,
    Storage,
    Tensor,
    Unknown,
    Value,
    Wrapped,
    alternatives,
    const,
    join,
    tensors_in,
)

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine

CASTS = {"half": "float16", "float": "float32", "bfloat16": "bfloat16", "double": "float64"}
MOVES = frozenset(
    {"to", "cuda", "cpu", "npu", "xpu", "half", "float", "bfloat16", "double", "to_empty", "type", "share_memory"}
)
CONTAINERS = ("torch.nn.Sequential", "torch.nn.ModuleList", "torch.nn.ModuleDict", "torch.nn.ParameterList")
ELEMENTWISE = frozenset({"ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "Dropout", "Softmax", "Identity"})
POOLING = frozenset({"MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d"})
PLAIN = ELEMENTWISE | POOLING | {"Flatten", "Upsample", "Mish", "LeakyReLU", "ELU"}  # without parameters
KEEPS_RANK = ELEMENTWISE | {"LayerNorm", "RMSNorm", "BatchNorm1d", "BatchNorm2d", "Linear"}


def is_module(value: Value) -> bool:
    """Whether it is an `nn.Module`, of the project or of torch."""
    if isinstance(value, Instance):
        return value.cls.is_module
    return isinstance(value, External) and is_module_name(value.name)


def is_module_name(name: str) -> bool:
    last = name.rpartition(".")[2]
    return (
        name.startswith("torch.nn.")
        and last[:1].isupper()
        and last not in ("Parameter", "Buffer", "UninitializedParameter")
        and "utils" not in name
    )


def make(machine: Machine, event: ev.CallEvent) -> Value:
    """`torch.nn.Linear(...)`: an object that remembers what it was made with."""
    made = External(event.name, machine.site(event.at), machine.tick())
    made.args, made.keywords = event.args, event.keywords
    made.made_in = machine.capture
    made.device = tensors.device_text(machine, event.keywords.get("device")) or machine.default_device
    made.slots["training"] = const(True) if machine.whole else Host("bool")
    if event.name in CONTAINERS:
        source = tuple(one for arg in event.args for one in spread(arg))
        if len(source) == 1 and isinstance(source[0], Items):
            source = tuple(source[0].values)
        elif len(source) == 1 and isinstance(source[0], Mapping):
            made.slots.update(source[0].slots)
            source = ()
        for index, one in enumerate(source):
            made.slots[index] = one
    return made


def spread(arg: Value) -> list[Value]:
    """The values that an argument stands for: those of `*values` of unknown length, else itself."""
    if isinstance(arg, Bound) and arg.func == "*":
        return list(arg.receiver.values) if isinstance(arg.receiver, Items) else []
    return [arg]


def parts(value: Value) -> Iterator[Holder]:
    """The module itself and its submodules, in order."""
    return (part for _, part in named_parts(value))


def named_parts(value: Value, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Holder]]:
    """The module itself and its submodules with their dotted names, in order."""
    seen = set() if seen is None else seen
    if not isinstance(value, (Instance, External)) or id(value) in seen or not is_module(value):
        return
    seen.add(id(value))
    yield name, value
    for key, inner in children(value):
        yield from named_parts(inner, f"{name}.{key}" if name else key, seen)


def children(module: Holder) -> list[tuple[str, Value]]:
    """The submodules right below a module, by name. A plain list or dict hides its modules from torch."""
    found: list[tuple[str, Value]] = []
    for key, inner in module.slots.items():
        for one in alternatives(inner):
            one = one.func if isinstance(one, Wrapped) else one
            if is_module(one):
                found.append((str(key), one))
    return found


def slot_key(module: Value, name: str) -> Key:
    """The slot that an attribute stands for: the submodules of a container are called by their numbers."""
    numbered = name.isdigit() and isinstance(module, (Instance, External)) and int(name) in module.slots
    return int(name) if numbered else name


def run_children(machine: Machine, module: Instance | External, args: list[Value], at: ir.Span) -> Value:
    """What `nn.Sequential` does: one submodule after the other."""
    value = args[0] if args else UNKNOWN
    for key, inner in list(module.slots.items()):
        if isinstance(key, int) or is_module(inner):
            value = machine.call(inner, [value], {}, at)
    return value


def parameters(machine: Machine, value: Value, at: ir.Span) -> list[Tensor]:
    """One tensor for each parameter that shows; a torch module has at least its weight."""
    return list(named_parameters(machine, value, at).values())


def named_parameters(machine: Machine, value: Value, at: ir.Span) -> dict[str, Tensor]:
    """The same, by their dotted names."""
    found: dict[str, Tensor] = {}
    for name, part in named_parts(value):
        before = f"{name}." if name else ""
        if isinstance(part, External) and part.name not in CONTAINERS and not is_plain(part.name):
            found[before + "weight"] = weight(machine, part, "weight", at)
        for key, inner in list(part.slots.items()):
            if isinstance(inner, Tensor) and inner.storage.owner == "param" and inner not in found.values():
                found[f"{before}{key}"] = inner
    return found


def is_plain(name: str) -> bool:
    """A torch module without parameters."""
    last = name.rpartition(".")[2]
    return last in PLAIN or last.endswith("Loss")


def weight(machine: Machine, module: External, name: str, at: ir.Span) -> Tensor:
    """The parameter `name` of a torch module; made on first use."""
    known = module.slots.get(name)
    if isinstance(known, Tensor):
        return known
    made = machine.tensor(at, module.device, "float", 2 if name == "weight" else 1, grad=True)
    made.storage.owner = "buffer" if name.startswith("running_") else "param"
    made.storage.pool = None
    made.storage.born = module.born
    module.slots[name] = made
    return made


def move(machine: Machine, event: ev.CallEvent, module: Holder, name: str) -> None:
    """`module.to(...)` and its kin: parameters and buffers get new memory where something changes."""
    target, cast = "", name in CASTS
    if name in ("cuda", "npu", "xpu"):
        target = "cuda"
    elif name == "cpu":
        target = "cpu"
    for value in (*event.args, *[event.keywords[key] for key in ("device", "dtype") if key in event.keywords]):
        for one in alternatives(value)[:1]:
            if isinstance(one, Host) and one.kind == "dtype":
                cast = True
            elif (isinstance(one, Host) and one.kind in ("str", "device", "int", "any")) or not isinstance(one, Host):
                target = tensors.device_text(machine, one) or target
    if "memory_format" in event.keywords:
        cast = True
    touched: list[Storage] = []
    copied = False  # from the host to the device
    for part in parts(module):
        old = getattr(part, "device", "?")
        if target:
            copied = copied or (target == "cuda" and old == "cpu" and holds_memory(part))
            part.device = target  # type: ignore[attr-defined]
        for key, inner in list(part.slots.items()):
            if isinstance(inner, Tensor) and inner.storage.owner in ("param", "buffer"):
                changed = bool(target) and target != inner.device and target != "?"
                if changed or (cast and inner.dtype in ("float", "?")):
                    touched.append(inner.storage)
                if changed:
                    fresh = replace(inner, device=target, storage=Storage(inner.storage.site, None, machine.clock))
                    fresh.storage.owner, fresh.storage.cell = inner.storage.owner, inner.storage.cell
                    machine.put(part, key, fresh)
        if (
            isinstance(part, External)
            and (cast or (target and old != target and old != "?"))
            and not is_plain(part.name)
        ):
            touched.append(weight(machine, part, "weight", event.at).storage)
    if touched and machine.captures:
        machine.happen(ev.MoveEvent, event.at, module, tuple(touched), f".{name}()", copied)


def holds_memory(part: Holder) -> bool:
    """Whether a module has parameters or buffers of its own, submodules aside."""
    if isinstance(part, External):
        return part.name not in CONTAINERS and not is_plain(part.name)
    return any(isinstance(one, Tensor) and one.storage.owner in ("param", "buffer") for one in part.slots.values())


def set_mode(machine: Machine, module: Value, training: Value, at: ir.Span) -> None:
    """`.train()` and `.eval()` reach every submodule."""
    for part in parts(module):
        machine.write(part, "training", training, at, "mode")


def method(machine: Machine, event: ev.CallEvent, module: Instance | External, name: str) -> Value:
    """A method that a module has from torch."""
    args, words, at = event.args, event.keywords, event.at
    if name in MOVES:
        move(machine, event, module, name)
        return module
    if name in ("train", "eval"):
        wanted: Value = const(False) if name == "eval" else (args[0] if args else words.get("mode", const(True)))
        set_mode(machine, module, wanted, at)
        return module
    if name == "requires_grad_":
        wanted = args[0] if args else words.get("requires_grad", const(True))
        for part in parts(module):
            if isinstance(part, External):
                part.facts["frozen"] = isinstance(wanted, Host) and wanted.value is False
            for key, inner in list(part.slots.items()):
                if isinstance(inner, Tensor) and inner.storage.owner == "param":
                    asked = not (isinstance(wanted, Host) and wanted.value is False)
                    machine.put(part, key, replace(inner, grad=asked, leaf=asked))
        return module
    if name == "apply" and args:
        for part in list(parts(module)):
            machine.call(args[0], [part], {}, at)
        return module
    if name in ("requires_grad_", "compile", "share_memory", "add_module", "register_module"):
        if name in ("add_module", "register_module") and len(args) > 1 and isinstance(args[0], Host) and args[0].known:
            machine.put(module, slot_key(module, str(args[0].value)), args[1])
        if name == "compile":
            module.slots["<compiled>"] = wrapped_compile(module, words)
        return module
    if name in ("register_buffer", "register_parameter") and len(args) > 1:
        return _register(machine, module, name, args, at)
    if name == "register_buffer" and args and "tensor" in words:
        return _register(machine, module, name, (args[0], words["tensor"]), at)
    if name in ("parameters", "buffers", "named_parameters", "named_buffers"):
        return _listed(machine, module, name, at)
    if name in ("modules", "children", "named_modules", "named_children"):
        below = children(module) if name.endswith("children") else list(named_parts(module))
        values: list[Value] = [
            machine.items("tuple", [const(key), one], at) if name.startswith("named") else one for key, one in below
        ]
        return machine.items("list", values, at) if values else UNKNOWN
    if name == "get_submodule" and args:
        path = args[0].value if isinstance(args[0], Host) and args[0].known else None
        return next((one for key, one in named_parts(module) if key == path), UNKNOWN)
    if name == "state_dict":
        made = Mapping(machine.site(at), machine.tick())
        made.slots["*"] = (
            join(*parameters(machine, module, at)) if parameters(machine, module, at) else machine.tensor(at)
        )
        return made
    if name == "load_state_dict":
        assign = words.get("assign", args[2] if len(args) > 2 else None)
        if isinstance(assign, Host) and assign.value is True:
            storages = tuple(one.storage for one in parameters(machine, module, at))
            machine.happen(ev.MoveEvent, at, module, storages, "load_state_dict(assign=True)")
        return UNKNOWN
    if name == "zero_grad":
        zero_grad(machine, parameters(machine, module, at), args, words, at)
        return NONE
    if name.startswith("register_") and name.endswith("hook"):
        machine.hooks.append((name, module, args[0] if args else UNKNOWN))
        return External("torch.utils.hooks.RemovableHandle", machine.site(at), machine.clock)
    if name in ("append", "insert", "extend") and isinstance(module, (External, Instance)):
        numbered = [key for key in module.slots if isinstance(key, int)]
        machine.put(module, len(numbered), args[-1] if args else UNKNOWN)
        return module
    if name in ("keys", "values", "items"):
        plain = {key: one for key, one in module.slots.items() if key != "training"}
        if name == "values":
            return machine.items("list", list(plain.values()), at)
        return machine.items(
            "list",
            [
                machine.items("tuple", [const(key), one], at) if name == "items" else const(key)
                for key, one in plain.items()
            ],
            at,
        )
    if name in ("get_parameter", "get_buffer"):
        return machine.tensor(at, module.device, "float")
    return UNKNOWN


def wrapped_compile(module: Value, words: dict[str, Value]) -> Value:
    return Wrapped(module, "compile", {"keywords": words})


def _register(machine: Machine, module: Holder, name: str, args: tuple[Value, ...], at: ir.Span) -> Value:
    if not (isinstance(args[0], Host) and args[0].known):
        return NONE
    value = args[1]
    for one in alternatives(value):
        if isinstance(one, Tensor):
            one.storage.owner = "buffer" if name == "register_buffer" else "param"
    machine.write(module, str(args[0].value), value, at, "register")
    return NONE


def _listed(machine: Machine, module: Value, name: str, at: ir.Span) -> Value:
    if "parameters" in name:
        found = named_parameters(machine, module, at)
    else:
        found = {
            f"{path}.{key}".lstrip("."): one
            for path, part in named_parts(module)
            for key, one in part.slots.items()
            if isinstance(one, Tensor) and one.storage.owner == "buffer"
        }
    if not found:
        blank = machine.tensor(at, getattr(module, "device", "?"), "float", grad=True)
        blank.storage.owner = "param"
        pairs: list[tuple[Value, Value]] = [(Host("str"), blank)]
    else:
        pairs = [(const(key), one) for key, one in found.items()]
    if not name.startswith("named"):
        return machine.items("list", [one for _, one in pairs], at)
    return machine.items("list", [machine.items("tuple", pair, at) for pair in pairs], at)


def zero_grad(
    machine: Machine, params: list[Tensor], args: tuple[Value, ...], words: dict[str, Value], at: ir.Span
) -> None:
    """Drops the gradients (the default), or fills them with zero."""
    keep = words.get("set_to_none", args[0] if args else None)
    if isinstance(keep, Host) and keep.value is False:
        for one in params:
            grad = tensors.gradient(machine, one, at)
            for tensor in tensors_in(grad):
                machine.happen(ev.InplaceEvent, at, tensor.storage, "zero_", None, False)
        return
    for one in params:
        machine.write(machine.gradients, id(one.storage), NONE, at, "zero_grad")


def run_hooks(machine: Machine, obj: Value, when: str, args: list[Value], at: ir.Span) -> None:
    """Forward hooks that were registered on this module."""
    wanted = "register_forward_pre_hook" if when == "pre" else "register_forward_hook"
    for name, owner, hook in list(machine.hooks):
        if name == wanted and owner is obj:
            inputs = machine.items("tuple", args if when == "pre" else args[:-1], at)
            machine.call(hook, [obj, inputs] if when == "pre" else [obj, inputs, args[-1]], {}, at)


def call(machine: Machine, module: External, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    """Runs a torch module: the call is recorded as its `forward`."""
    if "forward" in module.slots:
        return machine.call(module.slots["forward"], args, keywords, at)
    if module.name == "torch.nn.Sequential":
        return run_children(machine, module, args, at)
    run_hooks(machine, module, "pre", args, at)
    result = machine.outside(f"{module.name}.forward", module, args, keywords, at)
    run_hooks(machine, module, "post", [*args, result], at)
    return result


def forward(machine: Machine, event: ev.CallEvent, module: External) -> Value:
    """What `torch.nn.X.forward` gives back."""
    given = [one for arg in (*event.args, *event.keywords.values()) for one in tensors_in(arg)]
    last = module.name.rpartition(".")[2]
    device = module.device if not given or given[0].device == "?" else given[0].device
    if device == "cpu" and given and given[0].device == "cuda":
        device = "cuda"
    if module.device == "cuda":
        device = "cuda"
    if device == DEFAULT:
        device = "?"
    rank = 0 if last.endswith("Loss") else None
    if last in KEEPS_RANK and given:
        rank = given[0].rank
    grad = any(one.grad for one in given) or learns(machine, module)
    made = machine.tensor(event.at, device, "float", rank, grad=grad)
    if last in ("Identity",) and given:
        return given[0]
    if last in ("LSTM", "GRU", "RNN", "MultiheadAttention"):
        return machine.items("tuple", [made, machine.tensor(event.at, device, "float", None, grad=grad)], event.at)
    if isinstance(module.slots.get("weight"), Tensor) and machine.open:
        machine.read(module, "weight", module.slots["weight"], event.at)
    return made


def learns(machine: Machine, module: External) -> bool:
    """Whether a torch module has parameters that ask for gradients; not where some parameters were switched off one by
    one."""
    return not (is_plain(module.name) or module.name in CONTAINERS or module.facts.get("frozen") or machine.frozen)


# --- optimizers ------------------------------------------------------------------------------------------------------


def make_optimizer(machine: Machine, event: ev.CallEvent) -> Value:
    """`torch.optim.X(params, ...)`: its parameter groups are dicts that code reads and writes."""
    made = External(event.name, machine.site(event.at), machine.tick())
    made.args, made.keywords = event.args, event.keywords
    made.made_in = machine.capture
    groups: list[Value] = []
    first = event.args[0] if event.args else event.keywords.get("params", UNKNOWN)
    given = [one for one in first.values if isinstance(one, Mapping)] if isinstance(first, Items) else []
    lr = event.keywords.get("lr", event.args[1] if len(event.args) > 1 else Host("float"))
    named: list[Mapping | None] = [*given] or [None]
    for one in named:
        group = Mapping(machine.site(event.at), machine.tick())
        group.slots.update(
            {
                "params": first,
                "lr": lr,
                **{key: value for key, value in event.keywords.items() if key not in ("params",)},
            }
        )
        if one is not None:
            group.slots.update(one.slots)
        groups.append(group)
    made.slots["param_groups"] = machine.items("list", groups, event.at)
    state = Mapping(machine.site(event.at), machine.tick())
    state.slots["*"] = UNKNOWN
    made.slots["state"] = state
    made.facts["steps"] = []
    return made


def optimizer_parameters(machine: Machine, optimizer: Holder, at: ir.Span) -> list[Tensor]:
    found: list[Tensor] = []
    groups = optimizer.slots.get("param_groups")
    for group in groups.values if isinstance(groups, Items) else []:
        if isinstance(group, Mapping):
            found.extend(tensors_in(group.slots.get("params", UNKNOWN)))
    return found


def optimizer_method(machine: Machine, event: ev.CallEvent, optimizer: External | Instance, name: str) -> Value:
    args, words, at = event.args, event.keywords, event.at
    if name == "zero_grad":
        zero_grad(machine, optimizer_parameters(machine, optimizer, at), args, words, at)
        return NONE
    if name == "step":
        if isinstance(optimizer, External):
            optimizer.facts.setdefault("steps", []).append((event.clock, event.capture))
        closure = args[0] if args else words.get("closure")
        if closure is not None and not (isinstance(closure, Host) and closure.kind == "none"):
            return machine.call(closure, [], {}, at)
        for one in optimizer_parameters(machine, optimizer, at):
            machine.happen(ev.InplaceEvent, at, one.storage, "step", None, False)
        return NONE
    if name == "add_param_group":
        groups = optimizer.slots.get("param_groups")
        if isinstance(groups, Items) and args:
            machine.put(groups, len(groups.slots), args[0])
        return NONE
    if name == "state_dict":
        made = Mapping(machine.site(at), machine.tick())
        made.slots["*"] = UNKNOWN
        return made
    if name == "register_step_post_hook" or name == "register_step_pre_hook":
        machine.hooks.append((name, optimizer, args[0] if args else UNKNOWN))
    return UNKNOWN


__all__ = [
    "CONTAINERS",
    "MOVES",
    "Bound",
    "ClassValue",
    "Unknown",
    "call",
    "forward",
    "is_module",
    "is_module_name",
    "make",
    "make_optimizer",
    "method",
    "move",
    "optimizer_method",
    "optimizer_parameters",
    "parameters",
    "parts",
    "set_mode",
    "weight",
    "zero_grad",
]
