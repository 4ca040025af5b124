"""Which docstrings there are, and where their banned turns are reported."""

import pytest

from tests.house.style.docstrings import docstrings, faults
from tests.house.tree import Module

SOURCE = '''"""The module."""

LIMIT = 3
"""A limit."""
plain = 4

"""Not below an assignment? It is."""


class Round:
    """The class."""

    size: int = 1
    """The size."""

    @property
    def length(self):
        """The property."""

    @functools.cached_property
    def width(self):
        """The cached one."""

    async def run(self):
        """The method."""
        self.x = 1
        """The attribute."""

        def inner():
            """The inner function."""

        print("no docstring")
'''


def test_every_kind_of_docstring_is_found() -> None:
    found = [(each.kind, each.name, each.line) for each in docstrings(Module("server/run.py", SOURCE))]
    assert sorted(found, key=lambda each: each[2]) == [
        ("module", "server/run.py", 1),
        ("attribute", "LIMIT", 4),
        ("attribute", "plain", 7),
        ("class", "Round", 11),
        ("attribute", "size", 14),
        ("function", "length", 18),
        ("function", "width", 22),
        ("function", "run", 25),
        ("attribute", "self.x", 27),
        ("function", "inner", 30),
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""The file of nobody."""', ['server/run.py:1: "nobody"']),
        ('class C:\n    """The limit: so many."""', ['server/run.py:2: class C: "so many"']),
        ('x = 1\n"""Whoever asks for so much."""', ['server/run.py:2: attribute x: "Whoever"', '"so much"']),
        ('def f():\n    """Fold a run.\n\n    So many.\n    """', ['server/run.py:4: function f: "So many"']),
        ('"""The rounds of a run."""\n\ndef f():\n    """Return the size [bytes] of a round."""', []),
        ("def f():\n    x = 'whoever'\n    print('so many')", []),
    ],
)
def test_a_fault_names_file_line_and_what_it_is_about(source: str, expected: list[str]) -> None:
    found = [str(fault) for fault in faults([Module("server/run.py", source)])]
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))
