"""Who warms up, captures or verifies now: one guard of the process at a time, and what runs inside is part of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

CAPTURES = threading.RLock()  # held by the guard whose call takes the slow path
BUSY = [0]  # not zero: some guard is in its phases; every fast path then gives way
_OWNER = [0]  # the thread that is


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Inside, the calling thread warms, captures or verifies; other guards' calls in it are part of that."""
    BUSY[0] += 1
    owner, _OWNER[0] = _OWNER[0], threading.get_ident()
    try:
        yield
    finally:
        BUSY[0] -= 1
        _OWNER[0] = owner


def is_part_of_it() -> bool:
    """Whether this call comes from within a guard's phases: from its thread, or from autograd's, which Python did
    not start.
    """
    if not BUSY[0]:
        return False
    return _OWNER[0] == threading.get_ident() or isinstance(threading.current_thread(), threading._DummyThread)
