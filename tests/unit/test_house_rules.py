"""The house rules of docs/architecture.md, checked on the syntax trees of the package and its tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.source_tree import ROOT, FunctionNode, Source, functions, imports, package_sources, table, text_files

LIMITS = {row[0]: int(re.match(r"\d+", row[1])[0]) for row in table("architecture.md", "Rule")}  # type: ignore[index]
MAX_KERNEL_FUNCTION_LINES = 150
CATCH_ALL_SITES = {(row[0], row[1]) for row in table("architecture.md", "File | Function")}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTE_CALLS = {"torch.load", "yaml.load", "recv_pyobj", "send_pyobj"}
ANY_FILES = {"wire/codec.py", "entrypoints/openai/protocol.py"}
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)

# Written in two parts so that this file does not contain what it looks for.
NOTES_TO_ONESELF = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
PLACES_OF_ONE_MACHINE = re.compile(r"/wo" r"rk/|\.\./sha" r"red|/tmp/(?:brief|dl)|pypi-" r"more|issues? #?2\b")


def in_kernels(source: Source) -> bool:
    return source.name.startswith("kernels/")


def package_functions() -> Iterator[tuple[Source, str, FunctionNode]]:
    for source in package_sources():
        for name, node in functions(source.tree):
            yield source, name, node


def where(source: Source, node: ast.stmt | ast.expr | ast.excepthandler) -> str:
    return f"serve/{source.name}:{node.lineno}"


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Give the depth of nested blocks; elif is not deeper than its if, nested functions count for themselves."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode | ast.ClassDef | ast.Lambda):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def dotted(node: ast.expr) -> str:
    """Give `a.b.c` of a name or attribute chain, or what can be said of it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def test_files_are_at_most_600_lines() -> None:
    long = {s.name: n for s in package_sources() if (n := s.text.count("\n")) > LIMITS["lines of a file"]}
    assert not long


def test_functions_are_at_most_60_lines() -> None:
    long = [
        f"{where(source, node)} {name}: {length}"
        for source, name, node in package_functions()
        if (length := (node.end_lineno or 0) - node.lineno + 1)
        > (MAX_KERNEL_FUNCTION_LINES if in_kernels(source) else LIMITS["lines of a function"])
    ]
    assert not long, "\n".join(long)


def test_functions_have_at_most_7_parameters() -> None:
    wide = []
    for source, name, node in package_functions():
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([a for a in given if a.arg not in ("self", "cls")])
        if count > LIMITS["parameters of a function"] and not in_kernels(source):
            wide.append(f"{where(source, node)} {name}: {count}")
    assert not wide, "\n".join(wide)


def test_blocks_nest_at_most_3_deep() -> None:
    deep = [
        f"{where(source, node)} {name}: {depth}"
        for source, name, node in package_functions()
        if (depth := nesting(node)) > LIMITS["nested blocks in a function"]
    ]
    assert not deep, "\n".join(deep)


def test_classes_have_at_most_20_public_methods_and_20_own_attributes() -> None:
    large = []
    for source in package_sources():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = [f for f in node.body if isinstance(f, FunctionNode) and not f.name.startswith("_")]
            attributes = {
                target.attr
                for target in ast.walk(node)
                if isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
            if len(methods) > LIMITS["public methods of a class"]:
                large.append(f"{where(source, node)} {node.name}: {len(methods)} public methods")
            if len(attributes) > LIMITS["attributes that a class sets on itself"]:
                large.append(f"{where(source, node)} {node.name}: {len(attributes)} attributes")
    assert not large, "\n".join(large)


def test_public_names_have_a_docstring() -> None:
    bare = [f"serve/{s.name}" for s in package_sources() if s.tree.body and not ast.get_docstring(s.tree)]
    for source in package_sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef | FunctionNode) and not node.name.startswith("_"):
                bare += [] if ast.get_docstring(node) else [f"{where(source, node)} {node.name}"]
    assert not bare, "\n".join(bare)


def test_inheritance_is_at_most_one_level_deep() -> None:
    bases: dict[str, list[str]] = {}
    for source in package_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [dotted(b) for b in node.bases]
    # Wire structs and errors each share one documented base; below those one more level is allowed.
    shared = {"Message", "ServeError", "Protocol"}
    deep = [
        f"{name} -> {parent} -> {bases[parent]}"
        for name, parents in bases.items()
        for parent in parents
        if parent in bases and parent not in shared and [b for b in bases[parent] if b in bases and b not in shared]
    ]
    assert not deep, "\n".join(deep)


