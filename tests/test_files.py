"""Which files there are, what they are called, and what they hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit import project

from graphlint import discover, files
from graphlint.config import Config
from graphlint.files import Source, Sources
from graphlint.findings import Problem


def found(*paths: Path | str, config: Config | None = None) -> tuple[Sources, tuple[Problem, ...]]:
    settings = config or Config(root=os.path.abspath(os.fspath(paths[0])))
    return discover.discover([os.fspath(path) for path in paths], settings)


def linted(*paths: Path | str, config: Config | None = None) -> list[str]:
    """Shown paths, relative to the first folder named."""
    sources, problems = found(*paths, config=config)
    assert not problems
    base = os.fspath(paths[0])
    return [os.path.relpath(source.file, base).replace(os.sep, "/") for source in sources.linted]


def test_walk_takes_python_files_in_order(tmp_path: Path) -> None:
    project(tmp_path, {"b.py": "", "a/z.py": "", "a/m.txt": "", "a/b/c.py": "", "d.pyc": ""})
    assert linted(tmp_path) == ["a/b/c.py", "a/z.py", "b.py"]


def test_usual_folders_are_left_out_unless_named(tmp_path: Path) -> None:
    project(tmp_path, {"a.py": "", ".venv/lib/b.py": "", "x/node_modules/c.py": "", "__pycache__/d.py": ""})
    assert linted(tmp_path) == ["a.py"]
    assert linted(tmp_path / ".venv") == ["lib/b.py"]


def test_gitignore_of_every_level(tmp_path: Path) -> None:
    project(
        tmp_path,
        {
            ".gitignore": "gen_*.py\n/top/\n*.so\n# comment\n\n!gen_kept.py\n",
            "gen_a.py": "", "gen_kept.py": "", "top/a.py": "", "sub/top/b.py": "",
            "sub/.gitignore": "local/\n!gen_sub.py\n", "sub/gen_sub.py": "", "sub/local/c.py": "",
        },
    )  # fmt: skip
    assert linted(tmp_path) == ["gen_kept.py", "sub/gen_sub.py", "sub/top/b.py"]
    everything = Config(root=str(tmp_path), respect_gitignore=False)
    assert len(linted(tmp_path, config=everything)) == 6


def test_gitignore_above_counts_inside_a_repository_only(tmp_path: Path) -> None:
    project(tmp_path, {".gitignore": "gen.py\n", "pkg/gen.py": "", "pkg/a.py": ""})
    assert linted(tmp_path / "pkg") == ["a.py", "gen.py"]
    (tmp_path / ".git").mkdir()
    assert linted(tmp_path / "pkg") == ["a.py"]


def test_a_named_folder_is_walked_though_git_ignores_it(tmp_path: Path) -> None:
    project(tmp_path, {".git/HEAD": "", ".gitignore": "work/\n", "work/a.py": ""})
    assert linted(tmp_path / "work") == ["a.py"]
    assert linted(tmp_path) == []


def test_exclude_patterns(tmp_path: Path) -> None:
    project(tmp_path, {"tests/a.py": "", "src/tests/b.py": "", "src/conf_x.py": "", "src/c.py": "", "setup.py": ""})
    settings = Config(root=str(tmp_path), extend_exclude=("/tests/", "conf_*.py", "setup.py"))
    assert linted(tmp_path, config=settings) == ["src/c.py", "src/tests/b.py"]


def test_named_files_are_linted_unless_exclusion_is_forced(tmp_path: Path) -> None:
    project(tmp_path, {"old/a.py": "", "run": "print()"})
    settings = Config(root=str(tmp_path), extend_exclude=("old",))
    assert linted(tmp_path, tmp_path / "old/a.py", tmp_path / "run", config=settings) == ["old/a.py", "run"]
    forced = Config(root=str(tmp_path), extend_exclude=("old",), force_exclude=True)
    assert linted(tmp_path, tmp_path / "old/a.py", config=forced) == []


def test_symlink_loop_ends_and_each_folder_is_walked_once(tmp_path: Path) -> None:
    project(tmp_path, {"a/x.py": "", "b/y.py": ""})
    (tmp_path / "a/up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a/self").symlink_to(tmp_path / "a/self")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nothing.py")
    assert linted(tmp_path) == ["a/x.py", "b/y.py"]


def test_linked_folder_outside_is_followed(tmp_path: Path) -> None:
    project(tmp_path, {"here/a.py": "", "there/b.py": ""})
    (tmp_path / "here/link").symlink_to(tmp_path / "there", target_is_directory=True)
    assert linted(tmp_path / "here") == ["a.py", "link/b.py"]


def test_what_cannot_be_had_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, {"a.py": "", "locked/b.py": ""})
    real = os.scandir

    def scandir(folder: str) -> object:
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    os.mkfifo(tmp_path / "pipe.py")
    sources, problems = found(tmp_path, tmp_path / "nothing.py", tmp_path / "pipe.py")
    assert [source.module for source in sources.linted] == ["a"]
    assert [problem.message for problem in problems] == [
        "can't be listed: permission denied",
        "does not exist; name a Python file or a folder",
        "is not a regular file; name a Python file or a folder",
    ]


def test_file_name_that_is_no_text_can_be_shown(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/b\xff.py"
    with open(path, "wb") as stream:
        stream.write(b"x = 1\n")
    sources, _ = found(tmp_path)
    (source,) = sources.linted
    assert source.path.endswith("b\\xff.py") and source.text == "x = 1\n"


@pytest.mark.parametrize(
    ("layout", "file", "module"),
    [
        (("pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/m.py"), "pkg/sub/m.py", "pkg.sub.m"),
        (("pkg/__init__.py",), "pkg/__init__.py", "pkg"),
        (("pyproject.toml", "src/pkg/__init__.py", "src/pkg/m.py"), "src/pkg/m.py", "pkg.m"),
        (("pyproject.toml", "src/space/m.py"), "src/space/m.py", "space.m"),
        (("pyproject.toml", "space/deep/m.py"), "space/deep/m.py", "space.deep.m"),
        (("pyproject.toml", "not-a-name/m.py"), "not-a-name/m.py", "m"),
        (("script.py",), "script.py", "script"),
    ],
)
def test_module_names(tmp_path: Path, layout: tuple[str, ...], file: str, module: str) -> None:
    project(tmp_path, dict.fromkeys(layout, ""))
    sources, _ = found(tmp_path / file)
    assert [source.module for source in sources.linted] == [module]
    assert sources.by_module(module) is sources.linted[0]


def test_context_is_the_project_around_a_named_file(tmp_path: Path) -> None:
    project(tmp_path, {"pyproject.toml": "", "pkg/__init__.py": "", "pkg/a.py": "", "pkg/b.py": "", "tests/t.py": ""})
    sources, _ = found(tmp_path / "pkg/a.py")
    assert [source.module for source in sources.linted] == ["pkg.a"]
    assert {source.module for source in sources.context} == {"pkg", "pkg.b", "tests.t"}
    other = sources.by_module("pkg.b")
    assert other and not sources.is_linted(other.path) and sources.is_linted(sources.linted[0].path)


def test_neighbours_are_looked_for_on_import_only(tmp_path: Path) -> None:
    project(tmp_path, {"a.py": "", "helper.py": "x = 1", "lib/__init__.py": "", "lib/m.py": ""})
    sources, _ = found(tmp_path / "a.py")
    assert not sources.context
    near = sources.linted[0]
    helper = sources.by_module("helper", near)
    assert helper and helper.text == "x = 1"
    assert sources.by_module("lib.m", near) and not sources.by_module("numpy", near)
    assert {os.path.basename(file) for file, source in sources.lookups.items() if source} == {"helper.py", "m.py"}


def test_installed_packages_are_nobodys_neighbours(tmp_path: Path) -> None:
    project(tmp_path, {"site-packages/one/__init__.py": "", "site-packages/two.py": ""})
    sources, _ = found(tmp_path / "site-packages/one")
    assert sources.by_module("one") and not sources.by_module("two")


def test_scripts_of_one_name_find_their_own_helpers(tmp_path: Path) -> None:
    project(tmp_path, {"x-1/main.py": "", "x-1/util.py": "", "x-2/main.py": "", "x-2/util.py": ""})
    sources, _ = found(tmp_path)
    for source in sources.linted:
        util = sources.by_module("util", source)
        assert util and os.path.dirname(util.file) == os.path.dirname(source.file)


def test_namespace_package_is_found_by_both_names(tmp_path: Path) -> None:
    project(tmp_path, {"pyproject.toml": "", "space/pkg/__init__.py": "", "space/pkg/m.py": ""})
    sources, _ = found(tmp_path)
    assert sources.by_module("pkg.m") is sources.by_module("space.pkg.m") is not None


def source_of(data: bytes) -> Source:
    return Source("a.py", "/a.py", "a", "/", data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"x = '\xc3\xa4'", "x = 'ä'"),
        (b"\xef\xbb\xbfx = 1", "x = 1"),
        (b"# -*- coding: latin-1 -*-\nx = '\xe4'", "# -*- coding: latin-1 -*-\nx = 'ä'"),
        (
            b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\n'\x80'",
            "#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\n'€'",
        ),
        (b"a\r\nb\rc\n", "a\nb\nc\n"),
        (b"a\x0cb\n", "a\x0cb\n"),
        (b"", ""),
    ],
)
def test_decoding(data: bytes, text: str) -> None:
    source = source_of(data)
    assert source.text == text and source.check() is None


@pytest.mark.parametrize(
    ("data", "row", "words"),
    [
        (b"a = 1\nb = '\xff'\n", 2, "can't be decoded as utf-8: byte 0xff"),
        (b"# coding: no-such\n", 1, "unknown encoding"),
        (b"a\nb\0c\n", 2, "null byte"),
        (b"\xef\xbb\xbf# coding: latin-1\n", 1, "can't be decoded"),
    ],
)
def test_undecodable_text_is_a_problem_with_its_row(data: bytes, row: int, words: str) -> None:
    source = source_of(data)
    problem = source.check()
    assert problem and problem.row == row and words in problem.message
    assert source.text == ""


def test_missing_and_huge_files_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Source("gone.py", str(tmp_path / "gone.py"), "gone", str(tmp_path))
    assert missing.data == b"" and missing.unread and missing.problem
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    (tmp_path / "big.py").write_bytes(b"x" * 11)
    big = Source("big.py", str(tmp_path / "big.py"), "big", str(tmp_path))
    assert big.text == "" and big.problem and "larger" in big.problem.message


def test_digest_depends_on_content_only() -> None:
    assert source_of(b"x").digest == Source("b.py", "/b.py", "b", "/", b"x").digest != source_of(b"y").digest
