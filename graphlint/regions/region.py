"""The noun of this room: one capture region."""

from __future__ import annotations

import msgspec

from graphlint import ir

KINDS = ("graph", "manual", "graphed-callable", "compile", "wrapper", "warp", "cupy", "other-backend")


class Region(msgspec.Struct, frozen=True):
    """One place where work is captured into a graph.

    `row` to `end_row` is the text a reader would call the region: the `with` statement, begin call to end call, or
    the call (or decorator) that captures a callable. What is captured is either `body`, the statements that run under
    capture (managers entered after the capture stand in it as a `with`), or `callables`, the expressions that the
    call captures, or `decorated`, the function or class under a capturing decorator. A region may have none of them:
    a class begins the capture and its user writes the body, or an object captures what it is attached to.

    `owner` is the innermost function around it (None at the top level of a file), `function` its dotted name in the
    file. `call` is the capturing call with its arguments (`pool=`, `stream=`, `mode=`), `stmt` the statement it
    stands in. `certain` is False when a flag or a variable decides at run time whether this captures; `backward` says
    that the backward pass of the callables is captured too.
    """

    path: str
    module: str
    row: int
    end_row: int
    kind: str
    api: str
    captured: str
    function: str
    stmt: ir.Stmt
    owner: ir.Function | None = None
    body: tuple[ir.Stmt, ...] = ()
    callables: tuple[ir.Expr, ...] = ()
    decorated: ir.Function | ir.Class | None = None
    call: ir.Call | None = None
    certain: bool = True
    backward: bool = False

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Reports list regions by file, then by row; the same text is never two regions of one kind."""
        return (self.path, self.row, self.end_row, self.kind)
