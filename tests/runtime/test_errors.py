"""An error says rule, place, reason and cure; every rule an error can carry has a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import graphlint
from graphlint import rulebook
from graphlint.runtime import errors, translate
from graphlint.runtime.errors import CaptureError, HostSyncError, Where

RUNTIME = Path(graphlint.__file__).parent / "runtime"


def test_every_rule_that_the_runtime_names_has_a_page() -> None:
    book = rulebook.load()
    named = set(errors.ERROR_OF_RULE) | {rule for _, rule in translate._TEXT + translate._LINE}
    for path in RUNTIME.glob("*.py"):
        named |= set(re.findall(r'rule="([a-z-]+)"', path.read_text(encoding="utf-8")))
    assert sorted(rule for rule in named if rule not in book.by_name) == []


def test_codes_spelled_in_warnings_are_the_rules() -> None:
    book = rulebook.load()
    text = (RUNTIME / "ledger.py").read_text(encoding="utf-8")
    spelled = re.findall(r"(CG\d{3}) ([a-z-]+):", text)
    assert spelled
    for code, name in spelled:
        assert book.by_code[code].name == name


def test_an_error_tells_everything() -> None:
    here = Path(__file__)
    row = next(
        i for i, line in enumerate(here.read_text(encoding="utf-8").splitlines(), 1) if line.startswith("RUNTIME")
    )
    cause = RuntimeError("called a synchronizing CUDA operation\nmore")
    error = HostSyncError("`x.item()` waits", stage="forward", where=Where(str(here), row), cause=cause)
    assert error.code == "CG101"
    assert error.cure
    assert error.source_line.startswith("RUNTIME =")
    text = str(error)
    assert text.splitlines()[0] == "CG101 host-sync: `x.item()` waits [forward]"
    assert f"--> {here}:{row}" in text
    assert "first error: RuntimeError: called a synchronizing CUDA operation" in text
    assert "more" not in text
    assert json.loads(json.dumps(error.to_dict()))["code"] == "CG101"
    assert isinstance(error, CaptureError)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Attempting CUDA graph capture of step() for an instance of AdamW but capturable=False", "not-capturable"),
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pinned", "host-copy"),
        ("Attempt to increase offset for a CUDA generator not in capture mode.", "unregistered-generator"),
        ("CUDA error: capturing stream has unjoined work", "unjoined-stream"),
        ("operation would make the legacy stream depend on a capturing blocking stream", "default-stream"),
        ("Cannot prepare for replay during capturing stage.", "nested-capture"),
        ("CUDA error: operation failed due to a previous error during capture", "thread-in-capture"),
        ("CUDA error: operation not permitted when stream is capturing", "host-sync"),
        ("something nobody has seen", "unknown-capture-failure"),
    ],
)
def test_the_first_error_finds_its_rule(text: str, rule: str) -> None:
    assert translate.translate(RuntimeError(text)).rule == rule


def test_a_capture_error_passes_through() -> None:
    error = HostSyncError("mine")
    assert translate.translate(error) is error
