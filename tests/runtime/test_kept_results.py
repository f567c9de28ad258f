"""A result that outlives the next call is never overwritten, however it is kept; one that is let go costs no copy."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import NotWorthwhile  # noqa: E402

N = 12


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", NotWorthwhile)  # a single small kernel is not worth a graph on a GPU
        yield


def inputs(kit: Any, count: int = N) -> list[torch.Tensor]:
    return [torch.full((3,), float(i), device=kit.device) for i in range(count)]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def right(kept: Any, count: int = N) -> None:
    """Asserts that what was kept of each call is still what eager gives."""
    assert [float(t.reshape(-1)[0]) for t in kept] == [2.0 * i for i in range(count)]


class Keeper:
    def __init__(self) -> None:
        self.all: list[Any] = []
        self.last: Any = None


def append(g: Any, xs: Any) -> Any:
    kept = []
    for x in xs:
        kept.append(g(x))
    return kept


def append_under_a_name(g: Any, xs: Any) -> Any:
    kept = []
    for x in xs:
        y = g(x)
        kept.append(y)
    return kept


def in_a_helper(g: Any, xs: Any) -> Any:
    kept: list[Any] = []

    def one(x: Any) -> None:
        y = g(x)
        kept.append(y)

    for x in xs:
        one(x)
    return kept


def in_an_object(g: Any, xs: Any) -> Any:
    keeper = Keeper()
    for x in xs:
        keeper.last = g(x)
        keeper.all.append(keeper.last)
    return keeper.all


def in_a_tuple(g: Any, xs: Any) -> Any:
    kept: tuple[Any, ...] = ()
    for x in xs:
        kept += (g(x),)
    return kept


def in_a_closure(g: Any, xs: Any) -> Any:
    def later(x: Any) -> Callable[[], Any]:
        y = g(x)
        return lambda: y

    return [f() for f in [later(x) for x in xs]]


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "append": append,
    "append under a name": append_under_a_name,
    "in a helper": in_a_helper,
    "comprehension": lambda g, xs: [g(x) for x in xs],
    "map": lambda g, xs: list(map(g, xs)),
    "dict": lambda g, xs: list({i: g(x) for i, x in enumerate(xs)}.values()),
    "deque": lambda g, xs: deque(g(x) for x in xs),
    "object": in_an_object,
    "tuple": in_a_tuple,
    "closure": in_a_closure,
    "row": lambda g, xs: [g(x)[0] for x in xs],
    "detach": lambda g, xs: [g(x).detach() for x in xs],
    "view": lambda g, xs: [g(x).view(3, 1) for x in xs],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verify", ["first", "off"])
def test_kept_from_the_first_call_on(kit: Any, way: str, verify: str) -> None:
    guard = kit.guard(double, verify=verify)
    right(WAYS[way](guard, inputs(kit)))
    assert guard.stats["captures"] == 1
    assert guard.stats["eager"] == 0
    assert any("kept-output" in note for note in guard.report().notes)


@pytest.mark.parametrize("way", WAYS)
def test_kept_only_after_calls_whose_results_nobody_wanted(kit: Any, way: str) -> None:
    guard = kit.guard(double)
    for x in inputs(kit):
        guard(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right(WAYS[way](guard, inputs(kit)))


@pytest.mark.parametrize("way", WAYS)
def test_kept_only_after_a_loop_that_let_go(kit: Any, way: str) -> None:
    guard = kit.guard(double)
    for x in inputs(kit):
        y = guard(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right(WAYS[way](guard, inputs(kit)))
    assert float(y[0]) == 2.0 * (N - 1)


def test_every_fifth_is_kept(kit: Any) -> None:
    guard = kit.guard(double)
    kept = []

    def one(i: int, x: torch.Tensor) -> None:
        y = guard(x)
        if i % 5 == 4:
            kept.append(y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, x in enumerate(inputs(kit, 40)):
            one(i, x)
    assert [float(y[0]) for y in kept] == [2.0 * i for i in range(4, 40, 5)]


@pytest.mark.parametrize("way", WAYS)
def test_kept_by_the_caller_of_a_wrapper(kit: Any, way: str) -> None:
    guard = kit.guard(double)

    def wrapper(x: torch.Tensor) -> Any:
        y = guard(x)
        assert y.shape == x.shape
        return y

    for x in inputs(kit):
        y = wrapper(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right(WAYS[way](wrapper, inputs(kit)))
    assert float(y[0]) == 2.0 * (N - 1)


@pytest.mark.parametrize(
    "which", [lambda i: i % 2, lambda i: i % 3 == 1, lambda i: i in (2, 9), lambda i: i == 1 or i > 7]
)
def test_some_are_kept_by_a_helper_that_drops_the_others(kit: Any, which: Any) -> None:
    guard = kit.guard(double)
    kept: dict[int, Any] = {}

    def one(i: int, x: torch.Tensor) -> None:
        y = guard(x)
        if which(i):
            kept[i] = y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, x in enumerate(inputs(kit, 24)):
            one(i, x)
    assert {i: float(y[0]) for i, y in kept.items()} == {i: 2.0 * i for i in range(24) if which(i)}


def test_two_results_at_once(kit: Any) -> None:
    guard = kit.guard(double)
    for x in inputs(kit):
        a = guard(x)
    b, c = guard(inputs(kit)[1]), guard(inputs(kit)[2])
    assert (float(a[0]), float(b[0]), float(c[0])) == (2.0 * (N - 1), 2.0, 4.0)


def test_autograd_that_saved_a_result(kit: Any) -> None:
    guard = kit.guard(double)
    w = torch.ones(3, device=kit.device, requires_grad=True)
    for x in inputs(kit):
        guard(x)
    total = sum((w * guard(x)).sum() for x in inputs(kit))
    total.backward()
    assert w.grad.tolist() == [2.0 * sum(range(N))] * 3


def test_a_call_with_no_python_below_it(kit: Any) -> None:
    """As from autograd's own thread: the guard is the first function of its thread."""
    import _thread
    import time

    guard = kit.guard(double)
    for x in inputs(kit, 8):
        y = guard(x)
    before = guard.stats["replays"]
    _thread.start_new_thread(guard, (torch.full((3,), 50.0, device=kit.device),))
    for _ in range(500):
        if guard.stats["replays"] > before:
            break
        time.sleep(0.02)
    assert guard.stats["replays"] == before + 1
    assert float(y[0]) == 14.0


