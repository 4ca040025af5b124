"""The prose of the documentation's pages: Markdown without its blocks of code."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.style import words
from tests.house.tree import Fault

ROOT_PAGES = ("README.md", "CONTRIBUTING.md")

_FENCE = re.compile(r" *(?:> *)*(```+|~~~+)")
_LIST_ITEM = re.compile(r" *([-*+]|\d+[.)])( |$)")


def pages(root: Path) -> Iterator[Path]:
    """Yield the pages of `docs/` and those in the root."""
    yield from (root / name for name in ROOT_PAGES if (root / name).is_file())
    yield from pages_at(root / "docs")


def pages_at(place: Path) -> Iterator[Path]:
    """Yield a page, or those below a folder."""
    if place.is_file():
        yield from [place] if place.suffix == ".md" else []
    else:
        yield from sorted(place.rglob("*.md"))


def prose(text: str) -> str:
    """Blank out fenced and indented code; every other line stays on its line."""
    lines, fence, is_code, is_list, was_blank = [], "", False, False, True
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if fence:
            is_end = found is not None and found[1].startswith(fence) and not line.strip().strip("`~> ")
            lines.append("")
            fence = "" if is_end else fence
            continue
        if found is not None:
            fence = found[1]
            lines.append("")
            continue
        is_indented = line.startswith("    ")
        is_code = is_indented and not is_list and (is_code or was_blank)
        was_blank = not line.strip()
        if not was_blank and not is_indented:
            is_list = _LIST_ITEM.match(line) is not None or (is_list and line.startswith(" "))
        lines.append("" if is_code else line)
    return "\n".join(lines)


def faults(path: str, text: str) -> list[Fault]:
    """Report the banned turns of a page's prose."""
    return [Fault(path, 1 + remark.line, remark.text) for remark in words.turns(prose(text))]
