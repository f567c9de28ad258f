"""What Python's own functions do to abstract values, and what a loop over one sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow import modules
from graphlint.flow.state import MAX_ROUNDS
from graphlint.flow.values import (
    NO,
    NONE,
    REST,
    UNKNOWN,
    Bound,
    Choice,
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
    hosts_in,
    join,
)

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine

Args = tuple[Value, ...]
Words = dict[str, Value]


# --- iteration -------------------------------------------------------------------------------------------------------


def rounds(machine: Machine) -> int:
    """How often a loop of unknown length is walked: outside captures once more, so that what a later round changes
    meets the round after."""
    return 3 if machine.whole and not machine.open else 2


def iterated(machine: Machine, value: Value, at: ir.Span) -> list[Value]:
    """The items a loop over `value` sees: all of a short known sequence, else a first and later ones."""
    if isinstance(value, Items):
        if value.exact:
            values = value.values
            return [machine.read(value, index, one, at) for index, one in enumerate(values)][:6]
        rest = machine.read(value, REST, join(*value.values), at) if value.slots else UNKNOWN
        return [rest] * rounds(machine)
    if isinstance(value, Mapping):
        return keys_of(value)
    if isinstance(value, Tensor):
        row = machine.tensor_element(value, const(0), at)
        return [row] * rounds(machine)
    if isinstance(value, External) and value.name == "range":
        return _range(value)
    if isinstance(value, External) and "items" in value.facts:
        return _left(value)
    if isinstance(value, External) and any(isinstance(key, int) for key in value.slots):
        return [one for key, one in value.slots.items() if isinstance(key, int)]
    if isinstance(value, Instance):
        advance = value.cls.find("__next__")
        if advance is not None:
            found = [machine.call(machine.attribute(value, "__next__", at), [], {}, at) for _ in range(rounds(machine))]
            return [one for one in found if not (isinstance(one, Host) and one.kind == "none")]
        if value.cls.find("__iter__"):
            return iterated(machine, machine.call(machine.attribute(value, "__iter__", at), [], {}, at), at)
        numbered = [one for key, one in value.slots.items() if isinstance(key, int)]
        if numbered:
            return numbered
    return [UNKNOWN] * rounds(machine)


TAKEN = "<taken>"  # how many items of a generator `next` has taken


def _left(generator: External) -> list[Value]:
    """What a generator still yields; its last item stands for all that follow."""
    items: list[Value] = generator.facts["items"]
    taken = generator.slots.get(TAKEN)
    first = taken.value if isinstance(taken, Host) and isinstance(taken.value, int) else 0
    return items[min(first, len(items) - 1) :]


def walked_whole(value: Value) -> bool:
    """Whether a loop over it is walked to its end."""
    if isinstance(value, Items):
        return value.exact and len(value.slots) <= MAX_ROUNDS
    if isinstance(value, Mapping):
        return REST not in value.slots and len(value.slots) <= MAX_ROUNDS
    if isinstance(value, External) and value.name == "range":
        return not any(isinstance(one, Host) and "loop" in one.marks for one in _range(value)) and all(
            isinstance(one, Host) and one.known for one in value.args
        )
    return isinstance(value, External) and bool(value.slots) and TAKEN not in value.slots


def keys_of(value: Mapping) -> list[Value]:
    keys: list[Value] = [const(key) if not isinstance(key, tuple) else UNKNOWN for key in value.slots if key != REST]
    if REST in value.slots:
        keys += [UNKNOWN, UNKNOWN]
    return keys[:6]


def _range(value: External) -> list[Value]:
    numbers = [one.value if isinstance(one, Host) and one.known else NO for one in value.args]
    origins = frozenset(cell for one in value.args if isinstance(one, Host) for cell in one.origins)
    if NO not in numbers:
        try:
            whole = list(range(*[number for number in numbers if isinstance(number, int)]))
        except (TypeError, ValueError):
            return []
        if len(whole) <= 4:
            return [const(one) for one in whole]
        return [const(whole[0]), const(whole[1]), Host("int", marks=frozenset({"loop"}))]
    start = numbers[0] if len(numbers) > 1 and numbers[0] is not NO else 0
    return [Host("int", start, origins), Host("int", origins=origins, marks=frozenset({"loop"}))]


# --- isinstance ------------------------------------------------------------------------------------------------------

_CLASSES = {
    "Tensor": (Tensor,),
    "dict": (Mapping,),
    "Mapping": (Mapping,),
    "list": (Items,),
    "tuple": (Items,),
    "set": (Items,),
}
_HOSTS = {"int": ("int", "bool"), "float": ("float",), "str": ("str",), "bool": ("bool",)}


def is_instance(value: Value, wanted: str) -> bool | None:
    """Whether `value` is of the class called `wanted`; None when that is open."""
    if isinstance(value, (Unknown, Bound, Choice)):
        return None
    if wanted in _CLASSES:
        if isinstance(value, Items):
            return value.kind == wanted or (value.kind == "minmax" and wanted == "tuple")
        if isinstance(value, (Instance, External)):
            return None if isinstance(value, Instance) and wanted != "Tensor" else False
        return isinstance(value, _CLASSES[wanted])
    if wanted in _HOSTS:
        if isinstance(value, Host):
            return None if value.kind == "any" else value.kind in _HOSTS[wanted]
        return False
    if isinstance(value, Instance):
        names = [cls.name if not isinstance(cls, str) else cls.rpartition(".")[2] for cls in value.cls.mro()]
        return wanted in names
    if isinstance(value, External):
        last = value.name.rpartition(".")[2]
        if last == wanted or (wanted == "Module" and value.name.startswith("torch.nn.")):
            return True
        return (
            False if value.name.startswith("torch.nn.") and wanted in _LAYERS and not last.startswith("Lazy") else None
        )
    if isinstance(value, (Tensor, Host)) and wanted:
        return None if wanted in ("Parameter", "Number", "Real", "Sequence") or not wanted[:1].isupper() else False
    return None


def example(machine: Machine, wanted: str, at: ir.Span) -> Value | None:
    """A value of the class called `wanted`, for the side of a test that says so."""
    if wanted == "Tensor":
        return machine.tensor(at)
    if wanted in _HOSTS:
        return Host(wanted)
    if wanted in ("list", "tuple", "set"):
        return machine.items(wanted, [UNKNOWN], at, exact=False)
    if wanted in ("dict", "Mapping"):
        made = Mapping(machine.site(at), machine.clock)
        made.slots[REST] = UNKNOWN
        return made
    return None


# layers of torch that no other layer derives from
_LAYERS = frozenset({
    "Conv1d", "Conv2d", "Conv3d", "LayerNorm", "GroupNorm", "RMSNorm", "Embedding", "MultiheadAttention", "Dropout",
    "ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "Softmax",
    "Sequential", "ModuleList", "ModuleDict", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LSTM", "GRU", "Linear",
    "Identity", "Flatten", "MaxPool2d", "AvgPool2d",
})  # fmt: skip


# --- builtin functions -----------------------------------------------------------------------------------------------


def builtin(machine: Machine, event: ev.CallEvent) -> Value:
    """A call of a builtin; `event.name` is `builtins.NAME`."""
    name = event.name.partition(".")[2]
    handler = _BUILTINS.get(name)
    if handler is not None:
        return handler(machine, event)
    if name.endswith(("Error", "Exception", "Warning")):
        return UNKNOWN
    return _hosts(name, event)


def _hosts(name: str, event: ev.CallEvent) -> Value:
    """A function of host values: folded when all are known."""
    hosts = [one for arg in event.args for one in hosts_in(arg)]
    origins = frozenset(cell for one in hosts for cell in one.origins)
    marks = frozenset(mark for one in hosts for mark in one.marks)
    kinds = {
        "len": "int",
        "int": "int",
        "float": "float",
        "bool": "bool",
        "str": "str",
        "repr": "str",
        "round": "int",
        "hash": "int",
        "id": "int",
        "ord": "int",
    }
    if (
        name in _PURE
        and event.args
        and not event.keywords
        and all(isinstance(one, Host) and one.known for one in event.args)
    ):
        try:
            value = _PURE[name](*[one.value for one in event.args])  # type: ignore[attr-defined]
            return Host(type(value).__name__, value, origins, marks)
        except Exception:  # Python would refuse as well
            pass
    if "shape" in marks and name in ("min", "max", "round", "pow", "divmod"):
        marks |= {"computed"}
    if name in ("min", "max", "abs", "sum", "pow", "divmod"):
        return Host(hosts[0].kind if hosts else "any", origins=origins, marks=marks) if hosts else UNKNOWN
    if name in kinds:
        if any(isinstance(arg, Tensor) for arg in event.args):
            marks = marks | {"data"}
        return Host(kinds[name], origins=origins, marks=marks)
    if name in ("callable", "issubclass"):
        return Host("bool")
    return UNKNOWN


_PURE: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "pow": lambda a, b: a**b if abs(b) < 64 else 0,
}


def _len(machine: Machine, event: ev.CallEvent) -> Value:
    value = event.args[0] if event.args else UNKNOWN
    if isinstance(value, (Items, Mapping)) and value in machine.longer:
        return Host("int")
    if isinstance(value, Items) and value.exact:
        return Host("int", len(value.slots), marks=frozenset({"length"}))
    if isinstance(value, Mapping) and REST not in value.slots:
        return const(len(value.slots))
    if isinstance(value, Tensor) and value.dims:
        return Host("int", NO if value.dims[0] is None else value.dims[0], frozenset(), frozenset({"shape"}))
    if isinstance(value, Tensor) or (isinstance(value, Host) and value.kind == "size"):
        return Host("int", marks=frozenset({"shape"}))
    if isinstance(value, Instance) and value.cls.find("__len__"):
        return machine.call(machine.attribute(value, "__len__", event.at), [], {}, event.at)
    return Host("int")


def _isinstance(machine: Machine, event: ev.CallEvent) -> Value:
    if len(event.args) < 2:
        return Host("bool")
    wanted = class_names(event.args[1])
    answers = {_any_of(one, wanted) for one in alternatives(event.args[0])}
    answer = answers.pop() if len(answers) == 1 else None
    return Host("bool") if answer is None else const(answer)


def _any_of(value: Value, wanted: list[str]) -> bool | None:
    answers = [is_instance(value, name) for name in wanted]
    if True in answers:
        return True
    return None if None in answers or not answers else False


def class_names(value: Value) -> list[str]:
    if isinstance(value, Symbol):
        return [value.name.rpartition(".")[2]]
    if isinstance(value, ClassValue):
        return [value.cls.name]
    if isinstance(value, Items):
        return [name for one in value.values for name in class_names(one)]
    return []


def _getattr(machine: Machine, event: ev.CallEvent) -> Value:
    if (
        len(event.args) >= 2
        and isinstance(event.args[1], Host)
        and event.args[1].known
        and isinstance(event.args[1].value, str)
    ):
        obj, name = event.args[0], event.args[1].value
        key = modules.slot_key(obj, name)
        if isinstance(obj, Holder) and not isinstance(key, str):
            return machine.read(obj, key, obj.slots[key], event.at)
        if (
            isinstance(obj, Instance)
            and len(event.args) > 2
            and name not in obj.slots
            and not obj.cls.find(name)
            and not obj.synthetic
        ):
            found = machine.attribute(obj, name, event.at)
            return event.args[2] if isinstance(found, Unknown) else found
        found = machine.attribute(obj, name, event.at)
        return join(found, event.args[2]) if isinstance(found, Unknown) and len(event.args) > 2 else found
    return UNKNOWN


def _hasattr(machine: Machine, event: ev.CallEvent) -> Value:
    if len(event.args) == 2 and isinstance(event.args[0], Instance):
        obj, name = event.args[0], event.args[1]
        if isinstance(name, Host) and name.known and not obj.synthetic and not obj.cls.find("__getattr__"):
            return const(name.value in obj.slots or obj.cls.find(str(name.value)) is not None)
    if (
        len(event.args) == 2
        and isinstance(event.args[0], Symbol)
        and event.args[0].name == "torch.cuda"
        and isinstance(event.args[1], Host)
        and str(event.args[1].value).endswith("_capturing")
    ):
        return const(True)  # every torch that has graphs has it
    return Host("bool")


def _setattr(machine: Machine, event: ev.CallEvent) -> Value:
    if len(event.args) == 3 and isinstance(event.args[1], Host) and event.args[1].known:
        for one in alternatives(event.args[0]):
            name = str(event.args[1].value)
            key = modules.slot_key(one, name)
            if isinstance(one, Holder) and not isinstance(key, str):
                machine.write(one, key, event.args[2], event.at)
            else:
                machine.set_attribute(one, name, event.args[2], event.at)
    return NONE


def _range_made(machine: Machine, event: ev.CallEvent) -> Value:
    made = External("range", machine.site(event.at), machine.clock)
    made.args = event.args
    return made


def _enumerate(machine: Machine, event: ev.CallEvent) -> Value:
    source = event.args[0] if event.args else UNKNOWN
    values = iterated(machine, source, event.at)
    exact = isinstance(source, Items) and source.exact
    pairs: list[Value] = []
    for index, one in enumerate(values):
        number = const(index) if exact or index == 0 else Host("int", marks=frozenset({"loop"}))
        pairs.append(machine.items("tuple", [number, one], event.at))
    return _finite(machine, event, pairs)


def _finite(machine: Machine, event: ev.CallEvent, values: list[Value]) -> Value:
    """An iterator that yields exactly these in a loop, though its length may be unknown."""
    made = machine.items("iterator", [], event.at)
    for index, one in enumerate(values):
        made.slots[index] = one
    return made


def _zip(machine: Machine, event: ev.CallEvent) -> Value:
    columns = [iterated(machine, one, event.at) for one in event.args]
    count = min((len(column) for column in columns), default=0)
    return _finite(
        machine,
        event,
        [machine.items("tuple", [column[index] for column in columns], event.at) for index in range(count)],
    )


def _same_items(machine: Machine, event: ev.CallEvent) -> Value:
    kind = event.name.partition(".")[2]
    if not event.args:
        return machine.items(kind, [], event.at)
    source = event.args[0]
    values = iterated(machine, source, event.at)
    exact = (isinstance(source, Items) and source.exact) or (
        isinstance(source, External) and source.name == "range" and len(values) < 3
    )
    if isinstance(source, Tensor):
        return machine.items("list", [values[0]], event.at, exact=False)
    return machine.items("list" if kind in ("sorted", "reversed", "iter") else kind, values, event.at, exact)


def _dict(machine: Machine, event: ev.CallEvent) -> Value:
    made = Mapping(machine.site(event.at), machine.tick())
    if event.args and isinstance(event.args[0], Mapping):
        made.slots.update(event.args[0].slots)
    elif event.args:
        fill(machine, made, event.args[0], event.at)
    made.slots.update({key: one for key, one in event.keywords.items() if key != "**"})
    return made


def fill(machine: Machine, made: Mapping, source: Value, at: ir.Span) -> None:
    """`dict([(key, value), ...])`: by their keys where all are written out, else summed up."""
    if isinstance(source, Items) and source.exact and all(isinstance(pair, Items) for pair in source.values):
        pairs = [(machine.key(pair.slots.get(0, UNKNOWN)), pair) for pair in source.values if isinstance(pair, Items)]
        if all(key is not NO and len(pair.slots) == 2 for key, pair in pairs):
            made.slots.update({key: pair.slots[1] for key, pair in pairs})
            return
    values = [pair.slots.get(1, UNKNOWN) for pair in iterated(machine, source, at) if isinstance(pair, Items)]
    made.slots[REST] = join(*values) if values else UNKNOWN


def _map(machine: Machine, event: ev.CallEvent) -> Value:
    if len(event.args) < 2:
        return UNKNOWN
    values = [machine.call(event.args[0], [one], {}, event.at) for one in iterated(machine, event.args[1], event.at)]
    return (
        machine.items("iterator", values, event.at, isinstance(event.args[1], Items) and event.args[1].exact)
        if values
        else UNKNOWN
    )


def _next(machine: Machine, event: ev.CallEvent) -> Value:
    values = iterated(machine, event.args[0], event.at) if event.args else []
    source = event.args[0] if event.args else UNKNOWN
    if isinstance(source, External) and TAKEN in source.slots:
        taken = source.slots[TAKEN]
        machine.put(source, TAKEN, const(taken.value + 1 if isinstance(taken, Host) and taken.known else 1))
    default = [event.args[1]] if len(event.args) > 1 else []
    if isinstance(event.args[0] if event.args else None, Instance):
        found = event.args[0].cls.find("__next__")  # type: ignore[attr-defined]
        if found:
            return machine.call(machine.attribute(event.args[0], "__next__", event.at), [], {}, event.at)
    return join(*values[:1], *default) if values else UNKNOWN


def _super(machine: Machine, event: ev.CallEvent) -> Value:
    frame = machine.frame
    receiver, owner = frame.receiver, frame.owner
    if isinstance(receiver, (Instance, ClassValue)) and owner is not None:
        made = External("super", machine.site(event.at), machine.clock)
        made.facts = {"receiver": receiver, "owner": owner}
        return made
    return UNKNOWN


def _type(machine: Machine, event: ev.CallEvent) -> Value:
    value = event.args[0] if event.args else UNKNOWN
    if isinstance(value, Instance):
        return ClassValue(value.cls)
    return Symbol(value.name) if isinstance(value, External) else UNKNOWN


def _sum(machine: Machine, event: ev.CallEvent) -> Value:
    values = iterated(machine, event.args[0], event.at) if event.args else []
    tensors = [one for value in values for one in alternatives(value) if isinstance(one, Tensor)]
    if tensors:
        result = machine.elementwise(tuple(tensors), event.at)
        machine.happen(ev.OpEvent, event.at, "+", tuple(tensors), result)
        return result
    return _hosts("sum", event)


def _globals(machine: Machine, event: ev.CallEvent) -> Value:
    return machine.module_scope(machine.frame.module)


def _none(machine: Machine, event: ev.CallEvent) -> Value:
    return NONE


def _extreme(machine: Machine, event: ev.CallEvent) -> Value:
    """`min`, `max`, `any`, `all`, `sorted` compare elements on the host."""
    name = event.name.partition(".")[2]
    values = (
        list(event.args) if len(event.args) > 1 else (iterated(machine, event.args[0], event.at) if event.args else [])
    )
    key = event.keywords.get("key")
    compared = values if key is None else [machine.call(key, [one], {}, event.at) for one in values]
    tensors = [one for one in compared if isinstance(one, Tensor)]
    if key is not None and name in ("min", "max") and not tensors:
        return join(*values) if values else UNKNOWN
    if tensors and len(values) > 1:
        machine.happen(ev.CompareEvent, event.at, name, tuple(compared))
        return (
            tensors[0]
            if name in ("min", "max")
            else (
                Host("bool", marks=frozenset({"data"}))
                if name in ("any", "all")
                else machine.items("list", values, event.at, exact=False)
            )
        )
    if name == "sorted":
        return _same_items(machine, event)
    if name in ("any", "all"):
        return Host("bool")
    if name in ("min", "max") and len(event.args) == 1 and all(isinstance(one, Unknown) for one in values):
        return Host("any")  # of a row that is not known: a number, as a rule
    if len(event.args) == 1 and values and all(isinstance(one, Host) for one in values):
        inner = [one for one in values if isinstance(one, Host)]
        origins = frozenset(cell for one in inner for cell in one.origins) | machine.origins(event.args[0])
        if (
            all(one.known for one in inner)
            and isinstance(event.args[0], Items)
            and event.args[0].exact
            and len(inner) == len(event.args[0].slots)
        ):
            try:
                best = (min if name == "min" else max)(one.value for one in inner)
                return Host(type(best).__name__, best, origins)
            except TypeError:
                pass
        return Host(inner[0].kind, origins=origins, marks=frozenset(mark for one in inner for mark in one.marks))
    return _hosts(name, event)


_BUILTINS: dict[str, Callable[[Any, ev.CallEvent], Value]] = {
    "len": _len, "isinstance": _isinstance, "getattr": _getattr, "hasattr": _hasattr, "setattr": _setattr,
    "range": _range_made,
    "enumerate": _enumerate, "zip": _zip, "list": _same_items, "tuple": _same_items, "set": _same_items,
    "frozenset": _same_items,
    "sorted": _extreme, "reversed": _same_items, "iter": _same_items, "dict": _dict, "map": _map, "next": _next,
    "super": _super, "type": _type,
    "sum": _sum, "print": _none, "globals": _globals, "min": _extreme, "max": _extreme, "any": _extreme, "all": _extreme,
}  # fmt: skip

__all__ = [
    "Args",
    "Closure",
    "ModuleValue",
    "Partial",
    "Words",
    "Wrapped",
    "builtin",
    "example",
    "is_instance",
    "iterated",
]
