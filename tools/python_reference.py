"""The reference of the public Python names, in Markdown, from their signatures and docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, get_overloads

SECTIONS = re.compile(r"^(Args|Returns|Raises|Yields):\n((?:(?: +.*)?\n?)*)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\S.*?): ", re.MULTILINE)
WIDTH = 100
"""Letters of a signature on one line."""


def reference_of(name: str) -> str:
    """Return the section of a public name.

    Raises:
        AttributeError: `atoll` has no such name.
    """
    found = getattr(import_module("atoll"), name)
    if inspect.isclass(found):
        return _of_class(name, found)
    if callable(found):
        return f"### `{name}`\n\n{_code(_signatures(name, found))}\n\n{_text(found)}"
    raise AttributeError(name)


def _of_class(name: str, kind: type) -> str:
    parts = [f"### `{name}`", _text(kind)]
    node = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(node, ast.ClassDef)
    if rows := [*_fields(node), *_properties(kind)]:
        parts.append(_table(("field", "type", "meaning"), rows))
    for member, function in _methods(kind):
        parts.append(f"{_code(_signatures(f'{name}.{member}', function))}\n\n{_text(function)}")
    return "\n\n".join(parts)


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield the documented fields of a class: name with default, type, meaning."""
    for at, below in zip(node.body, node.body[1:], strict=False):
        is_documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(at, ast.AnnAssign) and isinstance(at.target, ast.Name) and is_documented:
            assert isinstance(below, ast.Expr)
            assert isinstance(below.value, ast.Constant)
            yield f"`{at.target.id}`", f"`{_annotation(at.annotation)}`", " ".join(str(below.value.value).split())


def _properties(kind: type) -> Iterator[tuple[str, str, str]]:
    for name, member in vars(kind).items():
        function = getattr(member, "fget", None) or getattr(member, "func", None)
        if function is not None and not name.startswith("_"):
            returns = _definition(function).returns
            text = inspect.cleandoc(function.__doc__ or "").partition("\n\nRaises:")[0]
            yield f"`{name}`", f"`{_annotation(returns)}`" if returns is not None else "", " ".join(text.split())


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", member)  # of a classmethod
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function


def _signatures(name: str, function: Any) -> str:
    """Return the signature as it stands in the source, without `self`; of an overloaded function each one."""
    function = inspect.unwrap(function)
    return "\n".join(_signature(name, each) for each in get_overloads(function) or [function])


def _signature(name: str, function: Any) -> str:
    node = _definition(function)
    listed = [argument for argument in _arguments(node.args) if argument not in ("self", "cls")]
    returns = "" if node.returns is None else f" -> {_annotation(node.returns)}"
    line = f"{name}({', '.join(listed)}){returns}"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {each}," for each in listed), f"){returns}"])


def _arguments(of: ast.arguments) -> Iterator[str]:
    """Yield the arguments as they are written, and the marks / and * between them."""
    plain = [*of.posonlyargs, *of.args]
    defaults = [None] * (len(plain) - len(of.defaults)) + list(of.defaults)
    for k, (argument, default) in enumerate(zip(plain, defaults, strict=True), 1):
        yield _argument(argument, default)
        if k == len(of.posonlyargs):
            yield "/"
    if of.vararg is not None or of.kwonlyargs:
        yield "*" if of.vararg is None else f"*{_argument(of.vararg, None)}"
    for argument, default in zip(of.kwonlyargs, of.kw_defaults, strict=True):
        yield _argument(argument, default)
    if of.kwarg is not None:
        yield f"**{_argument(of.kwarg, None)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    typed = argument.arg if argument.annotation is None else f"{argument.arg}: {_annotation(argument.annotation)}"
    if default is None:
        return typed
    return f"{typed}{'=' if argument.annotation is None else ' = '}{ast.unparse(default)}"


def _definition(function: Any) -> ast.FunctionDef | ast.AsyncFunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node


def _annotation(node: ast.expr) -> str:
    """Return a type as it is written, without the quotes of a name that is defined later."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def _code(signature: str) -> str:
    return f"<!-- not run: a signature, no call -->\n```python\n{signature}\n```"


def _text(documented: Any) -> str:
    """Return a docstring with its sections as tables."""
    text = inspect.cleandoc(documented.__doc__ or "")
    return SECTIONS.sub(lambda part: _section(part[1], textwrap.dedent(part[2])), text + "\n").rstrip()


def _section(title: str, text: str) -> str:
    header = {"Args": ("argument", "meaning"), "Raises": ("error", "when")}.get(title)
    if header is None:
        return f"{title}: {' '.join(text.split())}\n\n"
    entries = [(match.start(), match.end(), match[1]) for match in ENTRY.finditer(textwrap.indent(text, "    "))]
    indented = textwrap.indent(text, "    ")
    ends = [start for start, _, _ in entries[1:]] + [len(indented)]
    rows = [
        (f"`{name}`", " ".join(indented[begin:end].split()))
        for (_, begin, name), end in zip(entries, ends, strict=True)
    ]
    return _table(header, rows) + "\n\n"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
