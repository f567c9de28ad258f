"""What a piece of analysis came to, kept with everything it read: after a change only the pieces that read the changed
file run again.

A piece (one walk, say) asks for files through a `Recorder`. Its result is stored under the content of the file it
began in, together with every question
asked and the content of the file that answered it. It still holds when each question has the same answer.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol, TypeVar

import msgspec

from graphlint import cache, ir
from graphlint.config import Config
from graphlint.files import Source, Sources

V = TypeVar("V")


class Reader(Protocol):
    """Whoever reads files for the analysis."""

    def summary(self, name: str, near: str) -> ir.Summary | None:
        """The module `name` as the file `near` would import it."""

    def by_path(self, path: str) -> ir.Summary | None:
        """The file that is shown as `path`."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One question and its answer: module `name` as seen from `near` (no name: the file `near` itself) is the file
    `path` with that content.

    `path` is empty when there is no such file; `refused` says that it could not be parsed.
    """

    name: str
    near: str
    path: str = ""
    digest: bytes = b""
    refused: bool = False


class Recorder:
    """A reader that remembers what was asked."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.asked: dict[tuple[str, str], bool] = {}  # question -> whether there was a summary

    def summary(self, name: str, near: str) -> ir.Summary | None:
        """As `Reader.summary`."""
        found = self._reader.summary(name, near)
        self.asked[(name, near)] = found is not None
        return found

    def by_path(self, path: str) -> ir.Summary | None:
        """As `Reader.by_path`."""
        found = self._reader.by_path(path)
        self.asked[("", path)] = found is not None
        return found


class Memo:
    """Results of pieces of analysis: `recall` before the work, `keep` after it."""

    def __init__(self, sources: Sources, reader: Reader, settings: Config) -> None:
        self._sources = sources
        self._reader = reader
        self._store = cache.summary_store(settings)
        self._setting = repr((settings.target_torch, settings.regions))

    def recall(self, piece: str, path: str, shape: type[V]) -> V | None:
        """The result of `piece` (a name for the kind of work) on the file `path`, when everything that it read is as
        it was.
        """
        stored = self._store.get(self._key(piece, path))
        if stored is None:
            return None
        try:
            answers, body = msgspec.msgpack.decode(stored, type=tuple[list[Answer], bytes])
            value: V = msgspec.msgpack.decode(body, type=shape)
        except msgspec.MsgspecError:
            return None
        if not all(map(self._holds, answers)):
            return None
        for answer in answers:
            if answer.refused:  # the reader has to complain about it in this run too
                self._reader.by_path(answer.path)
        return value

    def keep(self, piece: str, path: str, recorder: Recorder, value: Any) -> None:
        """Stores what `piece` came to, with what `recorder` saw it read."""
        answers = [self._answer(name, near, found) for (name, near), found in recorder.asked.items()]
        try:
            body = msgspec.msgpack.encode(value)
            self._store.put(self._key(piece, path), msgspec.msgpack.encode((answers, body)))
        except UnicodeEncodeError:  # a lone surrogate in a source line; not worth a failed run
            pass

    def _key(self, piece: str, path: str) -> bytes:
        source = self._sources.by_path(path)
        facts = (piece, path, source.module if source else "", self._setting)
        state = hashlib.blake2b("\0".join(facts).encode("utf-8", "replace"), digest_size=16)
        state.update(source.digest if source else b"")
        return state.digest()

    def _find(self, name: str, near: str) -> Source | None:
        beside = self._sources.by_path(near)
        return self._sources.by_module(name, beside) if name else beside

    def _answer(self, name: str, near: str, found: bool) -> Answer:
        source = self._find(name, near)
        return Answer(name, near) if source is None else Answer(name, near, source.path, source.digest, not found)

    def _holds(self, answer: Answer) -> bool:
        source = self._find(answer.name, answer.near)
        if source is None:
            return not answer.path
        return source.path == answer.path and source.digest == answer.digest
