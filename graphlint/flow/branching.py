"""Branches and loops: both sides of what can't be decided, two rounds of what has no known end, and what a test says of a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow import pylib
from graphlint.flow.naming import Naming
from graphlint.flow.state import BREAK, MAX_ROUNDS, NORMAL, RAISE, RETURN
from graphlint.flow.values import (
    NO,
    NONE,
    UNKNOWN,
    Cell,
    Choice,
    Holder,
    Host,
    Instance,
    Scope,
    Unknown,
    Value,
    alternatives,
    join,
)

Narrowing = tuple[tuple[Scope | Holder, Any, Value, Value], ...]


def _only_raises(body: Sequence[ir.Stmt]) -> bool:
    """Whether a block does nothing but raise, after putting its message together."""
    return (
        bool(body)
        and isinstance(body[-1], ir.Raise)
        and all(isinstance(stmt, (ir.Assign, ir.Do)) for stmt in body[:-1])
    )


def _binds_once(node: ir.If) -> bool:
    """`if x is None: x = given`, and else at most a check of it."""
    plain = (
        len(node.body) == 1
        and isinstance(node.body[0], ir.Assign)
        and isinstance(node.body[0].value, (ir.Name, ir.Attr, ir.Const))
        and isinstance(node.body[0].targets[0], ir.Attr)
    )
    checks = all(
        isinstance(stmt, ir.Raise) or (isinstance(stmt, ir.If) and _only_raises(stmt.body) and not stmt.orelse)
        for stmt in node.orelse
    )
    return plain and checks and isinstance(node.test, ir.Compare) and node.test.ops == ("is",)


class Branching(Naming):
    """`if`, `for`, `while`, `match`, `try`."""

    # -- branches

    def _If(self, node: ir.If) -> int:
        first = len(self.events)
        test = self.eval(node.test)
        self.happen(ev.TestEvent, node.test.at, "if", test).otherwise = bool(node.orelse)
        if not (node.body or node.orelse) or (_only_raises(node.body) and not node.orelse) or _binds_once(node):
            for event in self.events[first:]:  # a check of the arguments: what is recorded is the same on either side
                if isinstance(event, ev.TestEvent):
                    event.differs = False
        known = self.truth(test)
        narrowed = self.narrow(node.test)
        if known is not None:
            if known and self.open and "capturing" in self.marks(test) and _only_raises(node.body) and self._certain():
                self.happen(ev.RefuseEvent, node.body[-1].at)
            with self.assuming(narrowed, known, keep=True):
                return self.run_block(node.body if known else node.orelse)
        begun: list[ev.Capture] = []
        statuses = self.fork(
            self._side(node.body, narrowed, True, begun), self._side(node.orelse, narrowed, False, begun)
        )
        self.open.extend(begun[:1])
        if len(set(statuses)) > 1:
            self.frame.parted = True
        return self._combined(statuses, narrowed)

    def _certain(self) -> bool:
        """Whether no undecided branch has left one of the functions on the way from the capture to here."""
        frame: ev.Frame | None = self.frame
        while frame is not None and frame is not self.open[-1].frame:
            if frame.parted:
                return False
            frame = frame.parent
        return True

    def _side(
        self, body: tuple[ir.Stmt, ...], narrowed: Narrowing, truth: bool, begun: list[ev.Capture]
    ) -> Callable[[], int]:
        """One side of an `if`; a capture that it begins is put into `begun`, for the other side does not run in it."""
        depth = len(self.open)

        def run() -> int:
            with self.assuming(narrowed, truth):
                status = self.run_block(body)
            if status == NORMAL:
                begun.extend(self.open[depth:])
                del self.open[depth:]
            return status

        return run

    def _combined(self, statuses: list[int], narrowed: Narrowing) -> int:
        if NORMAL in statuses:
            if len(statuses) == 2 and statuses[0] != NORMAL:  # `if x is None: return` leaves the rest knowing better
                for holder, key, _, no in narrowed:
                    if holder.slots.get(key) is not None and isinstance(holder.slots.get(key), (Choice, Unknown)):
                        self.put(holder, key, no)
            return NORMAL
        return RETURN if RETURN in statuses else statuses[0]

    def narrow(self, test: ir.Expr) -> Narrowing:
        """What a test says of a name or attribute on either side: `x is None`, `isinstance(x, C)`,
        `torch.is_tensor(x)`, plain truth."""
        if isinstance(test, ir.Unary) and test.op == "not":
            return tuple((holder, key, no, yes) for holder, key, yes, no in self.narrow(test.operand))
        if isinstance(test, ir.Bool) and test.op == "and":
            found: list[Any] = []
            for part in test.values:
                for holder, key, yes, _ in self.narrow(part):
                    found.append((holder, key, yes, holder.slots.get(key, UNKNOWN)))
            return tuple(found)
        if isinstance(test, ir.Bool) and test.op == "or":
            found = []
            for part in test.values:
                for holder, key, _, no in self.narrow(part):
                    found.append((holder, key, holder.slots.get(key, UNKNOWN), no))
            return tuple(found)
        if isinstance(test, ir.Compare) and len(test.ops) == 1 and test.ops[0] in ("is", "is not"):
            right = test.rights[0]
            if isinstance(right, ir.Const) and right.value is None and not right.kind:
                return self._split(
                    test.left, lambda one: isinstance(one, Host) and one.kind == "none", NONE, test.ops[0] == "is"
                )
        if isinstance(test, ir.Call):
            return self._narrow_call(test)
        if isinstance(test, (ir.Name, ir.Attr)):
            return self._split(test, lambda one: self.truth(one) is not False, None, True)
        return ()

    def _narrow_call(self, test: ir.Call) -> Narrowing:
        if not test.args or not isinstance(test.func, (ir.Name, ir.Attr)):
            return ()
        name = test.func.id if isinstance(test.func, ir.Name) else test.func.name
        if name in ("is_tensor", "isinstance"):
            wanted = "Tensor" if name == "is_tensor" else self._class_text(test.args[1] if len(test.args) > 1 else None)
            return self._split(
                test.args[0],
                lambda one: pylib.is_instance(one, wanted),
                pylib.example(self.machine, wanted, test.at),
                True,
            )
        return ()

    def _class_text(self, node: ir.Expr | None) -> str:
        if isinstance(node, ir.Name):
            return node.id
        if isinstance(node, ir.Attr):
            return node.name
        return ""

    def _split(
        self, target: ir.Expr, belongs: Callable[[Value], Any], otherwise: Value | None, positive: bool
    ) -> Narrowing:
        """The alternatives of a name or attribute that belong to the yes and to the no side."""
        cell = self.place_of(target)
        if cell is None:
            return ()
        holder, key = cell
        value = holder.slots[key]
        yes = [one for one in alternatives(value) if belongs(one) is not False]
        no = [
            one for one in alternatives(value) if not belongs(one) or isinstance(one, Unknown) or belongs(one) is None
        ]
        left = join(*yes) if yes and not all(isinstance(one, Unknown) for one in yes) else (otherwise or value)
        right = join(*no) if no else value
        return ((holder, key, left, right) if positive else (holder, key, right, left),)

    def place_of(self, target: ir.Expr) -> tuple[Holder, Any] | None:
        if isinstance(target, ir.Name):
            scope: Scope | None = self.frame.scope.redirect.get(target.id, self.frame.scope)
            while scope is not None:
                if target.id in scope.slots:
                    return scope, target.id
                scope = scope.outer
            return None
        if isinstance(target, ir.Attr) and isinstance(target.obj, (ir.Name, ir.Attr)):
            inner = self.place_of(target.obj)
            if inner is not None:
                obj = inner[0].slots[inner[1]]
                if isinstance(obj, Instance) and target.name in obj.slots:
                    return obj, target.name
        return None

    @contextmanager
    def assuming(self, narrowed: Narrowing, truth: bool, keep: bool = False) -> Iterator[None]:
        """Walks one side of a test with what the test says; afterwards the names are as wide as before, unless
        written."""
        before = [(holder, key, holder.slots.get(key)) for holder, key, _, _ in narrowed]
        for holder, key, yes, no in narrowed:
            self.put(holder, key, yes if truth else no)
        put = [(holder.slots.get(key)) for holder, key, _, _ in narrowed]
        yield
        if not keep:
            for (holder, key, old), now in zip(before, put, strict=True):
                if holder.slots.get(key) is now and old is not None:
                    self.put(holder, key, old)

    # -- loops

    def _For(self, node: ir.For) -> int:
        source = self.eval(node.source)
        self.happen(ev.LoopEvent, node.source.at, source)
        outer = self._enter_loop()
        ended = NORMAL
        before = len(self.grown)
        for index, item in enumerate(self.iterate(source, node.source.at)):
            if index == 1 and not pylib.walked_whole(source):
                self._lose_count(before)
            self.assign(node.target, item, node.target.at, "loop")
            status = self.run_block(node.body)
            if status in (RETURN, RAISE):
                ended = status
                break
            if status == BREAK:
                break
        self._leave_loop(outer)
        if ended != NORMAL:
            return ended
        return self.run_block(node.orelse)

    def _lose_count(self, before: int) -> None:
        """More rounds follow than are walked: what the first one counted, or put into a container, comes to any
        number."""
        for one in set(self.grown[before:]):
            if isinstance(one, Cell):
                value = one.holder.slots.get(one.key)
                if isinstance(value, Host) and value.known:
                    self.put(one.holder, one.key, replace(value, value=NO, marks=value.marks | {"loop"}))
            else:
                self.longer.add(one)

    def _enter_loop(self) -> int:
        outer, self.frame.loop_doubt = self.frame.loop_doubt, self.doubt
        self.frame.loops += 1
        return outer

    def _leave_loop(self, outer: int) -> None:
        self.frame.loops -= 1
        self.frame.loop_doubt = outer

    def iterate(self, value: Value, at: ir.Span) -> list[Value]:
        """The items a loop takes: all of a short known sequence, else two."""
        found: list[Value] = []
        for one in alternatives(value)[:2]:
            found.extend(pylib.iterated(self.machine, one, at))
        return found[:MAX_ROUNDS]

    def _While(self, node: ir.While) -> int:
        rounds = 0
        outer = self._enter_loop()
        status = NORMAL
        undecided = 0
        while rounds < 24 and undecided < 2:
            rounds += 1
            first = len(self.events)
            test = self.eval(node.test)
            for event in self.events[first:]:
                if isinstance(event, ev.TestEvent) and event.frame is self.frame and event.how in ("and", "or", "not"):
                    event.how = "while"  # its parts decide about the loop, too
            self.happen(ev.TestEvent, node.test.at, "while", test)
            known = self.truth(test)
            if known is False:
                break
            if known is None or (isinstance(node.test, ir.Const) and rounds > 1):
                undecided += 1
            status = self.run_block(node.body)
            if status in (BREAK, RETURN, RAISE):
                break
        self._leave_loop(outer)
        if status in (RETURN, RAISE):
            return status
        return self.run_block(node.orelse)

    def _Match(self, node: ir.Match) -> int:
        subject = self.eval(node.subject)
        self.happen(ev.TestEvent, node.subject.at, "match", subject)
        sides: list[Callable[[], int]] = []
        for case in node.cases:

            def run(case: ir.Case = case) -> int:
                for name in case.binds:
                    self.put(self.frame.scope, name, subject if case.wild else UNKNOWN)
                if case.guard is not None:
                    self.happen(ev.TestEvent, case.guard.at, "if", self.eval(case.guard))
                return self.run_block(case.body)

            sides.append(run)
        if not any(case.wild and case.guard is None for case in node.cases):
            sides.append(lambda: NORMAL)
        statuses = self.fork(*sides)
        return NORMAL if NORMAL in statuses else (RETURN if RETURN in statuses else statuses[0])

    def _Try(self, node: ir.Try) -> int:
        opened = len(self.open)
        status = self.run_block(node.body)
        ends = [status]
        if node.handlers:
            handlers = [self._handler(handler) for handler in node.handlers]
            caught = self.fork(*handlers, lambda: NORMAL)
            if status == RAISE:
                ends = caught[:-1]
        if status == NORMAL and node.orelse:
            ends = [self.run_block(node.orelse)]
        if len(self.open) > opened and status != NORMAL:
            del self.open[opened:]
        final = self.run_block(node.final)
        if final != NORMAL:
            return final
        return NORMAL if NORMAL in ends else ends[0]

    def _handler(self, handler: ir.Handler) -> Callable[[], int]:
        def run() -> int:
            if handler.name:
                self.put(self.frame.scope, handler.name, UNKNOWN)
            # what a handler does in a capture has an error before it: nothing there is judged
            outer, self.open = self.open, []
            try:
                return self.run_block(handler.body)
            finally:
                self.open = outer

        return run
