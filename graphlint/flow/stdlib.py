"""What `operator`, `itertools` and `functools` do to abstract values: operators as functions, loops as iterators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow.pylib import class_names, is_instance
from graphlint.flow.values import (
    NONE,
    UNKNOWN,
    Bound,
    Closure,
    External,
    Host,
    Instance,
    Items,
    Mapping,
    Partial,
    Symbol,
    Value,
    Wrapped,
    alternatives,
    const,
    join,
)

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine

_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@",
    "and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
    "iadd": "+", "isub": "-", "imul": "*", "itruediv": "/",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "is_": "is", "is_not": "is not",
}  # fmt: skip
MAX_ITEMS = 8


def _operator(machine: Machine, event: ev.CallEvent) -> Value:
    """`operator.gt(a, b)` is `a > b`."""
    op = _BINARY[event.name.rpartition(".")[2]]
    if len(event.args) != 2:
        return UNKNOWN
    return machine.compare(op, event.args[0], event.args[1], event.at)


def _truth(machine: Machine, event: ev.CallEvent) -> Value:
    """`operator.truth(a)`, `operator.not_(a)`."""
    value = event.args[0] if event.args else UNKNOWN
    machine.happen(ev.TestEvent, event.at, "not", value)
    known = machine.truth(value)
    if known is None:
        return Host("bool", origins=machine.origins(value), marks=machine.marks(value))
    return const(known == event.name.endswith("truth"))


def _getter(machine: Machine, event: ev.CallEvent) -> Value:
    """`operator.attrgetter("a")`, `itemgetter(0)`, `methodcaller("f", x)`: called later with the object."""
    made = External(event.name, machine.site(event.at), machine.tick())
    made.args, made.keywords = event.args, dict(event.keywords)
    return made


def _get(machine: Machine, event: ev.CallEvent) -> Value:
    """The call of such a getter."""
    getter = event.receiver
    if not isinstance(getter, External) or not getter.args or not event.args:
        return UNKNOWN
    obj, first = event.args[0], getter.args[0]
    if "itemgetter" in getter.name:
        return _element(machine, obj, first, event.at)
    if not (isinstance(first, Host) and isinstance(first.value, str)):
        return UNKNOWN
    for part in first.value.split("."):
        obj = machine.attribute(obj, part, event.at)
    if "methodcaller" in getter.name:
        return machine.call(obj, list(getter.args[1:]), dict(getter.keywords), event.at)
    return obj


def _element(machine: Machine, obj: Value, index: Value, at: ir.Span) -> Value:
    """`obj[index]`, as if written."""
    return machine.subscript(obj, index, ir.Subscript(at, ir.Name(at, ""), ir.Name(at, "")))


def _getitem(machine: Machine, event: ev.CallEvent) -> Value:
    return _element(machine, event.args[0], event.args[1], event.at) if len(event.args) == 2 else UNKNOWN


# --- itertools -------------------------------------------------------------------------------------------------------


def _iterator(machine: Machine, values: list[Value], at: ir.Span, exact: bool = True) -> Value:
    return machine.items(
        "iterator", values[:MAX_ITEMS] or ([] if exact else [UNKNOWN]), at, exact and len(values) <= MAX_ITEMS
    )


def _exact(*sources: Value) -> bool:
    return all(isinstance(one, Items) and one.exact for one in sources)


def _chain(machine: Machine, event: ev.CallEvent) -> Value:
    """`chain(a, b)`, `chain.from_iterable(lists)`."""
    spread = event.name.endswith("from_iterable")
    sources = machine.iterate(event.args[0], event.at) if spread and event.args else list(event.args)
    values = [one for source in sources for one in machine.iterate(source, event.at)]
    return _iterator(machine, values, event.at, _exact(*sources) and (not spread or _exact(*event.args)))


def _zip_longest(machine: Machine, event: ev.CallEvent) -> Value:
    fill = event.keywords.get("fillvalue", NONE)
    columns = [machine.iterate(one, event.at) for one in event.args]
    count = max((len(column) for column in columns), default=0)
    rows: list[Value] = [
        machine.items("tuple", [column[index] if index < len(column) else fill for column in columns], event.at)
        for index in range(count)
    ]
    return _iterator(machine, rows, event.at, _exact(*event.args))


def _pairwise(machine: Machine, event: ev.CallEvent) -> Value:
    values = machine.iterate(event.args[0], event.at) if event.args else []
    pairs: list[Value] = [machine.items("tuple", list(pair), event.at) for pair in itertools.pairwise(values)]
    return _iterator(machine, pairs, event.at, _exact(*event.args))


def _product(machine: Machine, event: ev.CallEvent) -> Value:
    rows: list[list[Value]] = [[]]
    for source in event.args:
        rows = [[*row, one] for row in rows for one in machine.iterate(source, event.at)][:MAX_ITEMS]
    return _iterator(machine, [machine.items("tuple", row, event.at) for row in rows], event.at, _exact(*event.args))


def _islice(machine: Machine, event: ev.CallEvent) -> Value:
    values = machine.iterate(event.args[0], event.at) if event.args else []
    return _iterator(machine, values, event.at, exact=False) if values else UNKNOWN


def _again(machine: Machine, event: ev.CallEvent) -> Value:
    """`repeat(x, n)`, `cycle(xs)`."""
    if not event.args:
        return UNKNOWN
    values = [event.args[0]] if event.name.endswith("repeat") else machine.iterate(event.args[0], event.at)
    times = event.args[1].value if len(event.args) > 1 and isinstance(event.args[1], Host) else None
    if isinstance(times, int) and 0 <= times <= MAX_ITEMS:
        return _iterator(machine, values * times, event.at)
    return _iterator(machine, values, event.at, exact=False)


def _starmap(machine: Machine, event: ev.CallEvent) -> Value:
    if len(event.args) < 2:
        return UNKNOWN
    rows = machine.iterate(event.args[1], event.at)
    values = [
        machine.call(event.args[0], row.values if isinstance(row, Items) and row.exact else [UNKNOWN], {}, event.at)
        for row in rows
    ]
    return _iterator(machine, values, event.at, _exact(event.args[1]))


def _filter(machine: Machine, event: ev.CallEvent) -> Value:
    """`filter(f, xs)` tests what `f` says of each."""
    if len(event.args) < 2:
        return UNKNOWN
    kept, exact = [], _exact(event.args[1])
    for one in machine.iterate(event.args[1], event.at):
        answer = one if isinstance(event.args[0], Host) else machine.call(event.args[0], [one], {}, event.at)
        machine.happen(ev.TestEvent, event.at, "comprehension", answer)
        known = machine.truth(answer)
        exact = exact and known is not None
        if known is not False:
            kept.append(one)
    return _iterator(machine, kept, event.at, exact)


def _accumulate(machine: Machine, event: ev.CallEvent) -> Value:
    values = machine.iterate(event.args[0], event.at) if event.args else []
    func = event.args[1] if len(event.args) > 1 else Symbol("operator.add")
    found: list[Value] = []
    for one in values:
        found.append(machine.call(func, [found[-1], one], {}, event.at) if found else one)
    return _iterator(machine, found, event.at, _exact(*event.args[:1]))


# --- functools -------------------------------------------------------------------------------------------------------


def _reduce(machine: Machine, event: ev.CallEvent) -> Value:
    """`functools.reduce(f, items, start)`: one call for each item."""
    if len(event.args) < 2:
        return UNKNOWN
    values = machine.iterate(event.args[1], event.at)
    result = event.args[2] if len(event.args) > 2 else (values.pop(0) if values else UNKNOWN)
    for one in values:
        result = machine.call(event.args[0], [result, one], {}, event.at)
    return result


def _dispatch(machine: Machine, event: ev.CallEvent) -> Value:
    """`singledispatch(f)`: the first argument's class says which function runs."""
    return Wrapped(event.args[0], "dispatch", {"cases": []}) if event.args else UNKNOWN


