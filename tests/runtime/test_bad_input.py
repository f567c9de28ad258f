"""What no graph can take or give is refused in one clear sentence, with a cure; what only looks odd works."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import CaptureError, NoDeviceError, SignatureError, StaleScalarError  # noqa: E402
from graphlint.runtime.guard import capture_safe  # noqa: E402

CALLS = 6
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Output:
    def __init__(self, logits: Any) -> None:
        self.logits = logits


# ---- what is guarded ----


def test_what_is_no_function_is_refused_when_it_is_decorated() -> None:
    async def later(x: Any) -> Any:
        return x

    def pieces(x: Any) -> Any:
        yield x

    for bad, said in (
        (torch.nn.Linear, "decorate a method of Linear"),
        (3, "not a int"),
        (later, "guard the function that does the work"),
        (pieces, "guard the function that does the work"),
    ):
        with pytest.raises(TypeError, match=said):
            capture_safe(bad)


def test_builtins_partials_compiled_and_traced_functions(kit: Any) -> None:
    import functools

    linear = torch.nn.Linear(3, 3).to(kit.device).requires_grad_(False)
    x = kit.randn(2, 3)
    traced = torch.jit.trace(linear, x)
    compiled = torch.compile(lambda x: linear(x) * 2, backend="eager")
    for fn in (torch.sin, functools.partial(torch.add, alpha=2, other=x), traced, compiled):
        guard = kit.guard(fn)
        for i in range(CALLS):
            x = kit.randn(2, 3, seed=i)
            torch.testing.assert_close(guard(x), fn(x))
        assert guard.stats["replays"] > 0


def test_a_traced_module_is_watched(kit: Any) -> None:
    traced = torch.jit.trace(torch.nn.Linear(3, 3).to(kit.device).requires_grad_(False), kit.randn(2, 3))
    guard = kit.guard(traced)
    x = kit.randn(2, 3)
    for _ in range(CALLS):
        guard(x)
    traced.weight.mul_(2)
    assert torch.equal(guard(x), traced(x))
    traced.weight = torch.nn.Parameter(traced.weight.detach().clone(), requires_grad=False)
    with pytest.raises(CaptureError, match="replaced"):
        for _ in range(40):
            guard(x)


# ---- arguments ----


def test_iterators_are_refused_unread(kit: Any) -> None:
    source = (kit.randn(2, seed=i) for i in range(3))
    with pytest.raises(SignatureError, match="argument `xs` is an iterator"):
        kit.guard(lambda xs: sum(xs))(source)
    assert len(list(source)) == 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda kit: torch.eye(2).to(kit.device).to_sparse(), "not a plain strided tensor"),
        (lambda kit: torch.ones(2, device="meta"), "a tensor on meta"),
        (lambda kit: {1, 2}, "neither a tensor nor hashable"),
        (lambda kit: bytearray(b"x"), "neither a tensor nor hashable"),
    ],
)
def test_arguments_that_no_graph_can_take(kit: Any, make: Callable[[Any], Any], said: str) -> None:
    guard = kit.guard(lambda x, odd: x)
    with pytest.raises(SignatureError, match=said) as caught:
        guard(kit.randn(2), make(kit))
    assert "odd" in caught.value.reason
    assert caught.value.cure
    assert guard.stats["captures"] == 0


def test_a_module_on_two_devices(kit: Any) -> None:
    other = "meta" if kit.device == "cpu" else "cpu"
    m = torch.nn.Sequential(torch.nn.Linear(2, 2).to(kit.device), torch.nn.Linear(2, 2).to(other))
    with pytest.raises(SignatureError, match=f"are on .*{other}") as caught:
        kit.guard(m)(kit.randn(1, 2))
    assert caught.value.rule == "two-devices"


def test_nothing_on_the_device(kit: Any) -> None:
    m = torch.nn.Linear(2, 2).to("meta")
    with pytest.raises(NoDeviceError, match="neither an argument nor a parameter"):
        kit.guard(lambda: m.weight)()


def test_objects_of_the_users_own_are_state(kit: Any) -> None:
    class TrainState:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = torch.nn.Linear(4, 1).to(kit.device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.scale = 2.0

    def step(state: Any, x: torch.Tensor) -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = state.model(x).square().mean() * state.scale
        loss.backward()
        state.optimizer.step()
        return loss

    mine, twin = TrainState(), TrainState()
    guard = kit.guard(step)
    for i in range(CALLS):
        x = kit.randn(2, 4, seed=i)
        assert torch.equal(guard(mine, x), step(twin, x))
    assert torch.equal(mine.model.weight, twin.model.weight)
    assert guard.stats["captures"] == 1
    mine.scale = 3.0
    with pytest.raises(StaleScalarError, match=r"`state\.scale` was 2.0"):
        for _ in range(40):
            guard(mine, kit.randn(2, 4))


def test_a_tensor_of_an_object_that_is_bound_anew(kit: Any) -> None:
    holder = Output(kit.randn(3))
    guard = kit.guard(lambda o: o.logits * 2)
    for _ in range(CALLS):
        assert torch.equal(guard(holder), holder.logits * 2)
    holder.logits = kit.randn(3, seed=9)
    with pytest.raises(CaptureError, match=r"`o\.logits` was replaced"):
        for _ in range(40):
            guard(holder)


def test_empty_and_zero_batch(kit: Any) -> None:
    linear = torch.nn.Linear(4, 2).to(kit.device).requires_grad_(False)
    guard = kit.guard(linear)
    for n in (0, 0, 0, 0, 3, 0, 3, 3, 3):
        assert guard(kit.randn(n, 4)).shape == (n, 2)
    assert guard.stats["graphs"] == 2


def test_a_bucketed_call_of_length_zero(kit: Any) -> None:
    guard = kit.guard(lambda x: (x * 2, x.sum()), buckets={"x": (0, [4, 8])})
    for n in (3, 0, 5, 0, 0, 3, 8, 0, 2, 0):
        x = kit.randn(n, 2, seed=n)
        doubled, total = guard(x)
        assert torch.equal(doubled, x * 2)
        torch.testing.assert_close(total, x.sum())
    assert guard.stats["graphs"] == 2


# ---- results ----


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: Output(x * 2), "the output is a Output"),
        (lambda x: {"out": [Output(x * 2)]}, r"the output\['out'\]\[0\] is a Output"),
        (lambda x: {x * 2}, "the output is a set"),
        (lambda x: (x * i for i in range(2)), "body would run after the call"),
        (lambda x: iter([x * 2]), "body would run after the call"),
        (lambda x, y=None: lambda y=x * 2: y, "the output is a function"),
    ],
)
def test_results_that_hide_tensors_are_refused(kit: Any, fn: Any, said: str) -> None:
    guard = kit.guard(fn)
    with pytest.raises(SignatureError, match=said) as caught:
        guard(kit.randn(2))
    assert caught.value.filename == __file__
    assert caught.value.cure
    eager = kit.guard(fn, on_violation="eager")
    with pytest.warns(UserWarning, match="unsupported-argument"):
        eager(kit.randn(2))


def test_results_without_tensors_and_state_that_is_handed_back(kit: Any) -> None:
    state = Output(kit.randn(3))

    def step(state: Any, x: torch.Tensor) -> Any:
        state.logits.add_(x)
        return state, "text", torch.float32, ...

    guard = kit.guard(step)
    twin = state.logits.clone()
    for i in range(CALLS):
        same, text, dtype, dots = guard(state, kit.randn(3, seed=i))
        twin.add_(kit.randn(3, seed=i))
        assert same is state
        assert (text, dtype, dots) == ("text", torch.float32, ...)
        assert torch.equal(state.logits, twin)


def test_a_number_that_changes_from_call_to_call_is_found(kit: Any) -> None:
    class Counting:
        calls = 0

        def step(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return x * 2, self.calls

    with pytest.raises(StaleScalarError, match=r"`output\[1\]` is 2 from eager|computed on the host"):
        guard = kit.guard(Counting().step)
        for i in range(CALLS):
            guard(kit.randn(2, seed=i))


def test_a_result_nested_otherwise_on_another_call_is_found(kit: Any) -> None:
    flips = {"n": 0}

    def fn(x: torch.Tensor) -> Any:
        flips["n"] += 1
        return (x * 2, x + 1) if flips["n"] % 2 else (x * 2, [x + 1])

    with pytest.raises(StaleScalarError, match="nested otherwise"):
        kit.guard(fn)(kit.randn(2))


@dataclasses.dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Like the outputs of a well-known library: a dataclass that is a dict."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


def test_a_dataclass_that_is_a_dict(kit: Any) -> None:
    guard = kit.guard(lambda x: ModelOutput(logits=x * 2, loss=x.sum()))
    for i in range(CALLS):
        x = kit.randn(3, seed=i)
        out = guard(x)
        assert type(out) is ModelOutput
        assert torch.equal(out.logits, x * 2)
        assert torch.equal(out["logits"], x * 2)
        assert torch.equal(out["loss"], x.sum())
