"""`torch.compile` calls whose mode, options or backend record CUDA graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from graphlint import ir
from graphlint.regions.constants import UNKNOWN, Constants
from graphlint.regions.names import Argument, Callee, Where
from graphlint.regions.outline import Outline
from graphlint.regions.text import render

MODES = frozenset({"reduce-overhead", "max-autotune"})
_COMPILE = frozenset({"torch.compile", "torch.compiler.compile"})
_OPTIMIZE = frozenset({"torch._dynamo.optimize", "torch._dynamo.eval_frame.optimize"})


def _compiles_too(name: str) -> bool:
    """`model.compile`, and helpers that hand the same keywords on (`compile_with_warmup`); no other compiler."""
    last = name.rpartition(".")[2]
    return (
        "compile" in last and last.islower() and name.partition(".")[0] not in ("re", "regex", "torch", "triton", "jax")
    )


class Verdict(NamedTuple):
    """Whether a compile call records graphs, and whether every way through the program does."""

    records: bool
    certain: bool = True


class Compiled:
    """Judges compile calls of one file."""

    def __init__(self, outline: Outline, constants: Constants) -> None:
        self.outline = outline
        self.constants = constants
        self.everywhere = self._switched_on()

    def verdict(self, callee: Callee, arguments: Iterable[Argument]) -> Verdict | None:
        """The verdict on a call of `callee`; None when it is no compile call."""
        given = [*arguments, *callee.bound]
        if callee.name in _COMPILE:
            return self._compile(given)
        if callee.name in _OPTIMIZE:
            return self._option(self._named(given, "backend", 0), {"cudagraphs"})
        if _compiles_too(callee.name) and any(one.name in ("mode", "options", "backend", "**") for one in given):
            verdict = self._compile(given)
            return verdict if verdict.records else None
        return None

    def _compile(self, given: list[Argument]) -> Verdict:
        verdicts = [
            self._option(self._named(given, "mode"), MODES),
            self._option(self._named(given, "backend"), {"cudagraphs"}),
            self._options(self._named(given, "options")),
        ]
        named = {name for name, _, _ in self._keywords(given)}
        if self.everywhere and not named & {"mode", "backend", "options"}:
            return Verdict(True)
        return Verdict(any(one.records for one in verdicts), any(one.records and one.certain for one in verdicts))

    def _named(self, given: list[Argument], name: str, index: int = -1) -> list[tuple[ir.Expr, Where]]:
        """What the call passes for the parameter `name`, dicts spread into keywords included."""
        positional = [one for one in given if one.name == ""]
        if 0 <= index < len(positional):
            return [(positional[index].value, positional[index].where)]
        return [(value, where) for key, value, where in self._keywords(given) if key == name]

    def _keywords(self, given: list[Argument]) -> Iterator[tuple[str, ir.Expr, Where]]:
        for one in given:
            if one.name == "**":
                yield from self.constants.entries(one.value, one.where)
            elif one.name not in ("", "*"):
                yield one.name, one.value, one.where

    def _option(self, values: list[tuple[ir.Expr, Where]], wanted: Collection[object]) -> Verdict:
        seen = [literal for value, where in values for literal in self.constants.of(value, where)]
        hits = [one for one in seen if one is not UNKNOWN and one in wanted]
        return Verdict(bool(hits), len(hits) == len(seen))

    def _options(self, values: list[tuple[ir.Expr, Where]]) -> Verdict:
        seen: list[object] = []
        for value, where in values:
            for key, switch, place in self.constants.entries(value, where):
                if key == "triton.cudagraphs":
                    seen += self.constants.of(switch, place)
        on = [one for one in seen if one is True]
        return Verdict(bool(on), len(on) == len(seen))

    def _switched_on(self) -> bool:
        """Whether the file sets `torch._inductor.config.triton.cudagraphs = True` for every compile call."""
        for scope in self.outline.scopes:
            body = (
                scope.func.body if scope.func is not None else self.outline.summary.body if scope.parent is None else ()
            )
            for stmt in body:
                if isinstance(stmt, ir.Assign) and isinstance(stmt.value, ir.Const) and stmt.value.value is True:
                    if any(render(target).endswith("triton.cudagraphs") for target in stmt.targets):
                        return True
        return False
