"""The house rules that no linter knows, as tests. A rule that gets in the way is changed here, in the open."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "workers", "gpu", "snapshot_store", "deploy")
EVERYTHING = (*PACKAGES, "tests", "benchmarks", "examples", "docs", "requirements", ".ci")
TEXT = {".py", ".lua", ".cu", ".cuh", ".md", ".toml", ".yaml", ".yml", ".conf", ".json", ".sh", ".in", ".lock", ""}
SHAPELESS_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "misc", "common", "data", "stuff"}
MAX_LINES = 400

MACHINE_PATHS = re.compile(r"(?<![\w.~}])/(?:root|home|work|Users)/[\w.]")
REGISTRY_HOSTS = re.compile(r"pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|registry\.npm")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|raise NotImplementedError)\b")


def files(folders: tuple[str, ...], suffixes: set[str]) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path


def package_files() -> list[Path]:
    return list(files(PACKAGES, {".py"}))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def lines_that_match(pattern: re.Pattern[str], folders: tuple[str, ...]) -> list[str]:
    top = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT and path.name != ".git"]
    return [
        f"{place(path, number)}: {line.strip()[:100]}"
        for path in (*files(folders, TEXT), *top)
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_"):
                    yield member


def docstring_nodes(tree: ast.Module) -> set[int]:
    """Ids of constants that are documentation: a string that stands alone."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def raised_name(node: ast.Raise) -> str:
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return raised.id if isinstance(raised, ast.Name) else ""


def test_module_names_say_what_is_inside() -> None:
    named = [path for path in package_files() if {path.stem, path.parent.name} & SHAPELESS_NAMES]
    assert not named


def test_files_stay_short_enough_to_read() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in package_files()}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def test_public_definitions_have_docstrings() -> None:
    silent = [
        f"{place(path, node.lineno)} {node.name}"
        for path in package_files()
        for node in public_definitions(tree_of(path))
        if not ast.get_docstring(node)
    ]
    assert not silent


def test_modules_open_with_a_docstring() -> None:
    assert not [str(path.relative_to(ROOT)) for path in package_files() if not ast.get_docstring(tree_of(path))]


def test_text_names_no_machine_paths() -> None:
    assert not lines_that_match(MACHINE_PATHS, EVERYTHING)


def test_text_names_no_registry_hosts() -> None:
    assert not lines_that_match(REGISTRY_HOSTS, EVERYTHING)


def test_code_holds_no_unfinished_marks() -> None:
    assert not lines_that_match(UNFINISHED, (*PACKAGES, "tests", "benchmarks", "examples"))


def test_key_names_live_in_keys_files_only() -> None:
    strays = [
        place(path, node.lineno)
        for path in package_files()
        if path.name != "keys.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str | bytes)
        and (node.value.startswith("kvalet:") if isinstance(node.value, str) else node.value.startswith(b"kvalet:"))
        and id(node) not in docstring_nodes(tree_of(path))
    ]
    assert not strays


def test_packages_check_rules_with_errors_that_stay_on() -> None:
    """`python -O` removes assert statements; `invariant()` and typed errors stay."""
    asserts = [
        place(path, node.lineno)
        for path in package_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert)
    ]
    assert not asserts


def test_packages_raise_typed_errors() -> None:
    vague = [
        f"{place(path, node.lineno)} {raised_name(node)}"
        for path in package_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Raise) and raised_name(node) in {"Exception", "BaseException", "RuntimeError"}
    ]
    assert not vague


@pytest.mark.parametrize("module", ["pickle", "shelve", "marshal"])
def test_packages_never_import_code_loading_serializers(module: str) -> None:
    importers = [
        place(path, node.lineno)
        for path in package_files()
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == module for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == module)
    ]
    assert not importers


def test_tests_are_named_by_subject_condition_and_outcome() -> None:
    pattern = re.compile(r"test(?:_[a-z0-9]+){3,}")
    odd = [
        f"{place(path, node.lineno)} {node.name}"
        for path in files(("tests",), {".py"})
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not pattern.fullmatch(node.name)
    ]
    assert not odd


def test_lua_scripts_open_with_their_key_schema() -> None:
    scripts = list(files(PACKAGES, {".lua"}))
    assert not [str(path.relative_to(ROOT)) for path in scripts if not path.read_text().startswith("--")]


def test_documents_name_files_that_exist() -> None:
    """Paths in back quotes in README and docs, so that they stay true when code moves."""
    pattern = re.compile(r"`((?:gateway|workers|gpu|snapshot_store|deploy|tests|requirements|docs)/[\w./-]+\.\w+)`")
    lost = [
        f"{document.name}: {name}"
        for document in documents()
        for name in pattern.findall(document.read_text())
        if not (ROOT / name).exists()
    ]
    assert not lost


def test_documents_name_tests_that_exist() -> None:
    tests = {
        node.name
        for path in files(("tests",), {".py"})
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = {name for document in documents() for name in re.findall(r"`(test_\w+)`", document.read_text())}
    assert named
    assert sorted(named - tests) == []


def test_documents_list_every_regression_file() -> None:
    listed = (ROOT / "docs/field-cases.md").read_text()
    unlisted = [path.name for path in files(("tests/regression",), {".py"}) if path.name not in listed]
    assert not unlisted


def documents() -> list[Path]:
    return [ROOT / "README.md", *files(("docs",), {".md"})]
