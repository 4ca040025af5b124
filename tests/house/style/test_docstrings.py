"""Which docstrings there are, and where their breaks are reported."""

import pytest

from tests.house.style.docstrings import breaks, docstrings
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
        ("property", "length", 18),
        ("property", "width", 22),
        ("function", "run", 25),
        ("attribute", "self.x", 27),
        ("function", "inner", 30),
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What it is."""', ['server/run.py:1: opens with a question word, "What"']),
        ('def f():\n    """Of a run, all."""', ['server/run.py:2: function f: opens with a preposition, "Of"']),
        ('class C:\n    """The run."""', ['server/run.py:2: class C: "The run." has fewer than 3 words']),
        (
            'x = 1\n"""How long."""',
            ['server/run.py:2: attribute x: opens with a question word, "How"', '"How long." has fewer'],
        ),
        ('def f():\n    """Fold a run.\n\n    So many.\n    """', ['server/run.py:4: function f: "So many"']),
        ('class C:\n    def __len__(self):\n        """Bytes."""', []),
        ('class C:\n    @property\n    def length(self):\n        """Bytes."""', []),
        ('x = 1\n"""Bytes."""', []),
        ('def length():\n    """Bytes."""', ['server/run.py:2: function length: "Bytes." has fewer than 3 words']),
        ('"""The rounds of a run."""\n\ndef f():\n    """Return the size [bytes] of a round."""', []),
        ("def f():\n    x = 'whoever'\n    print('What')", []),
    ],
)
def test_a_break_names_file_line_and_what_it_is_about(source: str, expected: list[str]) -> None:
    found = [str(broken.fault) for broken in breaks([Module("server/run.py", source)])]
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))
