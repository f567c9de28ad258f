"""Tensors that callers hand to a function which replays a graph: those that the graph should get and does not."""

from __future__ import annotations

import itertools
import re
import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from graphlint.findings import Finding, Related
from graphlint.runtime.dryrun import aside, hoststate, sites, statements
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.records import Site
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Session

Words = tuple[str, ...]

_ASKED_REPLAYS = 12
_FRAMES = 3
_LOOKS = ("size", "dim", "numel", "stride", "__len__", "is_contiguous", "is_floating_point", "element_size", "data_ptr")


class Handed:
    """Follows who reads which tensor, and asks at a replay about arguments that nobody has read."""

    def __init__(self, session: Session, judge: Judge, lines: list[tuple[str, int]], keep: Keep) -> None:
        self._session, self._judge, self._lines, self._keep = session, judge, lines, keep
        self._readers: dict[int, set[CodeType]] = {}
        self._refilled: dict[int, Site] = {}
        #: forgotten unless the function reads them behind the replay: number, code of the function, finding
        self._open: list[tuple[int, CodeType, Finding]] = []

    def used(self, name: str, tensors: list[torch.Tensor]) -> None:
        """A torch function got these tensors, outside every region."""
        if name.rsplit(".", 1)[-1] in _LOOKS:
            return
        codes: set[CodeType] | None = None
        for tensor in tensors:
            codes = codes or {frame.f_code for frame in users_frames()}
            self._readers.setdefault(self._session.roles.identity(tensor), set()).update(codes)

    def written(self, tensors: list[torch.Tensor], site: Site) -> None:
        """An operator outside every region has written these tensors."""
        for number in {self._session.roles.identity(tensor) for tensor in tensors}:
            self._refilled.pop(number, None)
            self._refilled[number] = site

    def opened(self, graph: Captured) -> None:
        """A capture begins: which tensors have the functions that lead to it been handed?"""
        for frame in list(users_frames())[:_FRAMES]:
            for words, tensor in _arguments(frame):
                graph.handed[frame.f_code, words] = weakref.ref(tensor)

    def replaying(self, graph: Captured, here: Site) -> None:
        """A graph is about to replay."""
        self.settle()
        start, graph.seen = graph.seen, len(self._lines)
        if graph.watch is None or graph.replays > _ASKED_REPLAYS:
            return
        for frame in list(users_frames())[:_FRAMES]:
            for words, tensor in _arguments(frame):
                static = self._meant(graph, frame.f_code, words, tensor)
                if static is not None and self._matters(graph, static, tensor):
                    finding = self._finding(graph, words, start, here)
                    self._open.append((self._session.roles.identity(tensor), frame.f_code, finding))
                    return

    def settle(self) -> None:
        """Tells those arguments that nobody has read behind the last replay either."""
        for number, code, finding in self._open:
            if code not in self._readers.get(number, ()):
                self._keep(finding)
        self._open.clear()

    def _meant(self, graph: Captured, code: CodeType, words: Words, tensor: torch.Tensor) -> torch.Tensor | None:
        """The input of the graph that an argument which nobody reads is meant for; None where there is none."""
        identity = self._session.roles.identity
        if graph.watch is None or identity(tensor) in graph.watch.inputs:
            return None
        if code in self._readers.get(identity(tensor), ()):
            return None
        known = graph.handed.get((code, words))
        handed = known() if known is not None else None
        if handed is not None and identity(handed) in graph.watch.inputs and _alike(handed, tensor):
            return handed
        named = [
            static
            for path, ref in graph.statics
            if (static := ref()) is not None and _names(path, words) and _alike(static, tensor)
        ]
        return named[0] if len(named) == 1 and identity(named[0]) in graph.watch.inputs else None

    def _matters(self, graph: Captured, static: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Whether the graph would give its user other numbers, had the argument been copied in."""
        with torch._C.DisableTorchFunction():
            if torch.equal(static.detach(), tensor.detach()):
                return False

        def refill() -> None:
            static.detach().copy_(tensor.detach())

        as_is = aside.outcome(self._session, graph.region)
        filled = aside.outcome(self._session, graph.region, refill)
        shown = graph.shown(self._session) - {self._session.roles.identity(static)}
        return bool(aside.parted(as_is, filled, shown))

    def _finding(self, graph: Captured, words: Words, start: int, here: Site) -> Finding:
        assert graph.watch is not None
        recent = self._lines[start:]
        refills = [site for number, site in self._refilled.items() if number in graph.watch.inputs]
        latest = [site for site in refills if site.place in recent]
        passed = _passed_over(recent)
        site = statements.line_site(passed) if passed else latest[-1] if latest else here
        why = "is handed in with new values, but nothing copies it into the graph, whose results depend on it"
        note = Related(here.filename, here.row, "replayed here")
        return self._judge.finding("skipped-input", _spelled(words), why, site, related=[note])


def users_frames() -> Iterator[FrameType]:
    """The frames of the user's functions, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not sites.is_library(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            yield frame
        frame = frame.f_back


def parameters(frame: FrameType) -> dict[str, Any]:
    """The parameters of a running function with the values that their names have now."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    values = sites.locals_of(frame)
    return {name: values[name] for name in code.co_varnames[:count] if name in values}


def _arguments(frame: FrameType) -> list[tuple[Words, torch.Tensor]]:
    """The tensors among the parameters, in nested tuples, lists and dictionaries too, with the words that lead there."""
    found: list[tuple[Words, torch.Tensor]] = []

    def walk(words: Words, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append((words, value))
        elif isinstance(value, (tuple, list, dict)) and len(words) < 5:
            for key, part in list(value.items() if isinstance(value, dict) else enumerate(value))[:64]:
                walk((*words, str(key)), part)

    for name, value in parameters(frame).items():
        walk((name,), value)
    return found


def statics(roots: dict[str, Any]) -> list[tuple[Words, Any]]:
    """Every tensor below the roots that a refill may be meant for, weakly, with the words of its path."""
    found: dict[int, tuple[Words, Any]] = {}
    for path, value in hoststate.reachable(roots):
        for where, part in hoststate._parts(path, value):
            if isinstance(part, torch.Tensor) and not isinstance(part, torch.nn.Parameter):
                found.setdefault(id(part), (tuple(re.findall(r"\w+", where)), weakref.ref(part)))
    for name, value in roots.items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), ((name,), weakref.ref(value)))
    return list(found.values())


def _names(path: Words, words: Words) -> bool:
    """Whether a path ends in the words of an argument: `static_season` and `self.season` are named by `season`."""
    if len(path) < len(words) or path[len(path) - len(words) + 1 :] != words[1:]:
        return False
    return f"_{words[0]}_" in f"_{path[len(path) - len(words)]}_"


def _alike(static: torch.Tensor, tensor: torch.Tensor) -> bool:
    return static.shape == tensor.shape and static.dtype == tensor.dtype and static is not tensor


def _passed_over(recent: list[tuple[str, int]]) -> tuple[str, int] | None:
    """The last test for a tensor among the lines that was false and so kept a copy from being made."""
    found = None
    for place, following in itertools.pairwise(recent):
        body = statements.tests_for_tensor(place)
        if body and not body[0] <= following[1] <= body[1]:
            found = place
    return found


def _spelled(words: Words) -> str:
    return words[0] + "".join(f"[{word if word.isdigit() else repr(word)}]" for word in words[1:])
