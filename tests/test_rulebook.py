"""The rulebook: the loader's errors, the grammar of keys, the shape of pages, and agreement with what was measured."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import pytest

from graphlint import rulebook
from graphlint.rulebook import CallFact, Rule, RulebookError

BOOK = rulebook.load()
MEASURED: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "measured.json").read_text(encoding="utf-8"))
TORCH = rulebook.parse_version(MEASURED["torch"])
SECTIONS = [
    "What it does",
    "Why is this bad?",
    "Examples",
    "What to write instead",
    "Known limits",
]
# The first digit of a code groups families; CG9 is about suppressions, whatever family they stand for.
DIGITS = {
    "1": {"host-sync", "data-control-flow", "dynamic-shape", "dynamic-alloc"},
    "2": {"rng", "stream", "collective", "warmup"},
    "3": {"optimizer", "varlen-attention"},
    "4": {"static-address"},
    "5": {"host-scalar", "side-effect"},
    "6": {"recapture", "compile"},
    "7": set(rulebook.FAMILIES),
    "9": set(rulebook.FAMILIES),
}
FIELDS = {"call", "why", "value", "where"}
# Captured when measured, and still a fault: the program's seed was the current one, so nothing was set.
SEEDED_ALIKE = {"manual_seed", "cuda_manual_seed"}
# A host value reads without a wait; the linter knows that the receiver is on the CPU.
ON_THE_HOST = {"sizeof_item_cpu", "cpu_loop"}
# Fails for some shapes only, which a call in source does not show: said under `Known limits`.
BY_SHAPE = {"cholesky_inverse": "checked-linalg", "cholesky_solve": "checked-linalg", "isin": "host-sync"}

PAGE = """# some-rule

```toml
code = "CG999"
severity = "crash"
family = "host-sync"
since = "0.1.0"
message = "`{call}` {why}"
help = "Do not."
%s
```

## What it does

