"""The project's files as the house tests see them: sources, syntax trees, imports, and tables of our documents."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "serve"
TESTS = ROOT / "tests"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file. name is its path below serve/ or tests/, with forward slashes."""

    path: Path
    name: str
    text: str
    tree: ast.Module


def _read(base: Path) -> tuple[Source, ...]:
    found = []
    for path in sorted(base.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Source(path, path.relative_to(base).as_posix(), text, ast.parse(text, str(path))))
    return tuple(found)


@functools.cache
def package_sources() -> tuple[Source, ...]:
    """Give every file of the package."""
    return _read(PACKAGE)


@functools.cache
def sources_of_tests() -> tuple[Source, ...]:
    """Give every file below tests/."""
    return _read(TESTS)


@functools.cache
def text_files() -> tuple[Path, ...]:
    """Give every file that git tracks or would track, as text, without pictures and the licence."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return tuple(p for p in paths if p.is_file() and p.name != "LICENSE" and b"\0" not in p.read_bytes())


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, FunctionNode]]:
    """Walk all functions, nested ones too, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FunctionNode):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module. local is true inside a function; line is where it stands."""

    module: str
    line: int
    local: bool


def imports(tree: ast.Module) -> Iterator[Import]:
    """Walk the import statements of a file; `from serve import x` counts as serve.x."""
    in_functions = {id(node) for _, function in functions(tree) for node in ast.walk(function)}
    for node in ast.walk(tree):
        local = id(node) in in_functions
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, local)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}: imports are absolute"
            for alias in node.names:
                parent = node.module or ""
                is_module = parent.split(".")[0] == "serve" and _is_module(f"{parent}.{alias.name}")
                yield Import(f"{parent}.{alias.name}" if is_module else parent, node.lineno, local)


def _is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_standard(module: str) -> bool:
    """Tell whether a module belongs to the standard library."""
    return module.split(".")[0] in sys.stdlib_module_names


def table(document: str, first_header: str) -> list[list[str]]:
    """Give the rows of the table in docs/ whose header row starts with first_header, cells stripped of code marks."""
    lines = (ROOT / "docs" / document).read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(f"| {first_header} |")), None)
    assert start is not None, f"docs/{document} has no table that starts with '{first_header}'"
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    assert rows, f"the table '{first_header}' in docs/{document} is empty"
    return rows


def words(cell: str) -> frozenset[str]:
    """Give the comma-separated words of a table cell."""
    return frozenset(word for word in re.split(r"[,\s]+", cell) if word)
