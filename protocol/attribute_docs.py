"""The documentation of a class's fields: the strings under them, read from the source on first use.

pydantic's `use_attribute_docstrings` reads them, too, but whenever a class is made: a tenth of a second of each
command, for strings that only `atoll settings` prints.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the string under each field of a class and of its bases, on one line, by the name of the field."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if getattr(sys.modules.get(base.__module__), "__file__", None) is not None:
            found |= _docs_of_module(base.__module__).get(base.__qualname__, {})
    return found


@cache
def _docs_of_module(module: str) -> dict[str, dict[str, str]]:
    """Return the documented fields of a module's classes, by the class's qualified name."""
    source = Path(str(sys.modules[module].__file__)).read_text("utf-8")
    return dict(_classes(ast.parse(source), ""))


def _classes(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, dict(_docs(node))
            yield from _classes(node, f"{prefix}{node.name}.")


def _docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield field.target.id, " ".join(below.value.value.split())
