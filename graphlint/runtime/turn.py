"""Whose turn it is: one call at a time goes through the graphs of a guard.

A lock costs a replay a fifth of a microsecond. The fast path takes the only token out of a list instead: `list.pop` is
one atomic step of the interpreter and costs a sixth of that. Everybody else waits here.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

FAST_PATH = "<graphlint call>"  # the file name of every generated fast path
_SPINS = 200
_PAUSE_S = 50e-6
_SURE = 40  # looks in a row at a token that nobody has, until it counts as lost


class Turn:
    """A lock for the slow path (`with turn:`, reentrant), and `take` and `give` for the fast one.

    The fast path does `token = take()`, asks `wait()` on IndexError, and gives back in `finally`. A token that got
    lost, because an interrupt came between the call and the assignment, is made anew by whoever waits for it.
    """

    def __init__(self) -> None:
        self._tokens = [True]
        self.take = self._tokens.pop
        self.give = self._tokens.append
        self._lock = threading.RLock()
        self._depth = 0
        self._owner = 0
        self._owes = False

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._depth == 0:
                self._owner = threading.get_ident()
                self._owes = self.wait(slow=True)
            self._depth += 1
        except BaseException:
            self._owner = 0 if self._depth == 0 else self._owner
            self._lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = 0
            if self._owes:
                self.give(True)
        self._lock.release()

    def wait(self, slow: bool = False) -> bool:
        """Takes the token as soon as it is there. False where this thread is inside already: it must go the slow way,
        which is reentrant.

        `slow`: the caller holds the lock, so that a lost token is its to replace.
        """
        mine, lost = threading.get_ident(), 0
        for spin in range(sys.maxsize):
            try:
                return self.take()
            except IndexError:
                pass
            if spin < _SPINS:
                time.sleep(0)
                continue
            holder = self._holder(mine)
            if holder == mine or (self._owner == mine and not slow):
                return False
            lost = lost + 1 if not holder and (slow or not self._owner) else 0
            if lost > _SURE:
                return slow
            time.sleep(_PAUSE_S)
        return False

    def _holder(self, first: int) -> int:
        """A thread that is inside a fast path of this guard, 0 for none; `first` is looked at first."""
        frames = sys._current_frames()
        return next((i for i in sorted(frames, key=lambda i: i != first) if self._inside(frames[i])), 0)

    def _inside(self, frame: FrameType | None) -> bool:
        """Whether a stack holds a call of such a fast path, but for one that waits here itself.

        One that has not come to take the token yet counts too: between the call that takes it and the assignment, a
        thread may be kept from running for long.
        """
        while frame is not None:
            caller = frame.f_back
            if frame.f_code is _WAIT and caller is not None and self._is_fast(caller):
                frame = caller.f_back
                continue
            if self._is_fast(frame):
                return True
            frame = caller
        return False

    def _is_fast(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename == FAST_PATH and frame.f_globals.get("take") is self.take


_WAIT = Turn.wait.__code__
