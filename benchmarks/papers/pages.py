"""Measured tables in the documentation.

A measured part is between two comments; the rest is written by hand:

<!-- begin measured: robustness IID -->
<!-- end measured -->
"""

import re
from collections.abc import Mapping
from pathlib import Path

_PART = re.compile(r"(<!-- begin measured: ([^>]+?) -->\n).*?(<!-- end measured -->)", re.DOTALL)


def write_parts(page: Path, parts: Mapping[str, str]) -> None:
    """Replace the parts of a page that have these names; other parts stay.

    Raises:
        KeyError: the page does not have one of the parts.
    """
    text = page.read_text("utf-8")
    if missing := parts.keys() - {part[2] for part in _PART.finditer(text)}:
        raise KeyError(f"{page} has no measured part {', '.join(sorted(missing))}")
    page.write_text(
        _PART.sub(lambda part: f"{part[1]}{parts[part[2]]}\n{part[3]}" if part[2] in parts else part[0], text)
    )
