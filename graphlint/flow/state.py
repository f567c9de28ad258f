"""The state of one walk: scopes, the journal that takes branches back, the clock, the open captures, the budget.

A walk ends because everything is bounded: the number of statements (`Budget`), the depth of calls, the times one
function is
entered with like arguments, the rounds of a loop (two, or the known length up to a few), the size of a Choice. What is
cut off by a bound is counted in
`unresolved` and shown with `--verbose`; it is never taken for clean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow.values import (
    REST,
    UNKNOWN,
    Cell,
    ClassValue,
    Closure,
    External,
    Holder,
    Host,
    Instance,
    Items,
    Key,
    Mapping,
    Scope,
    Storage,
    Tensor,
    Value,
    Wrapped,
    alternatives,
    join,
)
from graphlint.link import ClassInfo, Module, Project
from graphlint.regions.region import Region

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine

NORMAL, RETURN, RAISE, BREAK, CONTINUE = range(5)

MAX_STEPS = 6_000  # statements and calls of a walk, before it captures anything
MAX_ENTRY_STEPS = 16_000  # more of them for a program's own entry, once it captures
MAX_REGION_STEPS = 3_000  # more for a walk from the function around a region, once it captures
MAX_DEPTH = 40
MAX_ROUNDS = 4
MAX_ENTRIES = 3  # times one function may be on the stack


class OutOfBudget(Exception):
    """The walk is longer than its bound."""


class State:
    """What a walk knows at one moment. The parts of the machine (statements, expressions, calls) build on it."""

    def __init__(self, project: Project, target: tuple[int, int], declared: frozenset[str] = frozenset()) -> None:
        self.project = project
        self.target = target
        self.declared = declared
        self.clock = 0
        self.events: list[ev.Event] = []
        self.captures: list[ev.Capture] = []
        self.open: list[ev.Capture] = []
        self.streams: list[Value] = []
        self.frame: ev.Frame = None  # type: ignore[assignment]  # set by the first module that runs
        self.journal: list[tuple[dict[Any, Any], Any, Any]] | None = None
        self.doubt = 0  # how many branches that may not be taken enclose the current statement
        self.budget = MAX_STEPS
        self.unresolved: dict[tuple[str, int], str] = {}
        self.memo: dict[Any, Any] = {}
        self.whole = False  # the walk began at a program's own entry, so what was not seen did not happen
        self.autocast: list[tuple[External, int]] = []  # with the clock of their entry
        self.default_device = "cpu"
        self.known_regions: dict[
            tuple[str, ir.Span], Region
        ] = {}  # what the region finder saw, by the span of its statement or call
        self.written_in_capture: set[Cell] = (
            set()
        )  # cells that some capture wrote, or that hold what one made: reading them is an event from then on
        self.gradients = Holder()  # id of a parameter's storage -> its gradient
        self.compiled: list[Wrapped] = []  # everything that torch.compile was given, in order
        self.hooks: list[tuple[str, Value, Value]] = []
        self.functions: list[ClassInfo] = []  # custom autograd functions whose backward has not run yet
        self.imported_modules: set[Module] = set()
        self.patched: set[str] = set()  # names that were written to some class after its definition
        self.threads: list[tuple[Value, int, list[ev.Event]]] = []
        self.default_stream: External | None = None
        self.veils = 0  # how many context managers are open of which nothing is known: one may change the stream
        self.grad_mode = True  # autograd records
        self.made_class: Value | None = None  # the class that a metaclass is being told of
        self.grown: list[Cell | Holder] = []  # counters and containers, in the order in which they grew
        self.longer: set[Holder] = set()  # containers that grew in a loop with more rounds than were walked
        self.frozen: set[Storage] = set()  # parameters that need no gradient, one by one

    @property
    def machine(self) -> Machine:
        """The whole of which this is a part: only `Machine` is ever made, and the library models take one."""
        return cast("Machine", self)

    # -- time and events

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    @property
    def capture(self) -> ev.Capture | None:
        return self.open[-1] if self.open else None

    def happen(self, kind: type[ev.Event], at: ir.Span, *facts: Any, **more: Any) -> Any:
        """Records an event here and now."""
        event = kind(self.tick(), at, self.frame, self.capture, not self.doubt, *facts, **more)
        self.events.append(event)
        return event

    def site(self, at: ir.Span) -> tuple[str, int]:
        return (self.frame.module.path, at[0])

    def miss(self, at: ir.Span, why: str) -> None:
        """Counts what could not be resolved inside a capture."""
        if self.open:
            self.unresolved.setdefault((self.frame.module.path, at[0]), why)

    # -- making values

    def storage(self, at: ir.Span) -> Storage:
        return Storage(self.site(at), self.capture, self.tick())

    def tensor(self, at: ir.Span, device: str = "?", dtype: str = "?", rank: int | None = None, **more: Any) -> Tensor:
        if not self.grad_mode:
            more["grad"] = False
        return Tensor(device, dtype, rank, self.storage(at), **more)

    def items(self, kind: str, values: Sequence[Value], at: ir.Span, exact: bool = True) -> Items:
        made = Items(kind, values if exact else [], self.site(at), self.tick())
        made.exact = exact
        made.made_in = self.capture
        if not exact:
            made.slots[REST] = join(*values) if values else UNKNOWN
        return made

    # -- writing, with the journal

    def put(self, holder: Holder, key: Key, value: Value) -> None:
        """Writes a slot; inside a branch that may not be taken, the old value can be brought back."""
        slots = holder.slots
        if self.journal is not None:
            self.journal.append((slots, key, slots.get(key, _MISSING)))
        slots[key] = value

    def drop(self, holder: Holder, key: Key) -> None:
        slots = holder.slots
        if key in slots:
            if self.journal is not None:
                self.journal.append((slots, key, slots[key]))
            del slots[key]

    def write(self, holder: Holder, key: Key, value: Value, at: ir.Span, how: str = "assign") -> None:
        """A write that the checks may want to see."""
        old = holder.slots.get(key)
        self.put(holder, key, value)
        if old is None and isinstance(holder, Mapping):
            self.grown.append(holder)
        if isinstance(value, Tensor) and value.storage.cell is None and not isinstance(holder, Scope):
            value.storage.cell = Cell(holder, key)
        if isinstance(holder, Scope) and not (self.captures or holder.outer is None):
            return  # a local of a function, before anything was captured: nobody asks
        cell = Cell(holder, key)
        if self.open and holder.born < self.open[-1].begin:
            self.written_in_capture.add(cell)
        elif (
            not self.open
            and isinstance(value, Tensor)
            and (value.storage.pool is not None or value.storage.via is not None)
        ):
            self.written_in_capture.add(cell)  # a result that the next replay overwrites: who reads it later?
        self.happen(ev.WriteEvent, at, cell, old, value, how, self.frame.loops > 0)

    def fork(self, *branches: Callable[[], int]) -> list[int]:
        """Runs each branch from the same state and joins what they leave; a branch that ends the function or loop
        leaves only what others can see."""
        outer, here = self.journal, self.frame.scope.slots
        changes: list[dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]]] = []
        statuses: list[int] = []
        base: dict[tuple[int, Any], Any] = {}
        depth = len(self.open), len(self.streams)
        self.doubt += 1
        try:
            for branch in branches:
                self.journal = []
                status = branch()
                statuses.append(status)
                journal, self.journal = self.journal, None
                final: dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]] = {}
                for slots, key, _ in journal:
                    final[(id(slots), key)] = (slots, key, slots.get(key, _MISSING))
                for slots, key, old in reversed(journal):
                    base[(id(slots), key)] = old
                    if old is _MISSING:
                        slots.pop(key, None)
                    else:
                        slots[key] = old
                changes.append(final)
                if status != NORMAL:
                    del self.open[depth[0] :], self.streams[depth[1] :]
        finally:
            self.doubt -= 1
            self.journal = outer
        self._merge(changes, statuses, here)
        return statuses

    def _merge(self, changes: list[Any], statuses: list[int], here: dict[Any, Any]) -> None:
        living = [change for change, status in zip(changes, statuses, strict=True) if status == NORMAL]
        names: dict[tuple[int, Any], tuple[dict[Any, Any], Any]] = {}
        for change in changes:
            for ident, (slots, key, _) in change.items():
                names[ident] = (slots, key)
        for ident, (slots, key) in names.items():
            sources = living if slots is here and living else changes
            if slots is here and not living:
                sources = changes
            values = []
            for change in sources:
                value = change[ident][2] if ident in change else slots.get(key, _MISSING)
                if value is not _MISSING:
                    values.append(value)
            if not values:
                if key in slots:
                    self._set(slots, key, _MISSING)
            else:
                self._set(slots, key, join(*values))

    def _set(self, slots: dict[Any, Any], key: Any, value: Any) -> None:
        if self.journal is not None:
            self.journal.append((slots, key, slots.get(key, _MISSING)))
        if value is _MISSING:
            slots.pop(key, None)
        else:
            slots[key] = value

    # -- frames

    def entered(self, frame: ev.Frame) -> _Entered:
        """`with self.entered(frame):` what happens in it happens in that frame."""
        return _Entered(self, frame)

    def on_stack(self, func: object) -> int:
        count, frame = 0, self.frame
        while frame is not None:
            count += frame.func is func
            frame = frame.parent  # type: ignore[assignment]
        return count

    # -- asking values

    def truth(self, value: Value) -> bool | None:
        """Whether Python would take it for true; None when that is not known."""
        answers = {_truth(one) for one in alternatives(value)}
        return answers.pop() if len(answers) == 1 else None


_MISSING: Any = object()


class _Entered:
    """A context manager by hand: a walk enters frames hundreds of thousands of times."""

    __slots__ = ("frame", "outer", "state")

    def __init__(self, state: State, frame: ev.Frame) -> None:
        self.state = state
        self.frame = frame

    def __enter__(self) -> None:
        self.outer = self.state.frame
        self.state.frame = self.frame

    def __exit__(self, *error: object) -> None:
        self.state.frame = self.outer


def _truth(value: Value) -> bool | None:
    if isinstance(value, Host):
        if value.known:
            try:
                return bool(value.value)
            except Exception:  # an odd constant
                return None
        if value.kind in ("device", "dtype"):
            return True
        return None
    if isinstance(value, Items):
        return bool(value.slots) if value.exact else None
    if isinstance(value, Mapping):
        if REST in value.slots:
            return None
        return bool(value.slots)
    if isinstance(value, (Instance, External, Closure, ClassValue)):
        if isinstance(value, Instance) and (value.cls.find("__bool__") or value.cls.find("__len__")):
            return None
        return True
    return None


__all__ = ["BREAK", "CONTINUE", "NORMAL", "RAISE", "RETURN", "Module", "OutOfBudget", "State"]