# ---- results that are let go ----


def names(g: Any, xs: Any) -> None:
    for x in xs:
        y = g(x)
        assert float(y[0]) == 2 * float(x[0])


def attribute(g: Any, xs: Any) -> None:
    keeper = Keeper()
    for x in xs:
        keeper.last = g(x)


def detached(g: Any, xs: Any) -> None:
    for x in xs:
        y = g(x).detach()
        assert float(y[0]) == 2 * float(x[0])


def numbers(g: Any, xs: Any) -> None:
    kept = []
    for x in xs:
        kept.append(g(x).sum().item())


def generator(g: Any, xs: Any) -> None:
    for y in (g(x) for x in xs):
        y.sum()


LETTING_GO = {
    "name": names,
    "attribute": attribute,
    "detached": detached,
    "numbers": numbers,
    "generator": generator,
    "nothing": lambda g, xs: [None for x in xs if g(x) is None],
    "clones": lambda g, xs: [g(x).clone() for x in xs],
    "arithmetic": lambda g, xs: sum(g(x) for x in xs),
}


@pytest.mark.parametrize("way", LETTING_GO)
def test_no_copies_where_results_are_let_go(kit: Any, way: str) -> None:
    guard = kit.guard(double)
    paths = []
    for _ in range(2):
        LETTING_GO[way](guard, inputs(kit))
        (captured,) = guard._graphs.values()
        paths.append(captured.hot)
    assert captured.outputs_mode == "alias"
    assert captured.lending.taught == 1
    assert guard.report().notes == []
    assert paths[0] is paths[1] is not None  # the same place: nothing to learn


