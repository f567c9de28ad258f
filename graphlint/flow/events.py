"""What happened while the flow walked the program, in order: the facts that the checks judge.

An event has a clock (its place in the order of things), a span, the frame it happened in and the capture that was open,
if any. Events in a branch that
may not be taken have `sure` False.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphlint import ir
from graphlint.flow.values import Cell, Holder, Key, Value

if TYPE_CHECKING:
    from graphlint.flow.values import Scope, Storage
    from graphlint.link import ClassInfo, Module


class Frame:
    """One running function: where it was called from, and what it collects."""

    __slots__ = (
        "call_at",
        "depth",
        "func",
        "loop_doubt",
        "loops",
        "module",
        "name",
        "on_yield",
        "owner",
        "parent",
        "parted",
        "receiver",
        "returns",
        "scope",
        "yields",
    )

    def __init__(self, parent: Frame | None, name: str, module: Module, scope: Scope, call_at: ir.Span | None) -> None:
        self.parent = parent
        self.name = name
        self.module = module
        self.scope = scope
        self.call_at = call_at
        self.depth: int = parent.depth + 1 if parent else 0
        self.returns: list[Value] = []
        self.yields: list[Value] = []
        self.on_yield: object = None
        self.receiver: Value | None = None
        self.owner: ClassInfo | None = None
        self.func: ir.Function | None = None
        self.loops = 0
        self.parted = False  # an undecided branch has left it: what follows may not be reached
        self.loop_doubt = 0  # undecided branches around its innermost loop


@dataclass(slots=True, eq=False)
class Capture:
    """One run of one capture region."""

    kind: str  # graph, manual, graphed-callable, compile, ...
    api: str
    at: ir.Span
    frame: Frame
    graph: Holder | None  # the CUDAGraph object
    begin: int
    end: int = 0  # clock at its end; 0 while open
    stream: Value | None = None
    mode: str = "global"
    backward: bool = False  # the backward is captured too
    stack: tuple[
        tuple[Frame, ir.Span, int], ...
    ] = ()  # the frames at its begin, innermost first: frame, span in it, loops that surely come here in each round
    loop: bool = False  # it was begun in a loop of its own function
    sure: bool = True
    doubt: int = 0  # undecided branches around its begin
    memory: Holder | None = None  # the pool: one object for each
    autocast: int = 0  # clock at which an autocast around it was entered with its weight cache on
    tags: set[str] = field(default_factory=set)
    outer: Capture | None = None  # the capture that was open when it began
    callee: str = ""
    alive: frozenset[Storage] = frozenset()  # of tensors whose autograd graph is alive at its begin


@dataclass(slots=True, eq=False)
class Event:
    clock: int
    at: ir.Span
    frame: Frame
    capture: Capture | None
    sure: bool


@dataclass(slots=True, eq=False)
class CallEvent(Event):
    """A call of something outside the project; `name` is qualified (`torch.Tensor.item`, `?.item` when the receiver is
    unknown)."""

    name: str
    receiver: Value | None
    args: tuple[Value, ...]
    keywords: dict[str, Value]
    result: Value


@dataclass(slots=True, eq=False)
class TestEvent(Event):
    """A truth test; `how` is if, while, ternary, assert, not, and/or, comprehension, match, bool."""

    how: str
    value: Value
    differs: bool = True  # the two sides do different work
    otherwise: bool = False  # there is something to do where it is false


@dataclass(slots=True, eq=False)
class CompareEvent(Event):
    """A comparison that Python turns into a bool by itself: a chain, `in`, `not in`."""

    how: str
    values: tuple[Value, ...]


@dataclass(slots=True, eq=False)
class IndexEvent(Event):
    """`obj[index]`, read or (with `stored`) written."""

    obj: Value
    index: Value
    stored: Value | None
    literal: bool = False  # the index is written out (a list display, a number)


@dataclass(slots=True, eq=False)
class FormatEvent(Event):
    """A value is formatted into a string."""

    value: Value


@dataclass(slots=True, eq=False)
class LoopEvent(Event):
    """A `for` over a value."""

    value: Value


@dataclass(slots=True, eq=False)
class WriteEvent(Event):
    """A slot is written: an attribute, a name that a capture may have read, an element of a container."""

    cell: Cell
    old: Value | None
    new: Value
    how: str  # assign, augment, append, del, pop, clear, update
    looped: bool = False  # in a loop of its own function


@dataclass(slots=True, eq=False)
class ReadEvent(Event):
    """In a capture: a value is read from a cell that existed before it."""

    cell: Cell
    value: Value


@dataclass(slots=True, eq=False)
class InplaceEvent(Event):
    """A tensor's memory is written: `copy_`, `fill_`, `x[...] =`; `part` when only a part of it."""

    storage: Storage
    name: str
    source: Value | None
    part: bool


@dataclass(slots=True, eq=False)
class ReplayEvent(Event):
    """A graph is replayed (`graph` None when it is not known which); `names` are the locals of the frames on the stack,
    by function."""

    graph: Holder | None
    stream: Value | None
    names: dict[int, dict[Key, Value]] = field(default_factory=dict)
    guess: bool = False  # one of several graphs, and which was not seen
    alive: frozenset[Storage] | None = (
        None  # at the first replay outside the function that captured: all memory that something still holds
    )


@dataclass(slots=True, eq=False)
class StreamEvent(Event):
    """`with torch.cuda.stream(s)`: `enter` or `leave`."""

    stream: Value
    how: str


@dataclass(slots=True, eq=False)
class OpEvent(Event):
    """A tensor operator written as an operator: `a + b`, `-a`, `a @ b`."""

    op: str
    operands: tuple[Value, ...]
    result: Value


@dataclass(slots=True, eq=False)
class RefuseEvent(Event):
    """The code asks whether a capture is open, and raises because it is."""


@dataclass(slots=True, eq=False)
class EndEvent(Event):
    """A capture ended."""

    ended: Capture


@dataclass(slots=True, eq=False)
class ReturnEvent(Event):
    """A function of the project returned tensors."""

    value: Value
    function: str


@dataclass(slots=True, eq=False)
class MutateEvent(Event):
    """A container changes otherwise than by writing one slot: `list.append` and the like; `holder` is the container."""

    holder: Holder
    name: str
    values: tuple[Value, ...]


@dataclass(slots=True, eq=False)
class MoveEvent(Event):
    """Parameters or buffers of `owner` get new memory: `.to`, `.half`, `load_state_dict(assign=True)`, `p.data =
    ...`."""

    owner: Value
    storages: tuple[Storage, ...]
    how: str
    copied: bool = False  # from host memory to the device