def register(machine: Machine, func: Wrapped, args: list[Value], at: ir.Span) -> Value:
    """`f.register`, as `@f.register`, `@f.register(C)` and `f.register(C, g)`."""
    target = args[-1] if args else UNKNOWN
    if len(args) == 1 and not isinstance(target, Closure):
        made = External("functools.singledispatch.register", machine.site(at), machine.tick())
        made.facts.update({"func": func, "cls": target})
        return made
    name = ""
    if len(args) == 2:
        name = next(iter(class_names(args[0])), "")
    elif isinstance(target, Closure) and target.func.params:
        annotation = target.func.params[0].annotation
        name = (
            annotation.name
            if isinstance(annotation, ir.Attr)
            else (annotation.id if isinstance(annotation, ir.Name) else "")
        )
    func.facts["cases"].append((name, target))
    return target


def dispatched(machine: Machine, func: Wrapped, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    """The call of such a function."""
    first = args[0] if args else UNKNOWN
    found: list[Value] = []
    for one in alternatives(first):
        answers = [(is_instance(one, name), case) for name, case in func.facts["cases"] if name]
        sure = [case for answer, case in answers if answer is True]
        found += sure[:1] or [func.func, *(case for answer, case in answers if answer is None)]
    return machine.call(join(*found), args, keywords, at)


# --- named tuples, dataclasses, methods made by hand -----------------------------------------------------------------


def named_tuple(machine: Machine, made: External, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
    """A call of a class that `collections.namedtuple("Name", "a b")` made."""
    wanted = made.args[1] if len(made.args) > 1 else made.keywords.get("field_names", UNKNOWN)
    if isinstance(wanted, Items) and wanted.exact:
        fields = [one.value for one in wanted.values if isinstance(one, Host) and isinstance(one.value, str)]
    elif isinstance(wanted, Host) and isinstance(wanted.value, str):
        fields = wanted.value.replace(",", " ").split()
    else:
        return UNKNOWN
    values = [args[index] if index < len(args) else keywords.get(field, UNKNOWN) for index, field in enumerate(fields)]
    found = machine.items("tuple", values, at)
    found.fields = tuple(fields)
    return found


def changed(machine: Machine, obj: Instance, changes: dict[str, Value], at: ir.Span) -> Value:
    """`dataclasses.replace(obj, a=1)`, `obj._replace(a=1)`: a copy with other values."""
    made = Instance(obj.cls, machine.site(at), machine.tick(), obj.synthetic)
    made.slots.update(obj.slots)
    made.slots.update({key: value for key, value in changes.items() if key != "**"})
    return made


def as_mapping(machine: Machine, obj: Instance, at: ir.Span) -> Value:
    """`dataclasses.asdict(obj)`, `vars(obj)`."""
    made = Mapping(machine.site(at), machine.tick())
    made.slots.update(
        {key: value for key, value in obj.slots.items() if isinstance(key, str) and not key.startswith("<")}
    )
    return made


def _replace(machine: Machine, event: ev.CallEvent) -> Value:
    found = [
        changed(machine, one, event.keywords, event.at)
        for value in event.args[:1]
        for one in alternatives(value)
        if isinstance(one, Instance)
    ]
    return join(*found) if found else UNKNOWN


def _asdict(machine: Machine, event: ev.CallEvent) -> Value:
    first = event.args[0] if event.args else UNKNOWN
    return as_mapping(machine, first, event.at) if isinstance(first, Instance) else UNKNOWN


def _field(machine: Machine, event: ev.CallEvent) -> Value:
    """`dataclasses.field(default_factory=list)`: evaluated for each object, so the default is made here."""
    factory = event.keywords.get("default_factory")
    if factory is not None:
        return machine.call(factory, [], {}, event.at)
    return event.keywords.get("default", UNKNOWN)


def _method_type(machine: Machine, event: ev.CallEvent) -> Value:
    """`types.MethodType(f, obj)`: a method of this object only."""
    if len(event.args) == 2 and isinstance(event.args[0], Closure):
        return Bound(event.args[1], event.args[0])
    return Partial(event.args[0], tuple(event.args[1:]), {}) if event.args else UNKNOWN


HANDLERS: dict[str, Callable[[Any, ev.CallEvent], Value]] = {
    **{f"operator.{name}": _operator for name in _BINARY},
    "operator.truth": _truth, "operator.not_": _truth, "operator.getitem": _getitem,
    **{f"operator.{name}": _getter for name in ("attrgetter", "itemgetter", "methodcaller")},
    **{f"operator.{name}.__call__": _get for name in ("attrgetter", "itemgetter", "methodcaller")},
    "itertools.chain": _chain, "itertools.chain.from_iterable": _chain, "itertools.zip_longest": _zip_longest,
    "itertools.pairwise": _pairwise,
    "itertools.product": _product, "itertools.islice": _islice, "itertools.repeat": _again, "itertools.cycle": _again,
    "itertools.starmap": _starmap, "itertools.accumulate": _accumulate, "builtins.filter": _filter,
    "functools.reduce": _reduce, "functools.singledispatch": _dispatch,
    "collections.namedtuple": _getter, "dataclasses.replace": _replace, "dataclasses.asdict": _asdict,
    "builtins.vars": _asdict, "dataclasses.field": _field,
    "types.MethodType": _method_type,
}  # fmt: skip
