"""What the flow knows of one value: a small lattice, and objects that live on an abstract heap.

    Unknown      nothing is known
    Host         a Python number, string, device, dtype ...: a constant, or only its kind; where it came from
    (`origins`)
    Tensor       device, dtype class, rank, the storage it looks into
    Holder       what has slots that can be written: an instance, a module, a list, a dict, a scope
    Symbol       something outside the project, by qualified name (`torch.cuda.graph`)
    Closure ...  what can be called
    Choice       one of a few of these

`Host`, `Tensor` and `Symbol` never change; holders do, and only through `Machine.put`, which keeps the journal that
lets
a branch be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Union

from graphlint import ir

if TYPE_CHECKING:
    from graphlint.flow.events import Capture
    from graphlint.link import ClassInfo, Module

Key = Union[str, int, float, bool, None, tuple[Any, ...]]


class _No:
    """Marks the absence of a constant (None is a constant)."""

    def __repr__(self) -> str:
        return "NO"


NO: Final = _No()


class Value:
    """Base of all abstract values."""

    __slots__ = ()


class Unknown(Value):
    """Nothing is known. `text` may say what it was in the source, for messages; `some`: it is not None (a result of
    arithmetic)."""

    __slots__ = ("some", "text")

    def __init__(self, text: str = "", some: bool = False) -> None:
        self.text = text
        self.some = some

    def __repr__(self) -> str:
        return f"Unknown({self.text})"


UNKNOWN: Final = Unknown()
SOMETHING: Final = Unknown(some=True)


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A place that can be written: a slot of a holder. Two cells are one when holder and key are the same."""

    holder: Holder
    key: Key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and other.holder is self.holder and other.key == self.key

    def __hash__(self) -> int:
        return hash((id(self.holder), self.key))


@dataclass(frozen=True, slots=True)
class Host(Value):
    """A value that lives on the host.

    `kind`: int, float, bool, str, none, device, dtype, size, ndarray, any. `value` is the constant or NO. `origins`:
    the cells it was read from.
    `marks`: `shape` (from a tensor's metadata), `data` (read from a tensor's contents), `read@N` (by the call with
    clock N), `random`, `clock`, `env`, `counter`.
    """

    kind: str = "any"
    value: Any = NO
    origins: frozenset[Cell] = frozenset()
    marks: frozenset[str] = frozenset()

    @property
    def known(self) -> bool:
        return self.value is not NO


def const(value: Any, kind: str = "") -> Host:
    """A host constant; the kind follows from its type unless given."""
    return Host(kind or ("none" if value is None else type(value).__name__), value)


NONE: Final = const(None)
TRUE: Final = const(True)
FALSE: Final = const(False)


class Storage:
    """Memory of one tensor; views share it. `pool` is the capture whose private pool it came from, if any."""

    __slots__ = ("born", "cell", "owner", "pool", "site", "text", "via")

    def __init__(self, site: tuple[str, int] = ("", 0), pool: Capture | None = None, born: int = 0) -> None:
        self.site = site
        self.pool = pool
        self.born = born
        self.owner = ""  # `param`, `buffer`, `grad`, `state`, `lru` ...
        self.text = ""
        self.cell: Cell | None = None  # the first place that held it
        self.via: Capture | None = None  # outputs of a compiled or graphed callable


# the device of what was made without one, where the program's default device is not seen: neither host nor GPU is
# claimed
DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True, eq=False)
class Tensor(Value):
    """A tensor. `device`: cuda, cpu, pinned, meta, default or ?; `dtype`: bool, int, float or ?; `rank`: dimensions or
    None.

    `sure`: something shows that it is a tensor at all (it is not only a guess from a parameter's use). `data_sized`:
    its shape comes from contents.
    `grad`: it takes part in autograd.
    """

    device: str = "?"
    dtype: str = "?"
    rank: int | None = None
    storage: Storage = field(default_factory=Storage)
    sure: bool = True
    grad: bool = False
    leaf: bool = False  # it was asked for gradients itself, so no autograd graph hangs on it
    scale: frozenset[Cell] = frozenset()  # cells whose host values are folded into a 0-dim CPU tensor
    dims: tuple[int | None, ...] | None = None
    part: bool = False  # a view of a part of its memory

    @property
    def on_host(self) -> bool:
        return self.device in ("cpu", "pinned")