Finds it. And more.
"""


def section(rule: Rule, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", rule.page, re.S | re.M)
    return found.group(1) if found else ""


def blocks(text: str) -> list[str]:
    return re.findall(r"^```py\n(.*?)^```", text, re.S | re.M)


def error_lines(rule: Rule) -> list[str]:
    return [line for block in blocks(section(rule, "Examples")) for line in block.splitlines() if "# error" in line]


# --- the loader ---------------------------------------------------------------------------------------------------


def test_a_page_becomes_a_rule() -> None:
    rule = rulebook.read_page("some-rule", PAGE % '[calls]\n"torch.f()" = "waits"\n[ops]\n"aten::f" = "waits"')
    assert (rule.code, rule.fix, rule.judged, rule.url) == ("CG999", "never", False, "rules/some-rule.md")
    assert rule.summary == "Finds it."
    assert [fact.name for fact in rule.calls] == ["torch.f"]
    assert [fact.op for fact in rule.ops] == ["aten::f"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no heading", "begin the page with `# some-rule`"),
        (PAGE.replace("# some-rule", "# other-rule") % "", "begin the page with `# some-rule`"),
        (PAGE % "fix = ", "rules/some-rule.md: "),
        (PAGE.replace('help = "Do not."\n', "") % "", "lacks help"),
        (PAGE.replace("host-sync", "no-family") % "", "unknown family or severity"),
        (PAGE.replace('"crash"', '"fatal"') % "", "unknown family or severity"),
        (PAGE % '[calls]\n"torch.f(" = "waits"', "key `torch.f(`"),
        (PAGE % '[calls]\n"torch.f(name)" = "waits"', "key `torch.f(name)`"),
        (PAGE % '[calls]\n"torch.f()" = {until = "2.9"}', "key `torch.f()`"),
    ],
)
def test_a_malformed_page_is_named(text: str, words: str) -> None:
    with pytest.raises(RulebookError, match=re.escape(words)) as caught:
        rulebook.read_page("some-rule", text)
    assert str(caught.value).startswith("rules/some-rule.md: ")


def test_two_rules_of_one_code_and_two_reasons_of_one_operator_are_refused() -> None:
    one = rulebook.read_page("some-rule", PAGE % '[ops]\n"aten::f" = "waits"')
    other = rulebook.read_page("other", (PAGE % "").replace("# some-rule", "# other"))
    with pytest.raises(RulebookError, match="code CG999 is taken"):
        rulebook.assemble([one, other])
    page = (PAGE % '[ops]\n"aten::f" = "x"').replace("# some-rule", "# third").replace("CG999", "CG998")
    third = rulebook.read_page("third", page)
    with pytest.raises(RulebookError, match="operator aten::f stands in"):
        rulebook.assemble([one, third])


def test_a_judged_table_is_no_finding_by_itself() -> None:
    table = '[calls]\n"torch.f()" = "needs a warm-up"'
    judged = rulebook.read_page("some-rule", PAGE % f"judged = true\n{table}")
    assert judged.calls and not rulebook.assemble([judged]).calls
    assert rulebook.assemble([rulebook.read_page("some-rule", PAGE % table)]).calls


# --- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "parsed"),
    [
        ("torch.Tensor.item()", ("torch.Tensor.item", None, ())),
        ("torch.Tensor.to('cpu')", ("torch.Tensor.to", ("cpu",), ())),
        ("torch.where(_)", ("torch.where", ("_",), ())),
        ("torch.f(..., output_size=None)", ("torch.f", ("...",), (("output_size", None),))),
        ("torch.f(..., strict=True)", ("torch.f", ("...",), (("strict", True),))),
        ("torch.normal(_, Tensor, ...)", ("torch.normal", ("_", "Tensor", "..."), ())),
        ("torch.masked.mean(..., mask=_)", ("torch.masked.mean", ("...",), (("mask", "_"),))),
        ("print(..., Tensor, ...)", ("print", ("...", "Tensor", "..."), ())),
        ("torch.linalg.matrix_power(_, -1)", ("torch.linalg.matrix_power", ("_", -1), ())),
    ],
)
def test_a_key_looks_like_its_call(key: str, parsed: tuple[object, ...]) -> None:
    assert rulebook.parse_key(key) == parsed


def test_a_fact_holds_between_its_releases() -> None:
    fact = CallFact("r", "k", "n", None, (), "why", from_="2.6", until="2.9")
    assert [fact.holds_for((2, minor)) for minor in (5, 6, 9, 10)] == [False, True, True, False]
    assert CallFact("r", "k", "n", None, (), "why").holds_for((9, 9))


def test_a_version_is_read_from_what_torch_says() -> None:
    assert rulebook.parse_version("2.11.0+cu130") == (2, 11)
    with pytest.raises(ValueError, match=r"write it like 2\.11"):
        rulebook.parse_version("newest")


# --- the pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", BOOK.rules, ids=lambda rule: rule.name)
def test_a_page_is_well_formed(rule: Rule) -> None:
    assert re.fullmatch(r"CG[1-79]\d\d", rule.code)
    assert rule.family in DIGITS[rule.code[2]]
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name)
    titles = re.findall(r"^## (.+)$", rule.page, re.M)
    assert [title for title in titles if title in SECTIONS] == SECTIONS
    assert all(section(rule, title).strip() for title in SECTIONS)
    assert rule.summary.endswith(".") and rule.fix in {"never", "safe", "unsafe"}
    assert set(re.findall(r"{(.*?)}", rule.message)) <= FIELDS
    assert "{" not in rule.help and rule.help.strip()
    assert all(fact.why == fact.why.strip() and not fact.why.endswith(".") for fact in (*rule.calls, *rule.ops))


@pytest.mark.parametrize("rule", BOOK.rules, ids=lambda rule: rule.name)
def test_a_page_has_programs_that_parse(rule: Rule) -> None:
    programs = blocks(section(rule, "Examples"))
    assert programs
    for text in blocks(rule.page):
        ast.parse(text)
    marks = [mark for text in programs for mark in re.findall(r"# error(?:: \[(.*?)\])?\s*$", text, re.M)]
    assert all(not name or name in BOOK.by_name for name in marks)
    seen_in_source = not rule.code.startswith("CG7")  # the guard alone sees those, at run time
    if rule.name != "suppression-without-reason" and seen_in_source:
        assert "" in marks or rule.name in marks, "no line shows the fault"


def test_both_names_of_a_rule_find_it() -> None:
    assert BOOK.get("host-sync") is BOOK.get("cg101") is BOOK.get("CG101")
    assert BOOK.get("no-such-rule") is None


@pytest.mark.parametrize("rule", BOOK.rules, ids=lambda rule: rule.name)
def test_a_proof_is_a_fixture_that_exists(rule: Rule) -> None:
    fixtures = rulebook.folder().parent / "fixtures"
    if fixtures.is_dir():
        assert [name for name in rule.proof if not (fixtures / name).exists()] == []


# --- what was measured --------------------------------------------------------------------------------------------


def construct(*verdicts: str) -> list[dict[str, Any]]:
    return [row for row in MEASURED["constructs"] if row["verdict"] in verdicts]


@pytest.mark.parametrize("row", construct("capture-error"), ids=lambda row: row["name"])
def test_what_failed_on_the_gpu_is_in_the_book(row: dict[str, Any]) -> None:
    rule = BOOK.by_name[row["rule"]]
    keys = {fact.key for fact in rule.calls if fact.holds_for(TORCH)}
    assert row["seen"] in keys or any(row["seen"] in line for line in error_lines(rule))


def called(text: str) -> Iterator[str]:
    """Names a program calls: `torch.f` for functions, `torch.Tensor.f` for methods of anything else."""
    alias = {"F": "torch.nn.functional", "nn": "torch.nn"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            dotted = ast.unparse(node.func)
            root, _, rest = dotted.partition(".")
            if re.fullmatch(r"[\w.]+", dotted) and root in {"torch", *alias}:
                yield f"{alias.get(root, root)}.{rest}"
            else:
                yield f"torch.Tensor.{node.func.attr}"


@pytest.mark.parametrize(
    "row",
    construct("ok", "captured", "random-fresh", "host-result", "cpu-ok"),
    ids=lambda row: row["name"],
)
def test_what_captured_on_the_gpu_is_no_call_that_always_fails(row: dict[str, Any]) -> None:
    facts = [fact for name in called(row["program"]) for fact in BOOK.calls.get(name, ())]
    always = [fact.key for fact in facts if fact.args is None and not fact.keywords and fact.holds_for(TORCH)]
    known = SEEDED_ALIKE | ON_THE_HOST
    assert bool(always) == (row["name"] in known), always


@pytest.mark.parametrize("row", MEASURED["operators"], ids=lambda row: row["op"])
def test_operators_agree_with_the_book(row: dict[str, Any]) -> None:
    if row["op"] in BY_SHAPE:
        assert row["op"] in section(BOOK.by_name[BY_SHAPE[row["op"]]], "Known limits")
    elif "capture-error" not in row["verdicts"]:
        name = f"torch.{row['op']}"
        assert [fact.key for fact in BOOK.calls.get(name, ()) if fact.args is None and not fact.keywords] == []
    elif row["fact"]:
        assert [fact for rule in BOOK.rules for fact in rule.calls if fact.name == row["fact"]]
    else:
        assert row["op"] == "__getitem__" and error_lines(BOOK.by_name["host-index"])


def test_measured_programs_are_whole_programs() -> None:
    for row in MEASURED["constructs"]:
        text = measure.program(row)
        compile(text, row["name"], "exec")
        assert ("for _ in range(3)" in text) == row.get("warm", True)


def test_measuring_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_a_measured_program_that_raises_is_a_failed_capture() -> None:
    assert measure.run("import torch\ntorch.cuda.synchronize = lambda: None")
    assert not measure.run("raise ValueError")
