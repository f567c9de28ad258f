"""The rulebook: `rules/*.md` -> `Rule`. Both halves read problems, words and facts from here and nowhere else.

A rule page opens with `# name` and one TOML block; the rest is its documentation. `[calls]` says what the linter sees
in source, `[ops]` what the dry run sees at the dispatcher. A key of `[calls]` looks like the call it describes:

    torch.Tensor.item()                                 any arguments
    torch.Tensor.to('cpu')                              the first positional argument equals this literal
    torch.where(_)                                      exactly one argument
    torch.repeat_interleave(..., output_size=None)      whatever other arguments; this keyword missing or None
    torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True)
    torch.normal(_, Tensor, ...)                           this argument is a tensor (on the device, as far as is known)
    torch.masked.mean(..., mask=_)                         this keyword is given, whatever its value
    print(..., Tensor, ...)                                some positional argument is a tensor

A page with `judged = true` keeps its table for a check in code (what needs a warm-up, what may copy): such a line is no
finding by itself, so it stands in `Rule.calls` only and not in `Rulebook.calls`.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAMILIES = (
    "host-sync",
    "data-control-flow",
    "dynamic-shape",
    "dynamic-alloc",
    "rng",
    "varlen-attention",
    "static-address",
    "host-scalar",
    "stream",
    "warmup",
    "optimizer",
    "collective",
    "side-effect",
    "recapture",
    "compile",
)
SEVERITIES = ("crash", "silent", "leak", "slow", "note")
ANY = "_"
REST = "..."
TENSOR = "Tensor"


class CallFact(msgspec.Struct, frozen=True):
    """One line of a `[calls]` table: which call, and why it matters.

    `name` is the qualified name; `args` the positional patterns (`None` when any arguments match, `"_"` for any one
    value, `"Tensor"` for a tensor, `"..."` for the rest, else a literal); `keywords` the wanted literals. The fact
    holds
    for torch releases from `from_` up to and including `until` ("2.10").
    """

    rule: str
    key: str
    name: str
    args: tuple[object, ...] | None
    keywords: tuple[tuple[str, object], ...]
    why: str
    from_: str = ""
    until: str = ""

    def holds_for(self, torch_version: tuple[int, int]) -> bool:
        """Whether the fact is true on that torch release."""
        low = parse_version(self.from_) if self.from_ else (0, 0)
        high = parse_version(self.until) if self.until else (999, 0)
        return low <= torch_version <= high


class OpFact(msgspec.Struct, frozen=True):
    """One line of an `[ops]` table: a dispatcher operator (`aten::nonzero`) and why it matters."""

    rule: str
    op: str
    why: str


class Rule(msgspec.Struct, frozen=True):
    """One page of the rulebook."""

    name: str
    code: str
    severity: str
    family: str
    since: str
    fix: str
    message: str
    help: str
    proof: tuple[str, ...]
    calls: tuple[CallFact, ...]
    ops: tuple[OpFact, ...]
    page: str
    judged: bool = False

    @property
    def url(self) -> str:
        """Where the page of the rule can be read, relative to the project's root."""
        return f"rules/{self.name}.md"

    @property
    def summary(self) -> str:
        """The first sentence under `## What it does`, on one line."""
        found = re.search(r"## What it does\n+(.+?)(?:\n\n|\n## |\Z)", self.page, re.S)
        text = " ".join(found.group(1).split()) if found else ""
        return text.split(". ")[0].rstrip(".") + "." if text else ""


class Rulebook(msgspec.Struct, frozen=True):
    """All rules, by name and by code, and the tables of both eyes: a call in `calls` that matches is a finding."""

    rules: tuple[Rule, ...]
    by_name: Mapping[str, Rule]
    by_code: Mapping[str, Rule]
    calls: Mapping[str, tuple[CallFact, ...]]
    ops: Mapping[str, OpFact]

    def get(self, name_or_code: str) -> Rule | None:
        """The rule of that name (`host-sync`) or code (`CG101`), or None."""
        return self.by_name.get(name_or_code) or self.by_code.get(name_or_code.upper())


class RulebookError(ValueError):
    """A rule page is malformed; the message names the page and what to mend."""


def parse_version(text: str) -> tuple[int, int]:
    """`"2.11.0+cu130"` -> `(2, 11)`; raises ValueError for a text that does not begin with two numbers."""
    found = re.match(r"(\d+)\.(\d+)", text)
    if not found:
        raise ValueError(f"`{text}` is no torch version; write it like 2.11")
    return int(found.group(1)), int(found.group(2))