def view(tensor: Tensor, **change: Any) -> Tensor:
    """The same storage seen otherwise."""
    return replace(tensor, dims=change.pop("dims", None), **change)


@dataclass(frozen=True, slots=True)
class Symbol(Value):
    """Something outside the project, by its qualified name."""

    name: str


class Holder(Value):
    """Anything with slots. `born` is the clock at its making; `frozen_in` the capture it was made in."""

    __slots__ = ("born", "made_in", "site", "slots")

    def __init__(self, site: tuple[str, int] = ("", 0), born: int = 0, made_in: Capture | None = None) -> None:
        self.slots: dict[Key, Value] = {}
        self.site = site
        self.born = born
        self.made_in = made_in


class Scope(Holder):
    """The names of a running function or a module; `outer` is the enclosing scope of a closure."""

    __slots__ = ("globals_", "module", "name", "names", "outer", "redirect")

    def __init__(self, name: str, module: Module | None, outer: Scope | None, born: int) -> None:
        super().__init__(born=born)
        self.name = name
        self.module = module
        self.outer = outer
        self.names: frozenset[str] = frozenset()
        self.redirect: dict[str, Scope] = {}  # global and nonlocal names


class Instance(Holder):
    """An object of a class of the project. `synthetic`: made up by the analysis, so a missing slot is unknown, not an
    error."""

    __slots__ = ("cls", "device", "synthetic")

    def __init__(self, cls: ClassInfo, site: tuple[str, int], born: int, synthetic: bool = False) -> None:
        super().__init__(site, born)
        self.cls = cls
        self.device = "?"
        self.synthetic = synthetic


class External(Holder):
    """An object of a class outside the project: `name` is the class (`torch.optim.AdamW`), `args` what it was made
    with."""

    __slots__ = ("args", "device", "facts", "keywords", "name")

    def __init__(self, name: str, site: tuple[str, int], born: int) -> None:
        super().__init__(site, born)
        self.name = name
        self.args: tuple[Value, ...] = ()
        self.keywords: dict[str, Value] = {}
        self.device = "?"
        self.facts: dict[str, Any] = {}


class Items(Holder):
    """A list, tuple, set or iterator: slots 0, 1, 2 ... while its length is known (`exact`), one summary value under
    "*" else.

    `fields`: the names of a named tuple.
    """

    __slots__ = ("exact", "fields", "kind", "length")

    def __init__(self, kind: str, values: Iterable[Value] = (), site: tuple[str, int] = ("", 0), born: int = 0) -> None:
        super().__init__(site, born)
        self.kind = kind
        self.fields: tuple[str, ...] = ()
        for index, item in enumerate(values):
            self.slots[index] = item
        self.exact = True

    @property
    def values(self) -> list[Value]:
        return [value for key, value in self.slots.items()]


class Mapping(Holder):
    """A dict: constant keys are slots, everything else is under "*"."""

    __slots__ = ("factory",)

    def __init__(self, site: tuple[str, int] = ("", 0), born: int = 0) -> None:
        super().__init__(site, born)
        self.factory: Value | None = None


REST: Final = "*"
READ: Final = "read@"  # begins the mark that says which call read a value from a tensor


@dataclass(frozen=True, slots=True, eq=False)
class Closure(Value):
    """A function of the project with the scope it was defined in; `owner` is its class for methods (for `super`)."""

    func: ir.Function
    module: Module
    scope: Scope
    owner: ClassInfo | None = None
    defaults: dict[str, Value] = field(default_factory=dict)
    wraps: str = ""  # what a decorator of ours changed: `contextmanager`, `lru_cache`, `compiled` ...
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Bound(Value):
    """A method with its receiver; `func` is a Closure, or the name of an external method."""

    receiver: Value
    func: Closure | str


