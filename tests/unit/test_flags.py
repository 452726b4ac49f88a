"""Every flag is documented and used, and docs/flags.md is what serve/config.py says."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import fields

import pytest

from serve import config
from tests.source_tree import ROOT, package_sources

# Only permits a value of another flag, so the checks in config.py are all there is to it.
PERMISSIONS = {"allow_unauthenticated"}
SETTINGS = [(group, f.name) for _, group in config.groups() for f in fields(group)]


def test_flags_document_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/generate_flags.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_every_flag_has_help() -> None:
    bare = [f.name for _, group in config.groups() for f in fields(group) if not f.metadata["help"].strip()]
    assert not bare


def test_flag_names_are_unique() -> None:
    names = [name for _, name in SETTINGS]
    assert len(names) == len(set(names))


def test_every_flag_is_read_somewhere() -> None:
    """A setting that nothing but config.py looks at is a flag without its feature."""
    read = {
        node.attr
        for source in package_sources()
        if source.name != "config.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    unread = [name for _, name in SETTINGS if name not in read | PERMISSIONS]
    assert not unread, f"flags without a reader: {unread}"


@pytest.mark.parametrize(("group", "name"), SETTINGS, ids=[name for _, name in SETTINGS])
def test_flag_default_has_the_declared_kind(group: type, name: str) -> None:
    """JSON and list flags default to empty containers, so that the command line knows how to read them."""
    setting = next(f for f in fields(group) if f.name == name)
    default = setting.default_factory() if callable(setting.default_factory) else setting.default  # type: ignore[misc]
    expected = {"json": dict, "list": tuple, "secret": tuple}.get(setting.metadata["kind"])
    assert expected is None or isinstance(default, expected)
