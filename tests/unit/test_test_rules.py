"""Rules for the tests themselves: each can fail, none sleeps to wait, none patches modules, skips have reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.source_tree import FunctionNode, Source, functions, imports, sources_of_tests
from tests.unit.test_house_rules import dotted

WAITING = "waiting.py"
ASSERTING_PREFIXES = ("assert_", "check_", "expect_", "_assert", "_check", "_expect")


def test_the_rules_see_the_tests() -> None:
    assert sum(1 for _ in every_test()) > 50


def every_test() -> Iterator[tuple[Source, str, FunctionNode]]:
    for source in sources_of_tests():
        if source.path.name.startswith("test_"):
            for name, node in functions(source.tree):
                if node.name.startswith("test_"):
                    yield source, name, node


def asserts(node: ast.AST) -> bool:
    """Tell whether a function can fail on purpose: assert, pytest.raises/fail/warns, or a helper that asserts."""
    for child in ast.walk(node):
        if isinstance(child, ast.Assert):
            return True
        if isinstance(child, ast.Call):
            name = dotted(child.func)
            last = name.rsplit(".", 1)[-1]
            if name in ("pytest.raises", "pytest.fail", "pytest.warns") or last.startswith(ASSERTING_PREFIXES):
                return True
            if last in ("wait_until", "async_wait_until", "run_state_machine_as_test", "assert_allclose"):
                return True
    return False


def test_every_test_asserts_something() -> None:
    empty = [f"tests/{s.name}:{n.lineno} {name}" for s, name, n in every_test() if not asserts(n)]
    assert not empty, "\n".join(empty)


def test_no_assertion_is_always_true() -> None:
    found = [
        f"tests/{s.name}:{n.lineno}"
        for s in sources_of_tests()
        for n in ast.walk(s.tree)
        if isinstance(n, ast.Assert) and isinstance(n.test, ast.Constant | ast.Tuple) and bool(n.test)
        if not (isinstance(n.test, ast.Constant) and not n.test.value)
    ]
    assert not found


def test_tests_wait_for_conditions_instead_of_sleeping() -> None:
    found = []
    for source in sources_of_tests():
        if source.name == WAITING:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and dotted(node.func) in ("time.sleep", "asyncio.sleep", "sleep"):
                yields = node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
                found += [] if yields else [f"tests/{source.name}:{node.lineno}"]
    assert not found, "\n".join(found)


def test_tests_do_not_patch_modules() -> None:
    found = [
        f"tests/{s.name}:{i.line}"
        for s in sources_of_tests()
        for i in imports(s.tree)
        if i.module.startswith(("unittest.mock", "mock", "pytest_mock"))
    ]
    assert not found


def test_every_skip_and_expected_failure_gives_a_reason() -> None:
    marks = {"pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail", "pytest.xfail"}
    found = []
    for source in sources_of_tests():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and dotted(node.func) in marks:
                first = node.args[0] if node.args and dotted(node.func) in ("pytest.skip", "pytest.xfail") else None
                reason = next((k.value for k in node.keywords if k.arg == "reason"), first)
                found += [] if reason is not None else [f"tests/{source.name}:{node.lineno}"]
            bare = isinstance(node, ast.Attribute) and dotted(node) in ("pytest.mark.skip", "pytest.mark.xfail")
            if isinstance(node, FunctionNode):
                found += [f"tests/{source.name}:{d.lineno}" for d in node.decorator_list if is_bare_mark(d)]
            assert not (bare and source.path.name == "conftest.py")
    assert not found, "\n".join(found)


def is_bare_mark(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Attribute) and dotted(decorator) in ("pytest.mark.skip", "pytest.mark.xfail")


def test_the_assertion_finder_sees_an_empty_test() -> None:
    empty = ast.parse("def test_x():\n    run()\n")
    full = ast.parse("def test_x():\n    with pytest.raises(ValueError):\n        run()\n")
    assert not asserts(empty)
    assert asserts(full)
