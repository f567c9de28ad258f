"""What the methods of lists, dicts, sets and texts do to abstract values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow.pylib import Words, iterated, keys_of
from graphlint.flow.values import (
    NO,
    NONE,
    REST,
    UNKNOWN,
    Holder,
    Host,
    Items,
    Mapping,
    Tensor,
    Value,
    const,
    join,
)

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine


def method(machine: Machine, receiver: Value, name: str, args: list[Value], words: Words, at: ir.Span) -> Value:
    if isinstance(receiver, Items):
        return _items_method(machine, receiver, name, args, words, at)
    if isinstance(receiver, Mapping):
        return _mapping_method(machine, receiver, name, args, words, at)
    if isinstance(receiver, Host):
        return _host_method(machine, receiver, name, args, at)
    return UNKNOWN


def _items_method(machine: Machine, items: Items, name: str, args: list[Value], words: Words, at: ir.Span) -> Value:
    if name in ("append", "add", "appendleft") and args:
        machine.happen(ev.MutateEvent, at, items, name, tuple(args))
        append(machine, items, args[0])
        return NONE
    if name in ("extend", "update") and args:
        machine.happen(ev.MutateEvent, at, items, name, tuple(args))
        for one in iterated(machine, args[0], at):
            append(machine, items, one)
        return NONE
    if name == "insert" and len(args) > 1:
        machine.happen(ev.MutateEvent, at, items, name, tuple(args))
        append(machine, items, args[1])
        return NONE
    if name in ("pop", "popleft"):
        machine.happen(ev.MutateEvent, at, items, name, tuple(args))
        values = items.values
        if not values:
            return UNKNOWN
        if items.exact and not args and name == "pop":
            machine.drop(items, len(values) - 1)
            return values[-1]
        return join(*values)
    if name in ("clear", "remove", "sort", "reverse", "discard"):
        machine.happen(ev.MutateEvent, at, items, name, tuple(args))
        if name == "clear":
            for key in list(items.slots):
                machine.drop(items, key)
        return NONE
    if name == "copy":
        return machine.items(items.kind, items.values, at, items.exact)
    if items.fields and name == "_replace":
        made = machine.items(
            items.kind,
            [words.get(field, items.slots.get(index, UNKNOWN)) for index, field in enumerate(items.fields)],
            at,
        )
        made.fields = items.fields
        return made
    if items.fields and name == "_asdict":
        mapping = Mapping(machine.site(at), machine.tick())
        mapping.slots.update({field: items.slots.get(index, UNKNOWN) for index, field in enumerate(items.fields)})
        return mapping
    if name in ("values", "indices") and items.kind == "minmax":
        return items.slots[0 if name == "values" else 1]
    if name in ("index", "count"):
        for one in items.values + args:
            if isinstance(one, Tensor):
                machine.happen(ev.CompareEvent, at, "in", (one, *args))
                break
        return Host("int")
    if name == "numel" or name == "count":
        return Host("int", marks=frozenset({"shape"}))
    return UNKNOWN


def append(machine: Machine, items: Items, value: Value) -> None:
    """Adds at the end; after eight the list is summed up."""
    machine.grown.append(items)
    if items.exact and len(items.slots) < 8:
        machine.put(items, len(items.slots), value)
    else:
        items.exact = False
        old = items.slots.get(REST)
        machine.put(items, REST, value if old is None else join(old, value))


def _mapping_method(
    machine: Machine, mapping: Mapping, name: str, args: list[Value], words: Words, at: ir.Span
) -> Value:
    slots = mapping.slots
    if name in ("get", "pop", "setdefault") and args:
        return _lookup(machine, mapping, name, args, at)
    if name == "items":
        pairs: list[Value] = [
            machine.items(
                "tuple",
                [
                    const(key) if key != REST and not isinstance(key, tuple) else UNKNOWN,
                    machine.read(mapping, key, one, at),
                ],
                at,
            )
            for key, one in slots.items()
        ]
        return machine.items("list", pairs, at, exact=REST not in slots) if pairs else machine.items("list", [], at)
    if name == "values":
        values = [machine.read(mapping, key, one, at) for key, one in slots.items()]
        return machine.items("list", values, at, exact=REST not in slots)
    if name == "keys":
        return machine.items("list", keys_of(mapping), at, exact=REST not in slots)
    if name == "update":
        machine.happen(ev.MutateEvent, at, mapping, name, tuple(args))
        if args and isinstance(args[0], Mapping):
            for key, one in args[0].slots.items():
                machine.write(mapping, key, one, at, "update")
        for key, one in words.items():
            machine.write(mapping, key, one, at, "update")
        return NONE
    if name in ("clear", "popitem"):
        machine.happen(ev.MutateEvent, at, mapping, name, tuple(args))
        gone = join(*slots.values()) if slots else UNKNOWN
        if name == "clear":
            for key in list(slots):
                machine.drop(mapping, key)
            return NONE
        return machine.items("tuple", [UNKNOWN, gone], at)
    if name == "copy":
        made = Mapping(machine.site(at), machine.tick())
        made.slots.update(slots)
        return made
    if name == "move_to_end":
        return NONE
    return UNKNOWN


def _lookup(machine: Machine, mapping: Mapping, name: str, args: list[Value], at: ir.Span) -> Value:
    key = machine.key(args[0])
    default = args[1] if len(args) > 1 else NONE
    slots = mapping.slots
    known = key is not NO and key in slots
    if known:
        found = machine.read(mapping, key, slots[key], at)
        if name == "pop":
            machine.happen(ev.MutateEvent, at, mapping, name, tuple(args))
            machine.drop(mapping, key)
        return found
    if name == "setdefault":
        machine.write(mapping, REST if key is NO else key, default, at)
        return join(default, *slots.values())
    if key is not NO and REST not in slots:
        # a function seen by itself does not know what others have put into a dictionary before
        return default if machine.whole or name != "get" else join(default, UNKNOWN)
    if name == "pop":
        machine.happen(ev.MutateEvent, at, mapping, name, tuple(args))
    if not slots:
        return default if machine.whole or name != "get" else join(default, UNKNOWN)
    return join(*list(slots.values())[-3:], default)


def remove(machine: Machine, holder: Holder, index: Value, at: ir.Span) -> None:
    """`del holder[index]`."""
    key = machine.key(index)
    machine.happen(ev.MutateEvent, at, holder, "del", (index,))
    if key is not NO:
        machine.drop(holder, key)


def _host_method(machine: Machine, host: Host, name: str, args: list[Value], at: ir.Span) -> Value:
    if host.kind == "str":
        if name == "format":
            for one in args:
                machine.happen(ev.FormatEvent, at, one)
        folded = _folded(machine, host, name, args, at)
        if folded is not None:
            return folded
        if name == "format":
            return Host("str")
        if name in ("startswith", "endswith", "isdigit"):
            if host.known and args and isinstance(args[0], Host) and args[0].known:
                return const(bool(getattr(str(host.value), name)(args[0].value)))
            return Host("bool")
        if name == "join" and args:
            return Host("str")
        return Host("str") if name in ("lower", "upper", "strip", "replace") else UNKNOWN
    if name in ("numel",):
        return Host("int", origins=host.origins, marks=host.marks | {"shape"})
    if host.kind == "ndarray":
        return (
            Host("ndarray", origins=host.origins, marks=host.marks)
            if name != "item"
            else Host("any", origins=host.origins, marks=host.marks)
        )
    return Host("any", origins=host.origins, marks=host.marks)


_PURE_TEXT = frozenset({
    "split", "rsplit", "lower", "upper", "strip", "lstrip", "rstrip", "replace", "title", "partition", "rpartition",
    "removeprefix", "removesuffix", "startswith", "endswith", "isdigit", "count", "find", "format",
})  # fmt: skip


def _folded(machine: Machine, host: Host, name: str, args: list[Value], at: ir.Span) -> Value | None:
    """What a method of a known text gives for known arguments."""
    known = all(isinstance(one, Host) and one.known for one in args)
    if name not in _PURE_TEXT or not host.known or not known:
        return None
    try:
        made = getattr(str(host.value), name)(*[one.value for one in args if isinstance(one, Host)])
    except (TypeError, ValueError, LookupError):  # Python would refuse as well
        return None
    if isinstance(made, (list, tuple)):
        return machine.items(type(made).__name__, [const(one) for one in made], at)
    return Host(type(made).__name__, made, host.origins, host.marks)