def folder() -> Path:
    """The folder of the rule pages: package data in a wheel, the project's `rules/` in a checkout."""
    here = Path(__file__).resolve().parent
    packaged = here / "rules"
    return packaged if packaged.is_dir() else here.parent / "rules"


@functools.cache
def load() -> Rulebook:
    """Reads every page once per process. Raises `RulebookError` for a malformed page."""
    return assemble(read_page(path.stem, path.read_text(encoding="utf-8")) for path in sorted(folder().glob("*.md")))


def assemble(pages: Any) -> Rulebook:
    """Rules -> Rulebook; refuses two rules of one code and one operator with two reasons."""
    rules = tuple(sorted(pages, key=lambda rule: rule.code))
    by_code: dict[str, Rule] = {}
    calls: dict[str, list[CallFact]] = {}
    ops: dict[str, OpFact] = {}
    for rule in rules:
        if rule.code in by_code:
            raise RulebookError(f"rules/{rule.name}.md: code {rule.code} is taken by {by_code[rule.code].name}")
        by_code[rule.code] = rule
        for fact in () if rule.judged else rule.calls:
            calls.setdefault(fact.name, []).append(fact)
        for op in rule.ops:
            if op.op in ops:
                raise RulebookError(f"rules/{rule.name}.md: operator {op.op} stands in {ops[op.op].rule} already")
            ops[op.op] = op
    return Rulebook(
        rules=rules,
        by_name=MappingProxyType({rule.name: rule for rule in rules}),
        by_code=MappingProxyType(by_code),
        calls=MappingProxyType({name: tuple(facts) for name, facts in calls.items()}),
        ops=MappingProxyType(ops),
    )


def read_page(name: str, text: str) -> Rule:
    """The text of `rules/NAME.md` -> Rule. Raises `RulebookError` naming the page."""
    where = f"rules/{name}.md"
    found = re.match(r"# (\S+)\n+```toml\n(.*?)^```", text, re.S | re.M)
    if not found or found.group(1) != name:
        raise RulebookError(f"{where}: begin the page with `# {name}` and a toml block")
    try:
        data = tomllib.loads(found.group(2))
    except tomllib.TOMLDecodeError as error:
        raise RulebookError(f"{where}: {error}") from error
    missing = [key for key in ("code", "severity", "family", "since", "message", "help") if key not in data]
    if missing:
        raise RulebookError(f"{where}: the toml block lacks {', '.join(missing)}")
    if data["family"] not in FAMILIES or data["severity"] not in SEVERITIES:
        raise RulebookError(f"{where}: unknown family or severity")
    return Rule(
        name=name,
        code=data["code"],
        severity=data["severity"],
        family=data["family"],
        since=data["since"],
        fix=data.get("fix", "never"),
        message=data["message"],
        help=data["help"],
        proof=tuple(data.get("proof", ())),
        calls=tuple(_call_fact(name, key, value) for key, value in data.get("calls", {}).items()),
        ops=tuple(OpFact(name, op, why) for op, why in data.get("ops", {}).items()),
        page=text,
        judged=bool(data.get("judged", False)),
    )


def _call_fact(rule: str, key: str, value: Any) -> CallFact:
    """One `[calls]` entry; the value is a reason or a table with `why`, `from_` and `until`."""
    extra = {"why": value} if isinstance(value, str) else dict(value)
    try:
        name, args, keywords = parse_key(key)
        return CallFact(rule, key, name, args, keywords, extra["why"], extra.get("from_", ""), extra.get("until", ""))
    except (SyntaxError, ValueError, KeyError) as error:
        raise RulebookError(f"rules/{rule}.md: [calls] key `{key}`: {error}") from error


def parse_key(key: str) -> tuple[str, tuple[object, ...] | None, tuple[tuple[str, object], ...]]:
    """`"f(_, ..., kw=True)"` -> `("f", ("_", "..."), (("kw", True),))`; raises SyntaxError or ValueError."""
    tree = ast.parse(key, mode="eval").body
    if not isinstance(tree, ast.Call):
        return ast.unparse(tree), None, ()
    if not tree.args and not tree.keywords:
        return ast.unparse(tree.func), None, ()
    args = tuple(_pattern(arg) for arg in tree.args)
    keywords = tuple((str(word.arg), _pattern(word.value)) for word in tree.keywords)
    return ast.unparse(tree.func), args, keywords


def _pattern(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in (ANY, TENSOR):
        return node.id
    value = ast.literal_eval(node)
    return REST if value is ... else value
