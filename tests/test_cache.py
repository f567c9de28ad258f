"""The cache: it answers, it forgets what changed, and no state of the disk can make a run fail or lie."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from kit import project, small_engine

from graphlint import cache, discover, pipeline
from graphlint.cache import Store
from graphlint.config import Config
from graphlint.files import Sources
from graphlint.findings import LintResult

KEY, OTHER = b"k" * 16, b"o" * 16


class Engine:
    """Counts how often the real work was done."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, sources: Sources, settings: Config) -> LintResult:
        self.runs += 1
        return small_engine(sources, settings)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test keeps its cache in its own folder, whatever the caller has set."""
    monkeypatch.delenv("GRAPHLINT_CACHE_DIR", raising=False)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    counted = Engine()
    monkeypatch.setattr(pipeline, "analyse", counted)
    return counted


def old(*paths: Path) -> None:
    """Makes files look as if nobody touched them lately, as they are in life."""
    for path in paths:
        os.utime(path, (time.time() - 100, time.time() - 100))


def lint(root: Path, **settings: object) -> LintResult:
    return pipeline.lint(root, Config(root=str(root), **settings))  # type: ignore[arg-type]


def packs(folder: Path) -> list[Path]:
    return sorted(folder.glob("pack-*"))


# --- summaries -----------------------------------------------------------------------------------------------------


def test_what_was_put_is_got_by_a_later_store(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put(KEY, b"summary")
    assert store.get(KEY) == b"summary" and not packs(tmp_path)
    store.flush()
    later = Store(str(tmp_path))
    assert later.get(KEY) == b"summary" and later.get(OTHER) is None and later.hits == 1


def test_a_store_without_a_folder_remembers_for_the_run() -> None:
    store = Store(None)
    store.put(KEY, b"x")
    store.flush()
    assert store.get(KEY) == b"x"


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "flipped", "folder"])
def test_a_damaged_pack_counts_as_not_there(tmp_path: Path, damage: str) -> None:
    store = Store(str(tmp_path))
    store.put(KEY, b"summary" * 100)
    store.flush()
    (pack,) = packs(tmp_path)
    whole = pack.read_bytes()
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    pack.unlink()
    if damage == "folder":
        pack.mkdir()
    else:
        pack.write_bytes(
            {"cut": whole[:-10], "empty": b"", "foreign": b"PK\3\4" + whole, "flipped": bytes(flipped)}[damage]
        )
    later = Store(str(tmp_path))
    assert later.get(KEY) is None
    later.put(KEY, b"again")
    later.flush()
    assert Store(str(tmp_path)).get(KEY) == (None if damage == "folder" else b"again")


def test_many_packs_become_one(tmp_path: Path) -> None:
    for number in range(20):
        store = Store(str(tmp_path))
        store.put(bytes([number]) * 16, b"%d" % number)
        store.flush()
    assert len(packs(tmp_path)) <= cache._MAX_PACKS
    last = Store(str(tmp_path))
    assert [last.get(bytes([number]) * 16) for number in range(20)] == [b"%d" % number for number in range(20)]


def test_beyond_its_size_only_what_is_used_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MAX_BYTES", 50)
    monkeypatch.setattr(cache, "_MAX_PACKS", 1)
    first = Store(str(tmp_path))
    first.put(KEY, b"k" * 40)
    first.put(OTHER, b"o" * 40)
    first.flush()
    second = Store(str(tmp_path))
    assert second.get(KEY)
    second.put(b"n" * 16, b"new")
    second.flush()
    last = Store(str(tmp_path))
    assert last.get(KEY) and last.get(b"n" * 16) and last.get(OTHER) is None


def _many_puts(folder: str, start: int) -> None:
    for number in range(start, start + 30):
        store = Store(folder)
        store.put(number.to_bytes(16, "big"), b"x" * 1000)
        store.flush()


def test_two_processes_at_once_leave_whole_files(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_many_puts, args=(str(tmp_path), start)) for start in (0, 1000)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert all(cache._load(str(pack), cache.Pack) for pack in packs(tmp_path))
    assert not list(tmp_path.glob("tmp-*"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_locked_disk_costs_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine, code: int
) -> None:
    project(tmp_path, {"a.py": "x.item()\n"})

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", refuse)
    assert len(lint(tmp_path).findings) == 1
    assert not list(tmp_path.rglob("*.bin")) and not list(tmp_path.rglob("tmp-*"))
    store = Store(str(tmp_path / "c"))
    store.put(KEY, b"x")
    store.flush()
    assert os.strerror(code).lower() in store.trouble


def test_a_cache_folder_that_is_a_file_costs_the_cache_only(tmp_path: Path, engine: Engine) -> None:
    project(tmp_path, {"a.py": "x.item()\n", ".graphlint_cache": "not a folder"})
    assert len(lint(tmp_path).findings) == 1


# --- whole results -------------------------------------------------------------------------------------------------


def test_an_unchanged_project_is_answered_without_reading(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path, {"a.py": "x.item()\n", "b.py": "y = 1\n"})
    old(tmp_path / "a.py", tmp_path / "b.py")
    first = lint(tmp_path)
    monkeypatch.setattr("graphlint.files.Source._read", lambda self: pytest.fail(f"{self} was read"))
    assert lint(tmp_path) == first and engine.runs == 1


def test_a_touched_file_with_the_same_content_still_hits(tmp_path: Path, engine: Engine) -> None:
    project(tmp_path, {"a.py": "x.item()\n"})
    lint(tmp_path)
    old(tmp_path / "a.py")
    lint(tmp_path)
    assert engine.runs == 1


def test_a_change_that_stat_cannot_tell_is_seen(tmp_path: Path, engine: Engine) -> None:
    """Same size, same time: a file written a moment ago is read again, whatever its stat says."""
    project(tmp_path, {"a.py": "x.item()\n"})
    now = os.stat(tmp_path / "a.py")
    assert len(lint(tmp_path).findings) == 1
    (tmp_path / "a.py").write_text("x.itex()\n")
    os.utime(tmp_path / "a.py", ns=(now.st_atime_ns, now.st_mtime_ns))
    assert not lint(tmp_path).findings and engine.runs == 2


def test_changed_content_settings_files_and_rules_miss(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path, {"a.py": "x.item()\n"})
    lint(tmp_path)
    lint(tmp_path, ignore=("CG1",))
    assert engine.runs == 2
    project(tmp_path, {"b.py": ""})
    lint(tmp_path)
    assert engine.runs == 3
    project(tmp_path, {"a.py": "x.item() + 1\n"})
    lint(tmp_path)
    assert engine.runs == 4
    monkeypatch.setattr(cache, "_tool", [b"another version!"])
    lint(tmp_path)
    assert engine.runs == 5


def test_output_settings_do_not_matter(tmp_path: Path, engine: Engine) -> None:
    project(tmp_path, {"a.py": "x.item()\n"})
    lint(tmp_path)
    lint(tmp_path, output_format="sarif", unsafe_fixes=True)
    assert engine.runs == 1


def test_without_cache_nothing_is_written(tmp_path: Path, engine: Engine) -> None:
    project(tmp_path, {"a.py": "x.item()\n"})
    lint(tmp_path, cache=False)
    lint(tmp_path, cache=False)
    assert engine.runs == 2 and os.listdir(tmp_path) == ["a.py"]


def test_the_cache_hides_itself_from_git(tmp_path: Path, engine: Engine) -> None:
    project(tmp_path, {"a.py": ""})
    lint(tmp_path)
    assert (tmp_path / ".graphlint_cache/.gitignore").read_text() == "*\n"


def test_a_neighbour_that_was_looked_for_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def engine(sources: Sources, settings: Config) -> LintResult:
        runs.append([sources.by_module(name, sources.linted[0]) for name in ("helper", "other")])
        return LintResult(())

    monkeypatch.setattr(pipeline, "analyse", engine)
    project(tmp_path, {"a.py": "import helper, other", "helper.py": "x = 1"})
    settings = Config(root=str(tmp_path))
    pipeline.lint(tmp_path / "a.py", settings)
    pipeline.lint(tmp_path / "a.py", settings)
    assert len(runs) == 1
    project(tmp_path, {"helper.py": "x = 22"})
    pipeline.lint(tmp_path / "a.py", settings)
    assert len(runs) == 2
    project(tmp_path, {"other.py": ""})
    pipeline.lint(tmp_path / "a.py", settings)
    assert len(runs) == 3 and runs[2][1] is not None


def test_an_unreadable_file_is_tried_again(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, {"a.py": "x.item()\n"})
    old(tmp_path / "a.py")
    with monkeypatch.context() as locked:
        locked.setattr("builtins.open", _refusing(open))
        assert [problem.message for problem in lint(tmp_path).problems] == ["can't be read: permission denied"]
    assert not lint(tmp_path).problems and engine.runs == 2


def _refusing(real: object) -> object:
    def opened(file: object, *args: object, **more: object) -> object:
        if str(file).endswith("a.py"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(file, *args, **more)  # type: ignore[operator]

    return opened


def test_old_versions_are_cleared_away(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, {"a.py": ""})
    (tmp_path / ".graphlint_cache/kept by the user").mkdir(parents=True)
    for number in range(8):
        monkeypatch.setattr(cache, "_tool", [bytes([number]) * 16])
        lint(tmp_path)
    folders = [path.name for path in (tmp_path / ".graphlint_cache").iterdir() if path.is_dir()]
    assert len(folders) == cache._MAX_VERSIONS + 1 and "kept by the user" in folders


def test_the_tool_digest_stands_for_code_and_rules() -> None:
    assert len(cache.tool_digest()) == 16
    assert any(
        b"# host-sync" in part
        for part in cache._contents(str(pipeline.__file__).rsplit("/graphlint/", 1)[0] + "/rules", ".md")
    )


def test_a_run_is_keyed_by_what_the_user_named(tmp_path: Path, engine: Engine) -> None:
    project(tmp_path, {"pyproject.toml": "", "a.py": "x.item()\n", "b.py": "y.item()\n"})
    settings = Config(root=str(tmp_path))
    assert len(pipeline.lint(tmp_path, settings).findings) == 2
    assert len(pipeline.lint(tmp_path / "a.py", settings).findings) == 1
    sources, _ = discover.discover([str(tmp_path / "a.py")], settings)
    assert len(sources.context) == 1
