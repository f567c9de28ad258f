"""What was worked out before, on disk: summaries by content, and whole results by everything they depend on.

    .graphlint_cache/<version>/pack-*.bin     content digest -> summary, one pack for each run that made new ones
    .graphlint_cache/<version>/stats.bin      path -> time, size, content digest: tells unread what a file holds
    .graphlint_cache/<version>/run-*.bin      digest of all contents and settings -> findings

`<version>` stands for graphlint's own code and rules, the shape of the files and the running Python, so nothing of
another version
is ever read. Every file is written beside its place and moved there, so that a run that is cut off, or two at once,
leave whole
files; each begins with a check sum of the rest, so that a cut or foreign file counts as not there. No cache is worth a
failed run:
what can't be written is left out, and `trouble` says why. Entries are keyed by content, not by time: a fresh checkout
hits.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from graphlint.config import CACHE_FOLDER, Config
from graphlint.files import Source, Sources, Stat, file_stat, reason
from graphlint.findings import LintResult

SHAPE = "1"  # raise it when the layout of a cache file changes
_MAGIC = b"graphlint\n"
_CHECK = 16  # bytes of check sum behind the magic
_MAX_PACKS = 8  # more are merged into one
_MAX_BYTES = 128 << 20  # a merge drops what no recent run used beyond this
_MAX_RUNS = 16
_MAX_VERSIONS = 4
_RACY_NS = 2_000_000_000  # a file changed so lately may change again within one tick of its clock

Pack = dict[bytes, bytes]  # content digest -> summary


class Store:
    """Summaries on disk: `get`, `put`, and `flush` once at the end. Without a folder it only remembers for this run."""

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self.trouble = ""
        self.hits = 0
        self._new: Pack = {}
        self._used: set[bytes] = set()
        self._packs: dict[str, Pack] | None = None

    def get(self, digest: bytes) -> bytes | None:
        """The bytes put under `digest` by this or an earlier run, or None."""
        found = self._new.get(digest)
        if found is None:
            found = next((pack[digest] for pack in reversed(self._loaded().values()) if digest in pack), None)
        if found is not None:
            self.hits += 1
            self._used.add(digest)
        return found

    def put(self, digest: bytes, data: bytes) -> None:
        """Remembers `data`; it reaches the disk with `flush`."""
        self._new[digest] = data

    def flush(self) -> None:
        """Writes what is new as one pack; many small packs become one. Never raises."""
        if not self.folder or not self._new:
            return
        packs = self._loaded()
        if len(packs) + 1 > _MAX_PACKS:
            merged = {digest: data for pack in packs.values() for digest, data in pack.items()} | self._new
            old = tuple(packs)
        else:
            merged, old = self._new, ()
        name = f"pack-{_digest(*sorted(merged)).hex()[:24]}.bin"
        self.trouble = _write(self.folder, name, _encode(self._within_limit(merged)))
        if not self.trouble:
            for stale in old:
                if stale != name:
                    _remove(os.path.join(self.folder, stale))
        self._new, self._packs = {}, None

    def _within_limit(self, merged: Pack) -> Pack:
        if sum(map(len, merged.values())) <= _MAX_BYTES:
            return merged
        return {digest: data for digest, data in merged.items() if digest in self._used or digest in self._new}

    def _loaded(self) -> dict[str, Pack]:
        if self._packs is None:
            self._packs = {}
            names = _listed(self.folder, "pack-")
            # the newest last: what was put again is meant to replace what was put before
            for name in sorted(names, key=lambda name: file_stat(os.path.join(self.folder or "", name))):
                pack = _load(os.path.join(self.folder or "", name), Pack)
                if pack is not None:
                    self._packs[name] = pack
        return self._packs


_stores: dict[str | None, Store] = {}


def summary_store(config: Config) -> Store:
    """The process's one store for this configuration; `pipeline.lint` flushes it."""
    folder = version_folder(config)
    return _stores.setdefault(folder, Store(folder)) if folder else Store(None)


