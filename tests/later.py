"""Modules that a test imports when it runs: what is imported with a test file lies in every process of the suite.

Scikit-learn, numba, transformers and the like are 400 MB and eight seconds, for a few files each.
"""

from importlib import import_module
from typing import Any


class later:
    """A module, imported with the first use of one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest looks at all that a file holds
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
