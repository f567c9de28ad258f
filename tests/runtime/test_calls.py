"""What a call may be: nesting, keywords, plain values, aliases, modes; and what is refused, with a reason."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import (  # noqa: E402
    CaptureError,
    NoDeviceError,
    OutOfBucketError,
    ReplayMismatchError,
    SignatureError,
)
from graphlint.runtime.guard import capture_safe  # noqa: E402

CALLS = 6  # the first captures, two are shadowed, the rest take the fast path
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    x: Any
    scale: int


def agrees(kit: Any, fn: Any, call: Any, **options: Any) -> Any:
    """Asserts that the guarded function gives what the function gives, over several calls; gives the guard."""
    guard = kit.guard(fn, **options)
    for i in range(CALLS):
        args, kwargs = call(i)
        want = fn(*args, **kwargs)
        got = guard(*args, **kwargs)
        flat_want, flat_got = torch.utils._pytree.tree_leaves(want), torch.utils._pytree.tree_leaves(got)
        assert type(want) is type(got)
        assert len(flat_want) == len(flat_got)
        for a, b in zip(flat_want, flat_got, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert guard.stats["replays"] > 0
    return guard


def test_nested_arguments_and_results(kit: Any) -> None:
    def fn(pair: Any, batch: Any, *rest: Any, options: Any, k: Any = None) -> Any:
        y = pair.left * batch.x * batch.scale + rest[0][0] + options["a"]
        return {"y": y, "z": [y + 1, (y * 2, None)], "n": 3}

    def call(i: int) -> Any:
        t = [kit.randn(3, seed=10 * i + j) for j in range(5)]
        return (Pair(t[0], t[1]), Batch(t[2], 2), [t[3]]), {"options": {"a": t[4], "b": "text"}, "k": None}

    agrees(kit, fn, call)


def test_ordered_dict_and_named_tuple_results(kit: Any) -> None:
    agrees(kit, lambda x: Pair(x + 1, x * 2), lambda i: ((kit.randn(2, seed=i),), {}))
    agrees(kit, lambda x: OrderedDict(b=x + 1, a=x), lambda i: ((kit.randn(2, seed=i),), {}))


def test_plain_values_choose_the_graph(kit: Any) -> None:
    guard = kit.guard(lambda x, n: x * n)
    x = kit.randn(3)
    for n in (2, 3, 2, 2.0, True, 3):
        assert torch.equal(guard(x, n), x * n)
    assert guard.stats["graphs"] == 4  # 2, 3, 2.0 and True are four values


def test_nan_is_one_value(kit: Any) -> None:
    guard = kit.guard(lambda x, n: x + n)
    for _ in range(3):
        guard(kit.randn(2), float("nan"))
    assert guard.stats["captures"] == 1


def test_an_unhashable_argument_is_named(kit: Any) -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(SignatureError, match="argument `odd` of type Odd"):
        kit.guard(lambda x, odd: x)(kit.randn(2), Odd())


def test_shapes_dtypes_strides_have_their_own_graphs(kit: Any) -> None:
    guard = kit.guard(lambda x: x.contiguous() * 2)
    for x in (kit.randn(4, 4), kit.randn(2, 4), kit.randn(4, 4).t(), kit.randn(4, 4).double(), kit.randn(4, 4)):
        for _ in range(4):
            assert torch.equal(guard(x), x * 2)
    assert guard.stats["graphs"] == 4


def test_grad_mode_autocast_training_and_determinism_are_part_of_the_key(kit: Any) -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).to(kit.device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return linear(x).detach()

    guard = kit.guard(fn, verify="off")
    x = kit.randn(2, 4)
    guard(x)
    with torch.no_grad():
        guard(x)
    with torch.autocast(kit.device, dtype=torch.bfloat16):
        assert guard(x).dtype == torch.bfloat16
    assert guard(x).dtype == torch.float32
    linear.eval()
    assert torch.equal(guard(x), linear(x))
    torch.use_deterministic_algorithms(False)
    guard(x)
    torch.use_deterministic_algorithms(True)
    assert guard.stats["graphs"] == 5


def test_inference_mode(kit: Any) -> None:
    linear = torch.nn.Linear(4, 4).to(kit.device)
    with torch.inference_mode():
        agrees(kit, linear.forward, lambda i: ((kit.randn(2, 4, seed=i),), {}))
    guard = kit.guard(lambda x: x * 2)
    with torch.inference_mode():
        x = kit.randn(3)
        assert torch.equal(guard(x), x * 2)
    for i in range(CALLS):
        y = kit.randn(3, seed=i)
        assert torch.equal(guard(y), y * 2)


def test_strided_and_broadcast_inputs(kit: Any) -> None:
    agrees(kit, lambda x: x * 2, lambda i: ((kit.randn(6, seed=i)[::2],), {}))
    agrees(kit, lambda x: x + 1, lambda i: ((kit.randn(3, 1, seed=i).expand(3, 5),), {}))
    agrees(kit, lambda x: x + 1, lambda i: ((kit.randn(4, seed=i).expand(2, 4).t(),), {}))


def test_memory_that_overlaps_itself_is_refused(kit: Any) -> None:
    x = kit.randn(8).as_strided((3, 4), (2, 1))
    with pytest.raises(SignatureError, match="overlaps itself"):
        kit.guard(lambda x: x * 2)(x)


def test_the_same_tensor_twice(kit: Any) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    guard = kit.guard(fn)
    for i in range(CALLS):
        x, twin = kit.randn(3, seed=i), kit.randn(3, seed=i)
        assert torch.equal(guard(x, x), fn(twin, twin))
        assert torch.equal(x, twin)
    y, z = kit.randn(3, seed=50), kit.randn(3, seed=51)
    assert torch.equal(guard(y.clone(), z), fn(y.clone(), z))
    assert guard.stats["graphs"] == 2


def test_overlapping_arguments_are_refused_only_when_written(kit: Any) -> None:
    base = kit.randn(6)
    assert torch.equal(kit.guard(lambda a, b: a + b)(base[:4], base[2:]), base[:4] + base[2:])
    with pytest.raises(SignatureError, match="shares memory"):
        kit.guard(lambda a, b: a.add_(b))(base[:4], base[2:])


def test_results_that_are_arguments_views_none_or_plain(kit: Any) -> None:
    guard = kit.guard(lambda x: (x, x[0], None, 7, "s"))
    for i in range(CALLS):
        x = kit.randn(3, 2, seed=i)
        whole, row, nothing, number, text = guard(x)
        assert whole is x
        assert torch.equal(row, x[0])
        assert (nothing, number, text) == (None, 7, "s")
    agrees(kit, lambda x: None, lambda i: ((kit.randn(2),), {}))


def test_empty_tensors(kit: Any) -> None:
    agrees(kit, lambda x, y: x.sum() + y, lambda i: ((kit.randn(0, 4), kit.randn(2, seed=i)), {}))


def test_a_call_without_tensors_uses_the_modules_device(kit: Any) -> None:
    linear = torch.nn.Linear(3, 3).to(kit.device)
    guard = kit.guard(lambda: linear.weight.detach() * 2)
    for i in range(CALLS):
        with torch.no_grad():
            linear.weight.fill_(float(i))
        assert torch.equal(guard(), linear.weight * 2)


def test_a_call_that_shows_no_tensor_works_on_the_current_device(kit: Any) -> None:
    guard = kit.guard(lambda n: torch.full((2,), float(n), device=kit.device))
    for _ in range(CALLS):
        assert guard(3).tolist() == [3.0, 3.0]


def test_what_the_function_raises_reaches_the_caller(kit: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    guard = kit.guard(fn)
    with pytest.raises(KeyError, match="mine"):
        guard(kit.randn(2))
    assert guard.stats["captures"] == 0


def test_a_generator_argument(kit: Any) -> None:
    gen = torch.Generator(kit.device).manual_seed(3)

    def fn(x: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
        return x + torch.randn(3, generator=gen, device=kit.device)

    guard = kit.guard(fn)
    got = [guard(torch.zeros(3, device=kit.device), gen).clone() for _ in range(CALLS)]
    twin = torch.Generator(kit.device).manual_seed(3)
    want = [fn(torch.zeros(3, device=kit.device), twin) for _ in range(CALLS)]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_nested_guards_and_recursion_are_part_of_the_outer_call(kit: Any) -> None:
    inner = kit.guard(lambda x: x * 2)

    def outer(x: torch.Tensor, depth: int) -> torch.Tensor:
        return inner(x) if depth == 0 else guard(x, depth - 1) + 1

    guard = kit.guard(outer)
    x = kit.randn(3)
    for _ in range(CALLS):
        assert torch.equal(guard(x, 2), x * 2 + 2)
    assert guard.stats["graphs"] == 1
    assert inner.stats["graphs"] == 0
    assert inner.stats["inlined"] > 0
    assert torch.equal(inner(x), x * 2)
    assert inner.stats["graphs"] == 1


def test_a_result_with_a_live_graph_is_refused(kit: Any) -> None:
    linear = torch.nn.Linear(3, 3).to(kit.device)
    guard = kit.guard(linear)
    with pytest.raises(SignatureError, match="result requires grad"):
        guard(kit.randn(2, 3))
    with torch.no_grad():
        guard(kit.randn(2, 3))
    with pytest.raises(SignatureError, match="requires grad"):
        kit.guard(lambda x: (x * 2).detach())(kit.randn(2).requires_grad_())


def test_methods_have_a_guard_per_object(kit: Any) -> None:
    class Scaler:
        def __init__(self, by: float) -> None:
            self.by = torch.tensor(by, device=kit.device)

        @capture_safe(backend=kit.backend)
        def run(self, x: torch.Tensor) -> torch.Tensor:
            """Doc."""
            return x * self.by

    two, three = Scaler(2.0), Scaler(3.0)
    x = kit.randn(3)
    for _ in range(CALLS):
        assert torch.equal(two.run(x), x * 2)
        assert torch.equal(three.run(x), x * 3)
    assert two.run is two.run
    assert two.run is not three.run
    assert two.run.__doc__ == "Doc."


def test_a_guarded_module_is_still_its_module(kit: Any) -> None:
    linear = torch.nn.Linear(3, 3).to(kit.device)
    guard = kit.guard(linear)
    assert guard.state_dict().keys() == linear.state_dict().keys()
    assert list(guard.parameters()) == list(linear.parameters())
    guard.eval()
    assert linear.training is False


# ---- buckets ----

SIZES = [4, 8, 16]


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> Any:
    kept = x * mask.unsqueeze(-1)
    return kept.sum((0, 1)) / mask.sum(), kept * 2


def bucketed(kit: Any, fn: Any = masked_mean, **options: Any) -> Any:
    where = {"x": (1, SIZES), "mask": (1, SIZES)}
    return kit.guard(fn, buckets=where, pad={"mask": 0.0}, **options)


def batch(kit: Any, length: int, seed: int = 0) -> Any:
    return kit.randn(2, length, 3, seed=seed), torch.ones(2, length, device=kit.device)


def test_calls_are_routed_padded_and_cut_back(kit: Any) -> None:
    guard = bucketed(kit)
    for i, length in enumerate([5, 3, 16, 1, 8, 5, 2, 7, 16, 4, 3, 9, 9, 2]):
        x, mask = batch(kit, length, seed=i)
        mean, kept = guard(x, mask)
        want_mean, want_kept = masked_mean(x, mask)
        assert kept.shape == want_kept.shape
        torch.testing.assert_close(mean, want_mean)
        torch.testing.assert_close(kept, want_kept)
    assert guard.stats["graphs"] == len(SIZES)
    assert guard.stats["captures"] == len(SIZES)


def test_the_largest_bucket_is_captured_first(kit: Any) -> None:
    guard = bucketed(kit)
    guard(*batch(kit, 3))
    assert [captured.static.size for captured in guard._graphs.values()] == [16, 8, 4]
    pools = {id(captured.static) for captured in guard._graphs.values()}
    assert len(pools) == 3


def test_a_call_at_a_buckets_own_size_still_learns_what_to_cut(kit: Any) -> None:
    guard = kit.guard(lambda x: x * 2, buckets={"x": (0, [8])})
    for length in (8, 8, 8, 5, 3, 8):
        x = kit.randn(length, seed=length)
        assert torch.equal(guard(x), x * 2)


def test_too_long_a_call(kit: Any) -> None:
    with pytest.raises(OutOfBucketError, match="longer than the largest bucket"):
        bucketed(kit)(*batch(kit, 17))
    guard = bucketed(kit, on_violation="eager")
    with pytest.warns(UserWarning, match="out-of-bucket"):
        got = guard(*batch(kit, 17))
    torch.testing.assert_close(got[1], masked_mean(*batch(kit, 17))[1])
    assert guard.stats["eager"] == 1


def test_padding_that_takes_part_is_found(kit: Any) -> None:
    guard = kit.guard(lambda x: x.mean(), buckets={"x": (0, [8, 16])})
    with pytest.raises(ReplayMismatchError, match="padding takes part"):
        guard(kit.randn(5))


def test_lengths_that_disagree(kit: Any) -> None:
    x, _ = batch(kit, 5)
    with pytest.raises(SignatureError, match="have lengths"):
        bucketed(kit)(x, torch.ones(2, 6, device=kit.device))


def test_bucket_declarations_are_checked() -> None:
    with pytest.raises(ValueError, match="share their sizes"):
        capture_safe(masked_mean, buckets={"x": (1, [4]), "mask": (1, [8])})
    with pytest.raises(ValueError, match="below the number of buckets"):
        capture_safe(masked_mean, buckets={"x": (1, list(range(1, 20)))})
    with pytest.raises(ValueError, match="not among the bucketed"):
        capture_safe(masked_mean, buckets={"x": (1, [4])}, pad={"y": 0})


def test_a_key_function(kit: Any) -> None:
    longest = {"value": 1}
    guard = kit.guard(lambda x: x * longest["value"], buckets=lambda x: longest["value"], watch="off")
    x = kit.randn(3)
    for value in (1, 2, 1, 2):
        longest["value"] = value
        for _ in range(4):
            assert torch.equal(guard(x), x * value)
    assert guard.stats["graphs"] == 2


# ---- inputs, outputs, LRU ----


def test_own_buffers_are_neither_checked_nor_copied(kit: Any) -> None:
    guard = kit.guard(lambda x: x * 2, inputs="alias")
    x = kit.randn(3)
    for _ in range(3):
        guard(x) if guard.stats["graphs"] == 0 or guard._graphs[next(iter(guard._graphs))].shadows else None
    (own,), _ = guard.input_buffers()
    for i in range(CALLS):
        own.fill_(float(i))
        assert guard(own).tolist() == [2.0 * i] * 3
    with pytest.raises(SignatureError, match="not the guard's own buffer"):
        guard(kit.randn(3).double().float() if False else kit.randn(3))


def test_the_callers_tensors_are_never_written(kit: Any) -> None:
    guard = kit.guard(lambda x: x * 2)
    tensors = [kit.randn(3, seed=i) for i in range(CALLS)]
    copies = [t.clone() for t in tensors]
    for t in tensors:
        guard(t)
    for t, c in zip(tensors, copies, strict=True):
        assert torch.equal(t, c)


def test_outputs_clone_and_ring(kit: Any) -> None:
    for outputs, depth in (("clone", 100), (3, 3)):
        guard = kit.guard(lambda x: x * 2, outputs=outputs)
        kept = [guard(torch.full((2,), float(i), device=kit.device)) for i in range(10)]
        for i in range(10 - depth if depth < 10 else 0, 10):
            assert kept[i].tolist() == [2.0 * i] * 2


def test_the_graph_not_used_for_longest_goes(kit: Any) -> None:
    guard = kit.guard(lambda x: x * 2, max_graphs=2)
    for n in (2, 3, 2, 4, 2, 3):
        x = kit.randn(n)
        assert torch.equal(guard(x), x * 2)
    assert guard.stats["graphs"] == 2
    assert guard.stats["evicted"] == 2
    assert guard.stats["captures"] == 4


def test_thrashing_is_told(kit: Any) -> None:
    guard = kit.guard(lambda x, n: x * n, max_graphs=2, verify="off")
    with pytest.warns(UserWarning, match="capture-in-loop"):
        for n in range(8):
            guard(kit.randn(2), float(n))


def test_reset_and_invalidate(kit: Any) -> None:
    guard = kit.guard(lambda x: x * 2)
    x = kit.randn(3)
    for _ in range(4):
        guard(x)
    guard.invalidate("weights were swapped")
    assert guard.stats["graphs"] == 0
    assert "weights were swapped" in str(guard.report())
    assert torch.equal(guard(x), x * 2)
    guard.reset()
    assert guard.stats["captures"] == 0
    assert torch.equal(guard(x), x * 2)


def test_options_are_checked() -> None:
    for bad in (
        {"mode": "fast"},
        {"outputs": 1},
        {"verify": 0},
        {"on_violation": "ignore"},
        {"warmup": 0},
        {"watch": "x"},
    ):
        with pytest.raises(ValueError):
            capture_safe(lambda x: x, **bad)


def test_without_a_device_it_says_so_or_runs_eagerly(monkeypatch: Any) -> None:
    from graphlint.runtime.fake import FakeBackend

    backend = FakeBackend()
    monkeypatch.setattr(backend, "unavailable", lambda: "no CUDA device is visible")
    x = torch.ones(2)
    with pytest.raises(NoDeviceError, match="no CUDA device"):
        capture_safe(lambda x: x + 1, backend=backend)(x)
    guard = capture_safe(lambda x: x + 1, backend=backend, on_violation="eager")
    with pytest.warns(UserWarning, match="runs eagerly"):
        assert guard(x).tolist() == [2.0, 2.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning, not one per call
        guard(x)
    assert guard.stats["eager"] == 2


def test_tensors_elsewhere_are_refused(kit: Any) -> None:
    if kit.device == "cuda":
        with pytest.raises(SignatureError, match="a tensor on cpu"):
            kit.guard(lambda x: x)(torch.ones(2))
        with pytest.raises(SignatureError, match="two-devices"):
            linear = torch.nn.Linear(2, 2)
            kit.guard(lambda x: linear(x.cpu()))(kit.randn(1, 2))
    with pytest.raises((SignatureError, CaptureError)):
        kit.guard(lambda x: x)(torch.ones(2, device="meta"))


def test_live_guards_share_no_stream_and_give_theirs_back(kit: Any) -> None:
    guards = [kit.guard(lambda x: x * 2) for _ in range(2)]
    for guard in guards:
        guard(kit.randn(3))
    first, second = (guard._stream for guard in guards)
    assert first != second
    guards[0].reset()
    third = kit.guard(lambda x: x * 3)
    third(kit.randn(3))
    assert third._stream == first
    guards[0](kit.randn(3))
    assert guards[0]._stream not in (first, second)
