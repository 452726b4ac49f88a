"""Every black-box check that needs one replica has a test that names its id."""

from __future__ import annotations

import re

from tests.source_tree import functions, sources_of_tests

WANTED = (
    [f"p{i}" for i in (1, 5, 6, 7, 8, 10, 11, 12, 13, 14)]
    + [f"r{i}" for i in range(1, 18)]
    + [f"i{i}" for i in range(1, 13)]
    + [f"s{i}" for i in range(1, 14)]
    + [f"k{i}" for i in range(1, 11)]
    + [f"l{i}" for i in range(1, 8)]
    + [f"o{i}" for i in range(1, 9)]
    + [f"h{i}" for i in range(1, 11)]
    + [f"g{i}" for i in range(1, 7)]
    + [f"w{i}" for i in range(1, 5)]
)


def test_every_check_has_a_test() -> None:
    named = {
        match[1]
        for source in sources_of_tests()
        if source.name.startswith(("e2e/", "faults/"))
        for name, _ in functions(source.tree)
        if (match := re.match(r"test_([priskolhgw]\d+)_", name))
    }
    assert sorted(set(WANTED) - named) == []
    assert sorted(named - set(WANTED)) == []
