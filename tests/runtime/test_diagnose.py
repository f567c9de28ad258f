"""A failed capture is explained by a dry run of the same call: the right rule, everything else that would fail, and no
trace of the extra run.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import CaptureError, DynamicShapeError  # noqa: E402


def caught(kit: Any, fn: Any, *args: Any, **options: Any) -> CaptureError:
    with pytest.raises(CaptureError) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kit.guard(fn, **options)(*args)
    return found.value


@pytest.mark.parametrize(
    ("rule", "fn"),
    [
        ("dynamic-shape", lambda x: x[x > 0]),
        ("dynamic-shape", lambda x: x.clone().__setitem__(x > -9, x)),
        ("host-sync", lambda x: torch.is_nonzero(x.sum())),
        ("scalar-index", lambda x: x[: (x.sum() * 0).long() + 2]),
        ("scalar-index", lambda x: list(range(9))[(x.sum() * 0).long()]),
        ("data-dependent-branch", lambda x: not x.sum()),
        ("data-dependent-branch", lambda x: x.sum() > 0 and x),
    ],
)
def test_the_rule_is_that_of_the_operator(kit: Any, rule: str, fn: Any) -> None:
    error = caught(kit, fn, kit.randn(6).abs() + 1)
    assert error.rule == rule and error.cause is not None
    assert error.source_line.startswith(f'("{rule}", lambda')


def several(x: torch.Tensor) -> torch.Tensor:
    scale = x.sum().item()  # first
    rows = x[x > 0]  # second
    if rows.sum() > 0:  # third
        return x * scale
    return x


def test_everything_else_that_would_fail_is_told_too(kit: Any) -> None:
    error = caught(kit, several, kit.randn(6).abs())
    assert error.source_line.endswith("# first")
    assert [other.split(": ")[0].split(" ", 1)[1] for other in error.others] == [
        "CG121 dynamic-shape",
        "CG111 data-dependent-branch",
    ]
    assert str(error).count("  also: ") == 2 and error.to_dict()["others"] == list(error.others)


class Counting:
    """Changes the world in every way that a call can."""

    def __init__(self, kit: Any) -> None:
        self.net = torch.nn.Linear(4, 4).to(kit.device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.calls, self.seen = 0, []

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.optimizer.zero_grad(set_to_none=True)
        loss = (self.net(x) + torch.rand(4, device=x.device)).square().mean()
        loss.backward()
        self.optimizer.step()
        x.add_(1)
        return loss.detach() * float(loss)

    def world(self) -> list[Any]:
        return [self.calls, list(self.seen), *[p.detach().clone() for p in self.net.parameters()]]


@pytest.mark.parametrize("choice", ["raise", "eager"])
def test_the_extra_run_leaves_no_trace(kit: Any, choice: str) -> None:
    kit.seed(3)
    mine, twin = Counting(kit), Counting(kit)
    twin.net.load_state_dict(mine.net.state_dict())
    x, y = kit.randn(2, 4), kit.randn(2, 4)
    if choice == "raise":
        assert caught(kit, mine.step, x).rule == "host-sync"
        assert torch.equal(x, y)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kit.seed(4)
            out = kit.guard(mine.step, on_violation="eager")(x)
        kit.seed(4)
        assert torch.equal(out, twin.step(y)) and torch.equal(x, y)
    for a, b in zip(mine.world(), twin.world(), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_fault_in_a_library_is_told_at_the_users_line(kit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "site-packages" / "maskedlib"
    folder.mkdir(parents=True)
    (folder / "loops.py").write_text("def kept(x):\n    y = x * 2\n    return y[y > 0]\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("maskedlib_loops", folder / "loops.py")
    assert spec is not None and spec.loader is not None
    loops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loops)
    error = caught(kit, lambda x: loops.kept(x).sum(), kit.randn(6).abs())  # the user's line
    assert error.rule == "dynamic-shape" and error.source_line.endswith("# the user's line")
    assert "in maskedlib/loops.py:3" in error.reason and error.others == ()


def test_a_capture_ahead_is_explained_too(kit: Any) -> None:
    with pytest.raises(DynamicShapeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kit.guard(lambda x: x[x > 0]).capture(kit.randn(4))


def test_a_dry_run_that_fails_hides_nothing(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphlint.runtime.dryrun.run import StepRun

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(StepRun, "report", broken)
    assert caught(kit, several, kit.randn(6).abs()).source_line.endswith("# first")
