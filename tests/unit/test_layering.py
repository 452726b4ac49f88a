"""Imports point down: every import statement of the package against the tables of docs/architecture.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.source_tree import ROOT, Import, Source, imports, is_standard, package_sources, table, words

BASE = frozenset(
    {
        "checkpoint",
        "config",
        "cpus",
        "errors",
        "gguf",
        "heap",
        "limits",
        "log",
        "model_store",
        "pooling_params",
        "sampling_params",
        "setting",
        "wire",
    }
)
LAYERS = {row[0]: (words(row[1]), words(row[2])) for row in table("architecture.md", "Package")}
FILE_EXTRAS = {row[0]: words(row[1]) for row in table("architecture.md", "File | Also")}
LOCAL_IMPORTS = {row[0] for row in table("architecture.md", "File | Why")}


def layer_of(name: str) -> str:
    top = name.removesuffix(".py").split("/")[0]
    return "base" if top in BASE else top


def allows(allowed: frozenset[str], module: str) -> bool:
    """Tell whether `serve.<module>` is inside one of the allowed packages; base is looked up by its members."""
    top = module.split(".")[0]
    if top in BASE:
        return "base" in allowed
    return any(module == entry or module.startswith(f"{entry}.") for entry in allowed)


def problem(source: Source, imported: Import) -> str | None:
    """Say what is wrong with one import, or None."""
    where = f"serve/{source.name}:{imported.line} imports {imported.module}"
    inside, third_party = LAYERS[layer_of(source.name)]
    top, _, rest = imported.module.partition(".")
    if imported.local and source.name not in LOCAL_IMPORTS:
        return f"{where} inside a function"
    if top == "serve":
        return None if not rest or allows(inside, rest) else f"{where}: not below {layer_of(source.name)}"
    if is_standard(top) or top in third_party | FILE_EXTRAS.get(source.name, frozenset()):
        return None
    return f"{where}: not in this package's row"


def test_every_import_follows_the_layer_table() -> None:
    problems = [
        found
        for source in package_sources()
        if source.name not in ("__init__.py", "__main__.py")
        for imported in imports(source.tree)
        if (found := problem(source, imported))
    ]
    assert not problems, "\n".join(problems)


def test_every_top_level_module_is_in_the_layer_table() -> None:
    tops = {layer_of(s.name) for s in package_sources()} - {"__init__", "__main__"}
    assert tops <= set(LAYERS)


def test_launch_imports_core_and_worker_only_in_the_childs_entry() -> None:
    launch = next(s for s in package_sources() if s.name == "launch.py")
    lower = [i for i in imports(launch.tree) if i.module.startswith(("serve.core", "serve.worker"))]
    assert lower
    assert all(i.local for i in lower), [i for i in lower if not i.local]


@pytest.mark.parametrize("name", ["sampling_params.py", "config.py", "checkpoint/", "errors.py", "gguf.py"])
def test_base_modules_do_not_use_the_wire(name: str) -> None:
    sources = [s for s in package_sources() if s.name.startswith(name)]
    assert sources
    assert not [i for s in sources for i in imports(s.tree) if i.module.startswith("serve.wire")]


@pytest.mark.parametrize("module", ["serve.entrypoints.api_server", "serve.core.proc"])
def test_front_end_and_scheduler_load_neither_torch_nor_transformers(module: str) -> None:
    code = f"import {module}, sys; sys.stdout.write(' '.join({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_the_rule_finds_a_forbidden_import() -> None:
    """The checker itself: an import of torch in the engine client and one of core in the worker are found."""
    engine = next(s for s in package_sources() if s.name.startswith("engine/"))
    worker = next(s for s in package_sources() if s.name.startswith("worker/"))
    assert problem(engine, Import("torch", 1, False))
    assert problem(worker, Import("serve.core.scheduler", 1, False))
    assert problem(engine, Import("numpy", 1, True))
    assert problem(engine, Import("numpy", 1, False)) is None
    assert problem(engine, Import("serve.renderers.tokenizer", 1, False)) is None
    assert problem(engine, Import("serve.renderers.renderer", 1, False))
