"""The text of a project: `Source`, one file read when first asked for, and `Sources`, all files of one run.

`Sources` knows three kinds of files. *Linted* files were named by the user, as files or through their folder.
*Context* files
belong to the same project; regions in them count when they reach a linted file. *Neighbours* stand beside a file that
belongs
to no project; they are looked for on disk only when a linted file imports them.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from graphlint.findings import Problem

MAX_BYTES = 32 << 20  # nobody writes such a file by hand; it would take minutes and gigabytes to read
MAX_BRACKETS = 200  # no Python accepts more
_INSTALLED = ("site-packages", "dist-packages")  # what lies there is somebody else's project


class Stat(NamedTuple):
    """What tells cheaply whether a file may have changed."""

    mtime_ns: int
    size: int


class Source:
    """One Python file. Reading never raises: what can't be read or decoded is empty, and `problem` says why.

    `path` is the name to show, `file` the absolute path on disk, `module` the dotted name by which the project imports
    it (not
    unique: two scripts may both be `main`), `root` the folder that this name starts from. Line ends in `text` are
    `\\n`.
    """

    __slots__ = (
        "_data",
        "_digest",
        "_given",
        "_stat",
        "_text",
        "file",
        "is_package",
        "module",
        "path",
        "problem",
        "root",
        "unread",
    )

    def __init__(self, path: str, file: str, module: str, root: str, data: bytes | None = None) -> None:
        self.path = path
        self.file = file
        self.module = module
        self.root = root
        self.is_package = os.path.basename(file) == "__init__.py"
        self.problem: Problem | None = None
        self.unread = False  # the bytes could not be had at all
        self._data = data
        self._given = data is not None
        self._text: str | None = None
        self._digest = b""
        self._stat: Stat | None = None

    def __repr__(self) -> str:
        return f"Source({self.path!r}, {self.module!r})"

    @property
    def data(self) -> bytes:
        """The bytes on disk (or on standard input); empty when they can't be read."""
        if self._data is None:
            self._data = self._read()
        return self._data

    @property
    def text(self) -> str:
        """The decoded text by PEP 263, without byte order mark; empty when it can't be decoded."""
        if self._text is None:
            self._text = self._decode()
            if not self._given and self.problem is None:
                _ = self.digest
                self._data = None  # once is enough
        return self._text

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for the content; the same for the same bytes everywhere."""
        if not self._digest:
            self._digest = hashlib.blake2b(self.data, digest_size=16).digest()
        return self._digest

    @property
    def stat(self) -> Stat:
        """Time of change and size; zeros for standard input and for what can't be looked at."""
        if self._stat is None:
            self._stat = Stat(0, 0) if self._given else file_stat(self.file)
        return self._stat

    def lines(self) -> list[str]:
        """The lines of `text` without their ends; a form feed does not end a line."""
        return self.text.split("\n")

    def trust(self, digest: bytes) -> None:
        """Takes the digest from an index whose `Stat` agreed, so that the file need not be read."""
        self._digest = digest

    def release(self) -> None:
        """Forgets what was read (it is read again when asked for); for files that turn out not to matter."""
        self._text = None
        if not self._given:
            self._data = None

    def check(self) -> Problem | None:
        """Reads and decodes without keeping the text; the problem met, if any."""
        if self._text is not None:
            return self.problem
        data = self.data
        if self.problem is None and (not data.isascii() or b"coding" in data[:400] or b"\0" in data):
            self._decode()
        return self.problem

    def _read(self) -> bytes:
        try:
            with open(self.file, "rb") as stream:
                data = stream.read(MAX_BYTES + 1)
        except OSError as error:
            self.unread = True
            self.problem = Problem(self.path, 0, f"can't be read: {reason(error)}")
            return b""
        if len(data) > MAX_BYTES:
            self.problem = Problem(self.path, 0, f"is larger than {MAX_BYTES >> 20} MB and was not read")
            return b""
        return data

    def _decode(self) -> str:
        data = self.data
        if b"\0" in data:
            self.problem = Problem(
                self.path, data[: data.index(b"\0")].count(b"\n") + 1, "holds a null byte, which Python refuses"
            )
            return ""
        try:
            text = data.decode(encoding_of(data))
        except UnicodeDecodeError as error:
            row = data[: error.start].count(b"\n") + 1
            self.problem = Problem(
                self.path, row, f"can't be decoded as {error.encoding}: byte {data[error.start]:#04x} ({error.reason})"
            )
            return ""
        except (SyntaxError, LookupError) as error:
            self.problem = Problem(self.path, 1, f"can't be decoded: {error}")
            return ""
        return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


