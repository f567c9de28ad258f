"""One call at a time: threads exclude each other, a call inside a call passes, a lost token comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from graphlint.runtime.turn import FAST_PATH, Turn

SOURCE = """
def call(work):
    try: token = take()
    except IndexError:
        token = wait()
        if not token: return "slow"
    try:
        return work()
    finally:
        give(token)
"""


def fast_path(turn: Turn) -> Callable[[Callable[[], object]], object]:
    """A function that takes its turn as the generated ones do."""
    space: dict[str, object] = {"take": turn.take, "wait": turn.wait, "give": turn.give}
    exec(compile(SOURCE, FAST_PATH, "exec"), space)
    return space["call"]  # type: ignore[return-value]


def test_threads_exclude_each_other_on_both_ways() -> None:
    turn = Turn()
    call = fast_path(turn)
    inside, met = [0], [0]

    def work() -> None:
        inside[0] += 1
        met[0] = max(met[0], inside[0])
        threading.Event().wait(0.0001)
        inside[0] -= 1

    def fast() -> None:
        for _ in range(50):
            assert call(work) != "slow"

    def slow() -> None:
        for _ in range(50):
            with turn:
                work()

    threads = [threading.Thread(target=body) for body in (fast, slow, fast, slow)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert met[0] == 1 and inside[0] == 0


def test_a_call_inside_a_call_goes_the_slow_way_and_passes() -> None:
    turn = Turn()
    call = fast_path(turn)

    def again() -> object:
        assert call(lambda: "inner") == "slow"
        with turn, turn:
            return "outer"

    assert call(again) == "outer"
    assert call(lambda: "after") == "after"


def test_a_fast_call_inside_the_slow_way_goes_slow() -> None:
    turn = Turn()
    call = fast_path(turn)
    with turn:
        assert call(lambda: "inner") == "slow"
    assert call(lambda: "after") == "after"


def test_an_exception_gives_the_turn_back() -> None:
    turn = Turn()
    call = fast_path(turn)
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), turn:
        raise ZeroDivisionError
    assert call(lambda: "after") == "after"


def test_a_lost_token_comes_back() -> None:
    turn = Turn()
    call = fast_path(turn)
    turn.take()  # an interrupt came before the assignment
    assert call(lambda: "first") == "slow"
    with turn:
        pass
    assert call(lambda: "after") == "after"
    with pytest.raises(IndexError):
        turn.take(), turn.take()  # there is one again, and not two
