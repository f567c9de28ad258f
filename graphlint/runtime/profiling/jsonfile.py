"""The bytes of a trace as JSON: compressed or not, cut short or not, and with what tools write that is no JSON."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")

_CHUNK = 1 << 24
_TRIES = 12  # texts that are tried, the first as it stands
_NO_NUMBER = re.compile(rb"(?<=[:,\[\s])-?(?:NaN|nan|Infinity|Inf|inf)(?=\s*[,}\]])")
_HALF_LETTER = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_WHAT = "give a trace written by prof.export_chrome_trace() or a SQLite export of Nsight Systems"
_CUT = "the file is cut short or damaged: what comes after its last whole event is missing"
_PLACE = re.compile(r"\(byte (\d+)\)")  # where the decoder met the fault


class UnreadableTrace(ValueError):
    """The file is no recording that graphlint can read; the message says why and what would be one."""


def unpacked(path: Path) -> tuple[bytes, list[str]]:
    """The text of a file, decompressed as far as it goes, and a note when it ends too soon.

    Raises:
        UnreadableTrace: the file is empty, or nothing of it can be decompressed.
        OSError: it can't be opened.
    """
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if not packed:
        return path.read_bytes(), []
    parts: list[bytes] = []
    try:
        with gzip.open(path) as stream:
            while part := stream.read(_CHUNK):
                parts.append(part)
    except (OSError, EOFError, zlib.error) as error:
        rest = _beginning(path)
        if not rest.strip():
            raise UnreadableTrace(f"{path}: the gzip file is damaged ({error}); record it again") from None
        return rest, [_CUT]
    return b"".join(parts), []


def _beginning(path: Path) -> bytes:
    """What can be had of a gzip file that is cut."""
    try:
        return zlib.decompressobj(wbits=31).decompress(path.read_bytes())
    except zlib.error:
        return b""


def decoded(data: bytes, path: Path, whole: type[_T], events: Any) -> tuple[_T, list[str]]:
    """Both forms of the format: an object with `traceEvents`, or a bare list whose end may be missing.

    Args:
        whole: struct of the object; its field `events` takes the list.
        events: type of the list.

    Returns:
        The file, and notes on what had to be mended.

    Raises:
        UnreadableTrace: no JSON, or JSON that is no trace.
    """
    body = data.removeprefix(b"\xef\xbb\xbf").strip()
    if not body:
        raise UnreadableTrace(f"{path}: the file is empty; {_WHAT}")
    if body[:1] not in (b"{", b"["):
        raise UnreadableTrace(f"{path}: no Chrome trace and no SQLite database; {_WHAT}")
    mended, notes, first = body, list[str](), ""
    for attempt in range(_TRIES):
        try:
            if mended[:1] == b"[":
                return whole(events=msgspec.json.decode(mended, type=events)), notes  # type: ignore[call-arg]
            return msgspec.json.decode(mended, type=whole), notes
        except msgspec.ValidationError as error:
            raise UnreadableTrace(f"{path}: JSON, but no Chrome trace ({error}); {_WHAT}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            first = first or str(error)
            mended, notes = _mended(body, mended, error, attempt)
    raise UnreadableTrace(f"{path}: no Chrome trace ({first}); {_WHAT}") from None


def _mended(body: bytes, tried: bytes, error: Exception, attempt: int) -> tuple[bytes, list[str]]:
    """The next text to try: first with null for numbers that are none and in UTF-8; then closed behind a whole event
    in front of the fault.
    """
    if attempt == 0:
        letters = _HALF_LETTER.sub(rb"\\ufffd", body).decode("utf-8", "replace").encode()
        return _NO_NUMBER.sub(b"null", letters), []
    if attempt == 1 and body[:1] == b"[" and not body.endswith(b"]"):
        return tried.rstrip(b", \n") + b"]", []  # the format lets a list end without its bracket
    fault = _PLACE.search(str(error))
    close = b"]" if body[:1] == b"[" else b"]}"
    end = min(int(fault[1]) if fault else len(tried), len(tried) - len(close) - 1)
    end = tried.rfind(b"}", 0, max(end, 0))
    return tried[: end + 1] + close, [_CUT]