class Sources:
    """All files of one run; answers questions about names and paths, reads nothing by itself.

    `named` are the linted files that the user named one by one, by absolute path. `lookups` records which neighbours
    were looked for (None: not there), so that a cached result can tell whether it
    still holds.
    """

    def __init__(
        self,
        linted: Iterable[Source],
        context: Iterable[Source] = (),
        roots: Iterable[str] = (),
        neighbour_roots: Iterable[str] = (),
        named: Iterable[str] = (),
    ) -> None:
        self.linted = tuple(linted)
        self.context = tuple(context)
        self.named = frozenset(named)
        self.roots = tuple(dict.fromkeys(roots))
        self.lookups: dict[str, Source | None] = {}
        self._neighbour_roots = frozenset(root for root in neighbour_roots if os.path.basename(root) not in _INSTALLED)
        self._by_file = {source.file: source for source in (*self.context, *self.linted)}
        self._by_path = {source.path: source for source in (*self.context, *self.linted)}
        self._linted_paths = frozenset(source.path for source in self.linted)
        self._modules: dict[tuple[str, str], Source | None] = {}

    def __iter__(self) -> Iterator[Source]:
        yield from self.linted
        yield from self.context

    def __len__(self) -> int:
        return len(self.linted) + len(self.context)

    def is_linted(self, path: str) -> bool:
        """Whether the user asked for the file shown as `path`."""
        return path in self._linted_paths

    def by_path(self, path: str) -> Source | None:
        """The file that is shown as `path`, or lies at that absolute path."""
        return self._by_path.get(path) or self._by_file.get(path)

    def by_module(self, name: str, near: Source | None = None) -> Source | None:
        """The project's file for the module `a.b.c`, or None when it is not the project's.

        `near` is the importing file: its own root and folder are tried first, as Python does for scripts.
        """
        key = (name, os.path.dirname(near.file) if near else "")
        if key not in self._modules:
            self._modules[key] = self._find(name.replace(".", os.sep), near)
        return self._modules[key]

    def _find(self, relative: str, near: Source | None) -> Source | None:
        first = (near.root, os.path.dirname(near.file)) if near else ()
        for root in dict.fromkeys((*first, *self.roots)):
            for tail in (os.sep + "__init__.py", ".py"):
                file = os.path.join(root, relative + tail)
                found = self._by_file.get(file) or self._neighbour(root, file)
                if found:
                    return found
        return (
            None if near else next((source for source in self if source.module == relative.replace(os.sep, ".")), None)
        )

    def _neighbour(self, root: str, file: str) -> Source | None:
        if root not in self._neighbour_roots:
            return None
        if file not in self.lookups:
            self.lookups[file] = self._take_in(root, file) if os.path.isfile(file) else None
        return self.lookups[file]

    def _take_in(self, root: str, file: str) -> Source:
        source = Source(shown(file), file, module_name(file, root), root)
        self._by_file[file] = self._by_path[source.path] = source
        return source


def module_name(file: str, root: str) -> str:
    """`/p/src/a/b.py` below the root `/p/src` -> `a.b`; `a/__init__.py` -> `a`."""
    inner = os.path.splitext(file[len(root.rstrip(os.sep)) + 1 :])[0]  # `root` is above `file`; relpath takes 12 us
    return inner.removesuffix(os.sep + "__init__").replace(os.sep, ".")


def encoding_of(data: bytes) -> str:
    """The encoding by byte order mark and PEP 263 comment; raises SyntaxError for an unknown one."""
    head = data[:400]
    if not head.startswith(b"\xef\xbb\xbf") and b"coding" not in head:
        return "utf-8"
    import tokenize  # 5 ms, needed for one file in a thousand

    return tokenize.detect_encoding(io.BytesIO(data).readline)[0]


def bracket_depth(text: str) -> int:
    """How deep brackets are nested, strings and comments not told apart; ask before libcst, whose parser overflows the
    stack.
    """
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def shown(file: str) -> str:
    """How an absolute path is shown: relative inside the current folder, else whole; printable in any case."""
    here = os.getcwd()
    short = file[len(here) + 1 :] if file.startswith(here.rstrip(os.sep) + os.sep) else file
    return printable(short)


def printable(path: str) -> str:
    """File names are bytes; those that are no text are shown with escapes, so that every report can be written."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def file_stat(file: str) -> Stat:
    """`Stat` of a path, zeros when there is none."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return Stat(0, 0)
    return Stat(found.st_mtime_ns, found.st_size)


def reason(error: OSError) -> str:
    """The words of an `OSError` without number and path: `permission denied`."""
    return (error.strerror or str(error)).lower()
