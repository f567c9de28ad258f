"""Every rule with an `[ops]` table is found on a CPU-only torch, through the operators that its page lists."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphlint import rulebook
from graphlint.runtime.dryrun import dry_run
from graphlint.runtime.dryrun.judge import EVENTS, FORMS, Judge
from graphlint.runtime.dryrun.records import Op, Operand, Site

BOOK = rulebook.load()

# a program for every rule; the operator that must be among those that it dispatches
PROGRAMS: dict[str, Callable[[torch.Tensor], object]] = {
    "host-sync": lambda x: x.sum().item(),
    "checked-linalg": lambda x: torch.linalg.solve(x @ x.T + torch.eye(4, device="cuda"), x),
    "hidden-check": lambda x: torch.normal(x, x.abs()),
    "dynamic-shape": lambda x: x.nonzero(),
    "blocking-collective": lambda x: _barrier(),
}


def _barrier() -> None:
    """A barrier of one process."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()


@pytest.mark.parametrize("rule", [rule.name for rule in BOOK.rules if rule.ops])
def test_found_on_a_cpu(rule: str) -> None:
    report = dry_run(PROGRAMS[rule], torch.randn(4, 4), runs=1, target_torch="2.11")
    assert rule in [finding.name for finding in report.findings]


@pytest.mark.parametrize("fact", BOOK.ops.values(), ids=lambda fact: fact.op)
def test_every_listed_operator_is_judged(fact: rulebook.OpFact) -> None:
    """On plain records: a device operand makes the operator a finding of its rule, a host operand does not."""
    name, _, overload = fact.op.partition(".")
    found = Judge((2, 11)).operator(_op(name, overload, "device"))
    assert found is not None and found.name == fact.rule and fact.why in found.message
    assert Judge((2, 11)).operator(_op(name, overload, "host")) is None


def test_events_and_forms_name_rules_of_the_book() -> None:
    assert [fact.rule for fact in EVENTS.values() if BOOK.get(fact.rule) is None] == []
    assert [rule for rule, _ in FORMS.values() if BOOK.get(rule) is None] == []


def _op(name: str, overload: str, role: str) -> Op:
    operand = Operand(role, "torch.float32", (4, 4), 1)  # type: ignore[arg-type]
    return Op(0, name, overload, "", (operand,), (), (), frozenset(), Site("step.py", 3))
