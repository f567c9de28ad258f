"""What the dry run writes down: plain values, no torch. The adapters fill them in, the judge reads them.

An `Op` is one operator that reached the dispatcher, an `Event` is something that no operator shows (a copy between
host and device, a stream call, a seed). Both carry the `Site` in the user's code that caused them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["device", "host", "pinned", "unknown"]


class Site(msgspec.Struct, frozen=True):
    """The user's line behind an operator.

    `inside` lists the library functions between that line and the operator, outermost first, as
    `torch/optim/adam.py:step`; `branch` says which statement the value steers there (`if`, `while`, `range`,
    `assert`) or is empty; `trace` is the way from the step to the line, outermost first, as `(file, row, function)`.
    """

    filename: str
    row: int
    function: str = ""
    column: int = 1
    end_row: int = 0
    end_column: int = 0
    branch: str = ""
    inside: tuple[str, ...] = ()
    trace: tuple[tuple[str, int, str], ...] = ()

    @property
    def place(self) -> tuple[str, int]:
        """File and row: what two records of one line share."""
        return self.filename, self.row


class Operand(msgspec.Struct, frozen=True):
    """One tensor argument of an operator.

    `storage` is the identity of its memory, stable while the trace lives; `born` the index of the operator in this
    region that made it, or -1 for memory from outside the region; `value` is the number in a host tensor of rank
    zero, else None.
    """

    role: Role
    dtype: str
    shape: tuple[int, ...]
    storage: int
    born: int = -1
    value: float | None = None

    @property
    def ndim(self) -> int:
        """Rank of the tensor."""
        return len(self.shape)


class Op(msgspec.Struct, frozen=True):
    """One operator call: `name` is `aten::index`, `overload` is `Tensor`; `call` is the torch function that the user
    called.

    `scalars` are the arguments that are no tensors, flattened, as `(name, value)`; `outputs` the storages written or
    made; `tags` the names of the dispatcher's tags; `forward` the line of the forward pass when the operator ran in
    backward.
    """

    index: int
    name: str
    overload: str
    call: str
    operands: tuple[Operand, ...]
    scalars: tuple[tuple[str, object], ...]
    outputs: tuple[int, ...]
    tags: frozenset[str]
    site: Site
    forward: Site | None = None
    backward: bool = False

    @property
    def on_device(self) -> bool:
        """Whether any operand lives on the device."""
        return any(operand.role == "device" for operand in self.operands)


class Event(msgspec.Struct, frozen=True):
    """Something no operator shows. `kind` is a word of `judge.EVENTS`; `call` is what the user wrote; `detail` goes
    into the message."""

    kind: str
    call: str
    site: Site
    detail: str = ""
    forward: Site | None = None


class Copy(msgspec.Struct, frozen=True):
    """One transfer between host and device, whether harmful or not. `direction` is `host-to-device` or
    `device-to-host`."""

    direction: str
    pinned: bool
    non_blocking: bool
    shape: tuple[int, ...]
    dtype: str
    site: Site


class Draw(msgspec.Struct, frozen=True):
    """One draw of random numbers: by which operator, from which generator (`default`, `host`, `custom`)."""

    op: str
    generator: str
    site: Site


class Trace(msgspec.Struct):
    """Everything one run of a region did, in order. `lines` are the user's lines as they were executed; `cold` says
    that an optimizer had no state yet."""

    ops: list[Op] = []
    events: list[Event] = []
    copies: list[Copy] = []
    draws: list[Draw] = []
    lines: list[tuple[str, int]] = []
    cold: bool = False
