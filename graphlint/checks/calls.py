"""Calls that stand in a rule's `[calls]` table, made in a capture."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from graphlint import ir, rulebook
from graphlint.checks.base import Report, Walk, at, constant, on_device
from graphlint.checks.keys import statements, words_of
from graphlint.flow import events as ev
from graphlint.flow import modules
from graphlint.flow.values import (
    READ,
    UNKNOWN,
    Bound,
    External,
    Host,
    Instance,
    Tensor,
    Value,
    alternatives,
    tensors_in,
)
from graphlint.flow.values import Mapping as Dict
from graphlint.rulebook import ANY, REST, TENSOR, CallFact

# rules whose lines name the call, and whose judgement needs more than the name
JUDGED = frozenset(
    {
        "host-copy",
        "host-index",
        "scalar-index",
        "seed-in-region",
        "unregistered-generator",
        "not-capturable",
        "unfused-scaler",
        "recorded-stream",
        "first-collective",
        "scheduler-in-region",
        "frozen-clock",
        "cpu-collective",
    }
)
# methods that tell a tensor from other objects by their name alone
ONLY_TENSORS = frozenset({"item", "cpu", "is_nonzero", "masked_select"})


_NUMBERS = frozenset({"builtins.bool", "builtins.int", "builtins.float", "builtins.complex"})


def listed_call(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """The call is a line of some rule's table."""
    found = fact_for(event, walk, rulebook.load())
    if found is None or found.rule in JUDGED:
        return
    opened = event.capture
    if opened is not None and opened.at == event.at and opened.frame.func is event.frame.func:
        return  # the call that opened the capture, on another graph that it may be
    if event.name in _NUMBERS and not any(on_device(one) is not None for one in event.args):
        return  # `bool(list_of_tensors)` asks for its length
    if _filled_before(event, walk):
        return
    if found.rule == "host-sync" and event.clock in _lengths(walk):
        yield at(
            event,
            "varlen-host-length",
            why="reads on the host the length that an attention over packed sequences is launched with",
        )
        return
    yield at(event, found.rule, why=found.why)


def _filled_before(event: ev.CallEvent, walk: Walk) -> bool:
    """Whether it is what a cache does when it misses, and the same line has filled the cache before the capture."""
    function = event.frame.func
    if event.capture is None or function is None:
        return False
    above = [stmt for stmt in statements(function.body) if stmt.at[0] < event.at[0]]
    if event.sure and not any(isinstance(stmt, ir.Return) for stmt in above):
        return False  # nothing in the function leaves it out
    asked = {name for stmt in above for name in words_of(stmt)}
    stores = {name for stmt in statements(function.body) if stmt not in above for name in _stored_in(stmt)}
    if not asked & stores:
        return False  # it does not look into the cache first
    for earlier in walk.of(ev.CallEvent):
        if earlier.clock >= event.capture.begin:
            return False
        if earlier.capture is None and earlier.at == event.at and earlier.frame.func is function:
            frame = earlier.frame
            if any(
                one.frame is frame and one.clock > earlier.clock and isinstance(one.cell.holder, Dict)
                for one in walk.of(ev.WriteEvent)
            ):
                return True
    return False


def _stored_in(stmt: ir.Stmt) -> Iterator[str]:
    """The name of the container that an assignment to an element fills."""
    for target in stmt.targets if isinstance(stmt, ir.Assign) else ():
        if isinstance(target, ir.Subscript) and isinstance(target.obj, (ir.Name, ir.Attr)):
            yield target.obj.id if isinstance(target.obj, ir.Name) else target.obj.name


def _lengths(walk: Walk) -> frozenset[int]:
    """The clocks of the reads whose number ends as the length of an attention over packed sequences."""
    if walk.lengths is None:
        walk.lengths = frozenset(clock for event in walk.direct(ev.CallEvent) for clock in _reads_in(event, walk))
    return walk.lengths


def _reads_in(event: ev.CallEvent, walk: Walk) -> set[int]:
    """The reads behind those arguments that the table of `varlen-host-length` wants no tensor for."""
    found: set[int] = set()
    reads = {id(one): clock for one in (*event.args, *event.keywords.values()) if (clock := _read_by(one)) is not None}
    for value in reads:
        args = [
            Tensor("cuda") if id(one) == value else (one if id(one) not in reads else UNKNOWN) for one in event.args
        ]
        words = {
            key: Tensor("cuda") if id(one) == value else (one if id(one) not in reads else UNKNOWN)
            for key, one in event.keywords.items()
        }
        table = _table("varlen-host-length")
        if any(matches(fact, args, words) for name in _names(event) for fact in table.get(name, ())):
            found.add(reads[value])
    return found


