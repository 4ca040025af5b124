"""The blocks of the pages and of the examples' docstrings, with what the page says of them.

A comment on the line above a fence says how a block is treated; it is invisible in the rendered page:

    <!-- output -->              what the commands above print: numbers, digests and sites may differ
    <!-- not run: REASON -->     neither executed nor checked, because of the reason
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "tests/*.md", "benchmarks/*.md", "atoll/**/*.md")
    for path in ROOT.glob(pattern)
)
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py"))

COMMANDS = ("atoll", "make", "python", "pip", "git", "torchrun", "export", "$")
"""First words of the lines that make an indented block one of commands."""

_FENCE = re.compile(r"( *(?:> *)*)(`{3,}|~{3,})(.*)")
_COMMENT = re.compile(r" *<!-- (.*) -->")


@dataclass(frozen=True)
class Block:
    """A block of a page, with its line (of the fence, from 1), its language and the comment above it."""

    page: str
    line: int
    language: str
    text: str
    comment: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_output(self) -> bool:
        return self.comment == "output"

    @property
    def reason(self) -> str:
        """Why the block is neither executed nor checked; empty when it is."""
        return self.comment.partition("not run: ")[2] if self.comment.startswith("not run: ") else ""


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, or of an example's docstring, from top to bottom."""
    text = (ROOT / page).read_text("utf-8")
    return parse(page, text) if page.endswith(".md") else list(_indented(page, *_docstring(text)))


def parse(page: str, text: str) -> list[Block]:
    """Return the blocks of a page's text: the fenced ones, and the indented ones of commands."""
    found, plain, lines = [], [], text.split("\n")
    number = 0
    while number < len(lines):
        begin = _FENCE.match(lines[number])
        if begin is None:
            plain.append(lines[number])
            number += 1
            continue
        end = next(
            (k for k in range(number + 1, len(lines)) if lines[k].strip(" >").startswith(begin[2])), len(lines) - 1
        )
        body = "".join(f"{line.removeprefix(begin[1])}\n" for line in lines[number + 1 : end])
        above = _COMMENT.fullmatch(lines[number - 1]) if number else None
        found.append(Block(page, number + 1, begin[3].strip(), body, above[1] if above else ""))
        plain += [""] * (end + 1 - number)
        number = end + 1
    return sorted([*found, *_indented(page, "\n".join(plain), 0)], key=lambda block: block.line)


def _docstring(source: str) -> tuple[str, int]:
    """Return the docstring of a module and the number of lines before it."""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.Expr)
    assert isinstance(node.value, ast.Constant)
    return str(node.value.value), node.lineno - 1


def _indented(page: str, text: str, offset: int) -> Iterator[Block]:
    """Yield the indented blocks that begin with a command."""
    for found in re.finditer(r"(?<=\n\n)(?: {4}.*\n)+", f"\n\n{text}\n"):
        body = textwrap.dedent(found[0])
        if body.split(maxsplit=1)[0] in COMMANDS:
            line = f"\n\n{text}"[: found.start()].count("\n") - 1
            above = _COMMENT.fullmatch(text.split("\n")[line - 2]) if line > 1 else None
            yield Block(page, offset + line, "bash", body, above[1] if above else "")