def test_files_are_ascii() -> None:
    odd = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in text_files()
        if not path.is_relative_to(ROOT / "tests")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    ]
    assert not odd, "\n".join(odd)


@pytest.mark.parametrize("pattern", [NOTES_TO_ONESELF, PLACES_OF_ONE_MACHINE], ids=["notes", "places"])
def test_files_hold_no_notes_to_oneself_and_no_places_of_one_machine(pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_every_type_ignore_names_its_code() -> None:
    bare = re.compile(r"#\s*type:\s*igno" r"re(?!\[)")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in text_files()
        if path.suffix == ".py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line)
    ]
    assert not found


def test_any_is_used_in_two_files_only() -> None:
    found = [
        where(source, node)
        for source in package_sources()
        if source.name not in ANY_FILES
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Name) and node.id == "Any") or (isinstance(node, ast.Attribute) and node.attr == "Any")
    ]
    assert not found


def test_no_print_no_global_statement_no_dynamic_attribute_with_a_literal_name() -> None:
    found = []
    for source in package_sources():
        found += [where(source, n) for n in ast.walk(source.tree) if isinstance(n, ast.Global)]
        for name, call in calls(source):
            literal = len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
            if name == "print" or (name in ("getattr", "hasattr", "setattr", "delattr") and literal):
                found.append(f"{where(source, call)} {name}")
    assert not found, "\n".join(found)


def test_the_environment_is_read_in_config_only() -> None:
    """Writing variables for a child process is launch.py's business; reading them is not."""
    found = [
        where(source, node)
        for source in package_sources()
        if source.name != "config.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and dotted(node.func) in ("os.getenv", "os.environ.get", "environ.get")
    ]
    assert not found


def test_no_format_or_call_that_can_carry_code() -> None:
    found = []
    for source in package_sources():
        found += [
            f"serve/{source.name}:{i.line} {i.module}"
            for i in imports(source.tree)
            if i.module.split(".")[0] in FORBIDDEN_MODULES
        ]
        for name, call in calls(source):
            last = name.rsplit(".", 1)[-1]
            if name in FORBIDDEN_CALLS | FORBIDDEN_ATTRIBUTE_CALLS or last in FORBIDDEN_ATTRIBUTE_CALLS:
                found.append(f"{where(source, call)} {name}")
    assert not found, "\n".join(found)


def test_catch_all_handlers_stand_at_the_documented_sites_only() -> None:
    wide = {"Exception", "BaseException"}
    found = set()
    for source, name, node in package_functions():
        for handler in [n for n in ast.walk(node) if isinstance(n, ast.ExceptHandler)]:
            caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            if any(c is None or dotted(c) in wide for c in caught):
                found.add((source.name, name))
    assert found <= CATCH_ALL_SITES, f"not sanctioned: {sorted(found - CATCH_ALL_SITES)}"


def test_modules_do_no_work_at_import() -> None:
    """Statements at module level are imports, definitions, constants and the two guards; no bare calls or loops."""
    found = []
    for source in package_sources():
        for node in source.tree.body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_work = isinstance(node, ast.Expr | ast.For | ast.While | ast.With | ast.Try | ast.Delete)
            guard = isinstance(node, ast.If) and dotted(guard_name(node.test)) in GUARDS
            if (is_work and not is_docstring) or (isinstance(node, ast.If) and not guard):
                found.append(where(source, node))
    assert not found, "\n".join(found)


def guard_name(test: ast.expr) -> ast.expr:
    """Give the left side of a comparison, or the condition itself."""
    return test.left if isinstance(test, ast.Compare) else test


GUARDS = {"__name__", "TYPE_CHECKING", "typing.TYPE_CHECKING", "sys.platform"}


def test_the_nesting_counter_counts_as_a_reader_does() -> None:
    flat = ast.parse("def f():\n if a:\n  pass\n elif b:\n  pass\n elif c:\n  for x in y:\n   pass\n").body[0]
    deep = ast.parse("def f():\n for a in b:\n  with c:\n   if d:\n    while e:\n     pass\n").body[0]
    assert nesting(flat) == 2
    assert nesting(deep) == 4