def _read_by(value: Value) -> int | None:
    """The clock of the call that read this number from a tensor."""
    for one in alternatives(value):
        if isinstance(one, Host):
            return next((int(mark[len(READ) :]) for mark in sorted(one.marks) if mark.startswith(READ)), None)
    return None


def fact_for(event: ev.CallEvent, walk: Walk, book: rulebook.Rulebook) -> CallFact | None:
    """The line that the call matches, for the torch release that the project targets."""
    for name in _names(event):
        for fact in book.calls.get(name, ()):
            if (
                fact.holds_for(walk.target)
                and matches(fact, event.args, event.keywords)
                and _concerns_device(event, fact)
            ):
                return fact
    return None


def fact_of(event: ev.CallEvent, walk: Walk, rule: str) -> CallFact | None:
    """The line of one rule's table that the call matches, also of a table that a check judges."""
    table = _table(rule)
    if not table:
        return None
    found = (fact for name in _names(event) for fact in table.get(name, ()))
    return next(
        (
            fact
            for fact in found
            if fact.holds_for(walk.target)
            and matches(fact, event.args, event.keywords)
            and _concerns_device(event, fact)
        ),
        None,
    )


@functools.cache
def _table(rule: str) -> dict[str, list[CallFact]]:
    known = rulebook.load().by_name.get(rule)
    table: dict[str, list[CallFact]] = {}
    for fact in known.calls if known is not None else ():
        table.setdefault(fact.name, []).append(fact)
    return table


def _names(event: ev.CallEvent) -> list[str]:
    name = event.name
    if name.startswith("builtins."):
        return [name.partition(".")[2]]
    if name.startswith("?."):
        return [f"torch.Tensor.{name[2:]}"] if name[2:] in ONLY_TENSORS else []
    names = [name]
    if isinstance(event.receiver, Instance):
        method = name.rpartition(".")[2]
        names += [f"{base}.{method}" for base in event.receiver.cls.outside()]
    if modules.is_module(event.receiver) if event.receiver is not None else False:
        names.append(f"torch.nn.Module.{name.rpartition('.')[2]}")
    return names


def _concerns_device(event: ev.CallEvent, fact: CallFact) -> bool:
    """A tensor call matters only for tensors that are not known to lie on the host."""
    if event.name in ("builtins.min", "builtins.max", "builtins.sorted") and "key" in event.keywords:
        return False  # only what the key gives is compared, see `compared_on_host`
    if isinstance(event.receiver, Tensor):
        return on_device(event.receiver) is not None
    if event.name.startswith("?."):
        return True
    if event.name.startswith("torch.") and not event.name.startswith(("torch.cuda.", "torch.distributed.")):
        values = [*event.args, *event.keywords.values()]
        tensors = [one for value in values for one in tensors_in(value)]
        return not tensors or any(one.device in ("cuda", "?") for one in tensors)
    return True


# --- patterns --------------------------------------------------------------------------------------------------------


def matches(fact: CallFact, args: Sequence[Value], keywords: Mapping[str, Value]) -> bool:
    """Whether the arguments look like the ones that the fact describes."""
    if fact.args is None:
        return True
    spread = any(isinstance(one, Bound) and one.func == "*" for one in args) or "**" in keywords
    return _positional(fact.args, list(args), bool(fact.keywords), keywords) and all(
        _keyword(name, wanted, keywords, spread) for name, wanted in fact.keywords
    )


def _positional(patterns: tuple[object, ...], args: list[Value], more: bool, keywords: Mapping[str, Value]) -> bool:
    if not patterns:
        return True
    if patterns[0] == REST and isinstance(patterns[0], str):
        if len(patterns) == 1:
            return True
        return any(_positional(patterns[1:], args[start:], more, keywords) for start in range(len(args) + 1))
    if not args:
        return False
    if not _one(patterns[0], args[0]):
        return False
    if len(patterns) == 1:
        return len(args) == 1 and (more or not keywords or set(keywords) <= {"out", "dim", "as_tuple"})
    return _positional(patterns[1:], args[1:], more, keywords)


def _one(pattern: object, value: Value) -> bool:
    if pattern == ANY and isinstance(pattern, str):
        return True
    if pattern == TENSOR and isinstance(pattern, str):
        return on_device(value) is not None or any(on_device(one) is not None for one in tensors_in(value))
    found = constant(value)
    if isinstance(pattern, str) and isinstance(found, str):
        return found.split(":")[0] == pattern
    return isinstance(value, Host) and value.known and found == pattern and type(found) is type(pattern)


def _keyword(name: str, wanted: object, keywords: Mapping[str, Value], spread: bool) -> bool:
    value = keywords.get(name)
    if wanted is None:
        return not spread and (value is None or (isinstance(value, Host) and value.kind == "none"))
    if value is None:
        return False
    return any(_one(wanted, one) for one in alternatives(value))


__all__ = ["External", "fact_for", "listed_call", "matches"]
