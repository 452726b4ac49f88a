"""Each name in code type in docs/glossary.md occurs in the package."""

from __future__ import annotations

import re

from tests.source_tree import ROOT, package_sources

NAMES = sorted(
    {
        name
        for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and "---" not in line
        for name in re.findall(r"`([a-z_]+)`", line.split("|")[1])
    }
)


def test_glossary_names_occur_in_the_code() -> None:
    text = "\n".join(source.text for source in package_sources())
    missing = [name for name in NAMES if not re.search(rf"\b{name}\b", text)]
    assert len(NAMES) > 25
    assert not missing
