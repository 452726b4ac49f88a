"""docs/request_path.md is true: each phase's files and symbols exist, and the files say which phase they are."""

from __future__ import annotations

import ast
import re

import pytest

from tests.source_tree import PACKAGE, functions, table

ROWS = [(row[0], entry) for row in table("request_path.md", "Phase") for entry in row[2].split("`, `")]


JOINTS = [entry for row in table("request_path.md", "Between") for entry in row[2].split("`, `")]


def symbols(tree: ast.Module) -> set[str]:
    """Give the classes of a file and its functions and methods, with qualified names."""
    return {name for name, _ in functions(tree)} | {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def phase_numbers(docstring: str) -> set[int]:
    """Give the phases that the first paragraph of a module docstring names, if it opens with one."""
    opening = docstring.split("\n\n")[0]
    found: set[int] = set()
    if not re.match(r"Phases? \d+[\d, andto]* of 11", opening):
        return found
    for listed in re.findall(r"[Pp]hases? (\d+[\d, andto]*)", opening):
        found.update(int(number) for number in re.findall(r"\d+", listed))
        for first, last in re.findall(r"(\d+) to (\d+)", listed):
            found.update(range(int(first), int(last) + 1))
    return found


def test_the_map_has_all_eleven_phases_in_order() -> None:
    numbers = [int(row[0].split()[0]) for row in table("request_path.md", "Phase")]
    assert numbers == list(range(1, 12))


@pytest.mark.parametrize(("phase", "entry"), ROWS, ids=[entry for _, entry in ROWS])
def test_symbol_of_the_map_exists_in_a_file_that_names_its_phase(phase: str, entry: str) -> None:
    file, symbol = entry.strip("`").split(": ")
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    assert symbol in symbols(tree)
    assert int(phase.split()[0]) in phase_numbers(ast.get_docstring(tree) or "")


@pytest.mark.parametrize("entry", JOINTS)
def test_symbol_between_the_phases_exists(entry: str) -> None:
    file, symbol = entry.strip("`").split(": ")
    assert symbol in symbols(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))


def test_phases_are_read_from_an_opening_line() -> None:
    assert phase_numbers("Phases 5 and 9 of 11: both halves.") == {5, 9}
    assert phase_numbers("Phase 7 of 11: the forward pass; phase 8 samples.\n\nNot phase 3.") == {7, 8}
    assert phase_numbers("Phases 4 to 6 of 11.") == {4, 5, 6}
    assert phase_numbers("What phase 4 of 11 needs.") == set()