class RunCache:
    """Whole results. `load` answers from stats alone when nothing changed; `save` keeps a new one."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = version_folder(config)
        self.trouble = ""
        self._stats: dict[str, tuple[int, int, bytes]] = {}

    def load(self, sources: Sources) -> LintResult | None:
        """The result of an earlier run on the same contents with the same settings, or None; seeds the digests of
        `sources`.
        """
        if not self.folder:
            return None
        self._stats = _load(os.path.join(self.folder, "stats.bin"), dict[str, tuple[int, int, bytes]]) or {}
        for source in sources:
            self._trust(source)
        entry: _Run | None = _load(os.path.join(self.folder, self._name(sources)), _Run)
        if entry is None or not self._holds(entry):
            return None
        return entry.result

    def save(self, sources: Sources, result: LintResult) -> None:
        """Keeps `result` and the stats behind it. Never raises."""
        if not self.folder or any(
            source.unread for source in sources
        ):  # it may be readable next time, with the same stat
            return
        beside = {file: source.digest if source else None for file, source in sources.lookups.items()}
        self.trouble = _write(self.folder, self._name(sources), _encode(_Run(result, beside))) or self._save_stats(
            sources
        )
        runs = _listed(self.folder, "run-")
        if len(runs) > _MAX_RUNS:
            aged = sorted(runs, key=lambda name: file_stat(os.path.join(self.folder or "", name)))
            for name in aged[: len(runs) - _MAX_RUNS]:
                _remove(os.path.join(self.folder, name))

    def _trust(self, source: Source) -> None:
        known = self._stats.get(source.file)
        if known and source.stat == known[:2] and source.stat != Stat(0, 0):
            source.trust(known[2])

    def _name(self, sources: Sources) -> str:
        facts = [f"{source.path}\0{source.module}\0{source.digest.hex()}" for source in sources]
        settings = msgspec.structs.replace(self.config, output_format="full", cache_dir="", unsafe_fixes=False)
        shape = (str(len(sources.linted)), repr(sorted(sources.named)), os.getcwd(), *sources.roots)
        return f"run-{_digest(*facts, *shape, repr(settings)).hex()[:24]}.bin"

    def _holds(self, entry: _Run) -> bool:
        """Whether the neighbours that the earlier run looked for are still what they were."""
        return all(_neighbour_digest(file) == digest for file, digest in entry.beside.items())

    def _save_stats(self, sources: Sources) -> str:
        now = time.time_ns()
        for source in sources:
            if source.stat.mtime_ns and now - source.stat.mtime_ns > _RACY_NS:
                self._stats[source.file] = (*source.stat, source.digest)
            else:
                self._stats.pop(source.file, None)
        if len(self._stats) > 4 * len(sources) + 10_000:  # other trees, long gone
            self._stats = {source.file: self._stats[source.file] for source in sources if source.file in self._stats}
        return _write(self.folder or "", "stats.bin", _encode(self._stats))


class _Run(msgspec.Struct, frozen=True):
    result: LintResult
    beside: dict[str, bytes | None]


def _neighbour_digest(file: str) -> bytes | None:
    return Source(file, file, "", "").digest if os.path.isfile(file) else None


def version_folder(config: Config) -> str | None:
    """Where this graphlint on this Python keeps things for that configuration; None when caching is off."""
    if not config.cache:
        return None
    chosen = config.cache_dir or os.environ.get("GRAPHLINT_CACHE_DIR", "")
    base = os.path.join(config.root, chosen) if chosen else os.path.join(config.root, CACHE_FOLDER)
    return os.path.join(base, f"{tool_digest().hex()[:16]}-{sys.implementation.cache_tag}")


_tool: list[bytes] = []


def tool_digest() -> bytes:
    """Stands for graphlint's code and rules: nobody has to remember to raise a number when a check changes."""
    if not _tool:
        from graphlint import rulebook

        package = os.path.dirname(os.path.abspath(__file__))
        _tool.append(_digest(SHAPE, *_contents(package, ".py"), *_contents(str(rulebook.folder()), ".md")))
    return _tool[0]


def _contents(folder: str, suffix: str) -> Iterable[bytes]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name not in ("runtime", "rules", "__pycache__"):
            yield from _contents(entry.path, suffix)
        elif entry.name.endswith(suffix):
            yield entry.name.encode()
            with open(entry.path, "rb") as stream:
                yield stream.read()


def _digest(*parts: str | bytes) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def _listed(folder: str | None, start: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.startswith(start)) if folder else []
    except OSError:
        return []


def _load(file: str, shape: Any) -> Any:
    """The value in a cache file; None for a missing, cut or foreign one."""
    try:
        with open(file, "rb") as stream:
            data = stream.read()
        body = memoryview(data)[len(_MAGIC) + _CHECK :]
        if not data.startswith(_MAGIC) or data[len(_MAGIC) : len(_MAGIC) + _CHECK] != _check_sum(body):
            return None
        return msgspec.msgpack.decode(body, type=shape)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None


def _check_sum(body: memoryview | bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK).digest()


def _encode(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except UnicodeError:  # a path that is no text; not worth a failed run
        return b""


def _write(folder: str, name: str, body: bytes) -> str:
    """Writes a cache file beside its place and moves it there; answers with the trouble met, or an empty text."""
    temporary = ""
    try:
        if not os.path.isdir(folder):
            _make(folder)
        temporary = os.path.join(folder, f"tmp-{os.getpid()}-{time.time_ns()}")
        with open(temporary, "xb") as stream:
            stream.write(_MAGIC + _check_sum(body) + body)
        os.replace(temporary, os.path.join(folder, name))
    except OSError as error:
        if temporary:
            _remove(temporary)
        return (
            f"the cache in {folder} can't be written ({reason(error)}); the run is complete, the next one will be slow"
        )
    return ""


def _make(folder: str) -> None:
    """Creates the version's folder; of those of other versions only the few made last are kept."""
    base = os.path.dirname(folder)
    os.makedirs(base, exist_ok=True)
    others = [
        entry for entry in os.scandir(base) if re.fullmatch(r"[0-9a-f]{16}-\w[\w.-]*", entry.name) and entry.is_dir()
    ]
    for entry in sorted(others, key=lambda entry: entry.stat().st_mtime)[: 1 - _MAX_VERSIONS]:
        shutil.rmtree(entry.path, ignore_errors=True)
    os.makedirs(folder, exist_ok=True)
    for name, text in ((".gitignore", "*\n"), ("CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n")):
        path = os.path.join(base, name)
        if not os.path.exists(path):
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)


def _remove(file: str) -> None:
    try:
        os.unlink(file)
    except OSError:
        pass