def test_a_few_places_are_learned_then_results_are_copies(kit: Any) -> None:
    guard = kit.guard(double)

    def place(x: torch.Tensor) -> Any:
        space: dict[str, Any] = {"guard": guard}
        exec("def run(x):\n    for _ in range(9):\n        y = guard(x)\n    return y", space)
        return space["run"](x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modes = []
        for i, x in enumerate(inputs(kit, 6)):
            assert float(place(x)[0]) == 2.0 * i
            modes.append(next(iter(guard._graphs.values())).outputs_mode)
    assert modes == ["alias"] * 4 + ["clone"] * 2


def test_a_tuple_of_results(kit: Any) -> None:
    guard = kit.guard(lambda x: (x * 2, x + 1, {"c": x * 3}))
    for x in inputs(kit):
        a, b, c = guard(x)
        assert (float(a[0]), float(b[0])) == (2 * float(x[0]), 1 + float(x[0]))
    (captured,) = guard._graphs.values()
    assert captured.outputs_mode == "alias"
    del a, b, c
    kept = [guard(x)[1] for x in inputs(kit)]
    assert [float(b[0]) for b in kept] == [1.0 + i for i in range(N)]


@pytest.mark.parametrize("at", [0, 3, 4, 9])
@pytest.mark.parametrize("how", ["name", "view"])
def test_many_results_of_which_one_is_kept_later(kit: Any, at: int, how: str) -> None:
    guard = kit.guard(lambda x: [x * k for k in range(10)])
    for x in inputs(kit):
        ys = guard(x)
    del ys
    (captured,) = guard._graphs.values()
    assert captured.outputs_mode == "alias"
    assert captured.lending.taught == 1

    def pick(ys: list[Any]) -> Any:
        return ys[at] if how == "name" else ys[at][:2]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = [pick(guard(x)) for x in inputs(kit)]
    assert [float(y[0]) for y in kept] == [float(at * i) for i in range(N)]


def test_state_and_arguments_among_results_stay_what_they_are(kit: Any) -> None:
    class Counter:
        def __init__(self) -> None:
            self.total = torch.zeros(3, device=kit.device)

        def add(self, x: torch.Tensor) -> Any:
            self.total += x
            return self.total, x

    counter = Counter()
    guard = kit.guard(counter.add)
    kept = [guard(x) for x in inputs(kit)]
    assert all(float(total[0]) == sum(range(N)) for total, _ in kept[1:])  # the live total, as in eager
    assert [float(x[0]) for _, x in kept] == [float(i) for i in range(N)]


def test_views_of_arguments_are_copies(kit: Any) -> None:
    guard = kit.guard(lambda x: x[1:])
    for x in inputs(kit):
        guard(x)
    kept = [guard(x) for x in inputs(kit)]
    assert [y.tolist() for y in kept] == [[float(i)] * 2 for i in range(N)]


def test_another_graphs_turn_is_no_reason_to_copy(kit: Any) -> None:
    guard = kit.guard(double)
    for i in range(2 * N):
        guard(torch.full((2 + i % 2,), float(i), device=kit.device))
    short = guard(torch.full((2,), 5.0, device=kit.device))
    long = guard(torch.full((3,), 6.0, device=kit.device))
    assert (short.tolist(), long.tolist()) == ([10.0] * 2, [12.0] * 3)
    assert all(captured.lending.taught == 1 for captured in guard._graphs.values())


@pytest.mark.parametrize("first", [True, False])
def test_bucketed_results_that_are_cut_back(kit: Any, first: bool) -> None:
    guard = kit.guard(double, buckets={"x": (0, [4, 8])})
    if not first:
        for i in range(2 * N):
            guard(torch.full((1 + i % 8,), 1.0, device=kit.device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = [guard(torch.full((1 + i % 8,), float(i), device=kit.device)) for i in range(3 * N)]
    for i, y in enumerate(kept):
        assert y.tolist() == [2.0 * i] * (1 + i % 8)


def test_a_bucketed_loop_that_lets_go(kit: Any) -> None:
    guard = kit.guard(double, buckets={"x": (0, [8])})
    for i in range(2 * N):
        y = guard(torch.full((1 + i % 8,), float(i), device=kit.device))
        assert y.tolist() == [2.0 * i] * (1 + i % 8)
    (captured,) = guard._graphs.values()
    assert captured.outputs_mode == "alias"
    assert guard.stats["captures"] == 1


def test_without_watch_the_first_calls_still_tell(kit: Any) -> None:
    right(list(map(kit.guard(double, watch="off"), inputs(kit))))


def test_a_kept_result_is_told_when_it_comes_as_a_surprise(kit: Any) -> None:
    guard = kit.guard(double)
    for x in inputs(kit):
        y = guard(x)
    with pytest.warns(UserWarning, match="kept-output"):
        old = y
        guard(inputs(kit)[0])
    assert float(old[0]) == 2.0 * (N - 1)


def test_more_graphs_than_fast_paths(kit: Any) -> None:
    guard = kit.guard(double)
    sizes = [2, 3, 4, 5, 6, 7]
    for _ in range(5):
        for n in sizes:
            guard(torch.full((n,), 1.0, device=kit.device))
    kept: dict[int, list[Any]] = {n: [] for n in sizes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(5):
            for n in sizes:
                kept[n].append(guard(torch.full((n,), float(i), device=kit.device)))
    assert all([float(y[0]) for y in ys] == [2.0 * i for i in range(5)] for ys in kept.values())


def test_a_loaded_state_is_no_reason_to_copy(kit: Any) -> None:
    m = torch.nn.Linear(3, 3).to(kit.device)
    guard = kit.guard(lambda x: m(x).detach())
    for x in inputs(kit, 4):
        y = guard(torch.stack([x, x]))
    for _ in range(5):
        m.load_state_dict(m.state_dict())
        for x in inputs(kit, 2):
            y = guard(torch.stack([x, x]))
            assert torch.equal(y, m(torch.stack([x, x])))
    (captured,) = guard._graphs.values()
    assert captured.outputs_mode == "alias"


def test_results_that_would_not_fit_three_times_are_not_copied() -> None:
    from graphlint.runtime.fake import FakeBackend
    from graphlint.runtime.guard import capture_safe

    backend = FakeBackend()
    backend.free = 1000  # bytes, where a result has 400
    guard = capture_safe(lambda x: x * 2, backend=backend)
    first = guard(torch.ones(100))
    for i in range(N):
        assert guard(torch.full((100,), float(i))).tolist() == [2.0 * i] * 100
    assert first.tolist() == [2.0] * 100
    assert any("too large for copies" in note for note in guard.report().notes)