@dataclass(frozen=True, slots=True, eq=False)
class Partial(Value):
    func: Value
    args: tuple[Value, ...]
    keywords: dict[str, Value]


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped(Value):
    """A callable behind a wrapper that matters: `kind` is compile, graphed, graphed-te, cudagraph-module, capture-safe,
    lru_cache."""

    func: Value
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClassValue(Value):
    cls: ClassInfo


@dataclass(frozen=True, slots=True)
class ModuleValue(Value):
    module: Module


@dataclass(frozen=True, slots=True, eq=False)
class Choice(Value):
    """One of these; at most four, never a Choice inside."""

    values: tuple[Value, ...]


def alternatives(value: Value) -> tuple[Value, ...]:
    """The values it may be."""
    return value.values if isinstance(value, Choice) else (value,)


def join(*values: Value) -> Value:
    """The least value that covers all of them, within the bounds of the lattice."""
    flat: list[Value] = []
    for value in values:
        for one in alternatives(value):
            if not any(one is other or _same(one, other) for other in flat):
                flat.append(one)
            elif isinstance(one, Unknown) and not one.some and SOMETHING in flat:
                flat[flat.index(SOMETHING)] = one
    if len(flat) == 1:
        return flat[0]
    if flat and all(isinstance(one, Tensor) for one in flat):
        return _join_tensors(flat)  # type: ignore[arg-type]
    if flat and all(isinstance(one, Host) for one in flat) and len(flat) > 2:
        return _join_hosts(flat)  # type: ignore[arg-type]
    if len(flat) > 4:
        return UNKNOWN
    return Choice(tuple(flat)) if flat else UNKNOWN


def _same(one: Value, other: Value) -> bool:
    if isinstance(one, Unknown) and isinstance(other, Unknown):
        return True
    if isinstance(one, Host) and isinstance(other, Host):
        return (
            one.kind == other.kind
            and one.known == other.known
            and one.value == other.value
            and one.origins == other.origins
            and one.marks == other.marks
        )
    if isinstance(one, Symbol):
        return one == other
    return False


def _join_hosts(values: list[Host]) -> Value:
    kinds = {value.kind for value in values}
    return Host(
        kinds.pop() if len(kinds) == 1 else "any",
        origins=frozenset().union(*(value.origins for value in values)),
        marks=frozenset().union(*(value.marks for value in values)),
    )


def _join_tensors(values: list[Tensor]) -> Value:
    first = values[0]
    if len({id(value.storage) for value in values}) > 1:
        if len(values) <= 3:
            return Choice(tuple(values))
    return Tensor(
        device=_common([value.device for value in values], "?"),
        dtype=_common([value.dtype for value in values], "?"),
        rank=_common([value.rank for value in values], None),
        storage=first.storage,
        sure=all(value.sure for value in values),
        grad=any(value.grad for value in values),
    )


def _common(values: list[Any], otherwise: Any) -> Any:
    return values[0] if all(value == values[0] for value in values) else otherwise


def tensors_in(value: Value, depth: int = 3) -> list[Tensor]:
    """All tensors in it, through lists, tuples and dicts."""
    found: list[Tensor] = []
    for one in alternatives(value):
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (Items, Mapping)) and depth:
            for inner in list(one.slots.values()):
                found.extend(tensors_in(inner, depth - 1))
    return found


def hosts_in(value: Value, depth: int = 2) -> list[Host]:
    """All host values in it, through lists, tuples and dicts."""
    found: list[Host] = []
    for one in alternatives(value):
        if isinstance(one, Host):
            found.append(one)
        elif isinstance(one, (Items, Mapping)) and depth:
            for inner in list(one.slots.values()):
                found.extend(hosts_in(inner, depth - 1))
    return found
