"""The pages that `make test` executes: those that have changed, and of the others some each day, all within a week.

A page has changed if its text has, or a file of `examples`, `benchmarks` or `tests/pages` that it names or imports: in
the working tree, or since the commit on which this branch began; on the main branch, and in a fresh clone of it, since
the commit before. Where git cannot tell (a shallow clone, no repository), all have changed. A table of digests in the
tree would have to be written by each commit, and one in a cache is empty in a fresh clone.

The product itself does not count: every page imports it, and each of its changes would execute all of them. What a
command does is held by the tests of the command. That a page still says it, is held by the turns, and by
`make test-long`, which executes every page.
"""

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.turns import DAY, is_due

ROOT = Path(__file__).parents[2]
DAYS = 7
NAMED = re.compile(r"(?<![\w.])(?:examples|benchmarks)(?:[/.]\w[\w-]*)+")
"""A file or a module that a page or a script names."""

IMPORTED = re.compile(r"from (examples|benchmarks)((?:\.\w+)*) import (\w+(?:, \w+)*)")

READ = (".py", ".toml", ".sh", ".md")
"""The endings of the files that count in a folder that is named."""

BESIDE = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)

OURS = "tests/pages"
"""The folder that executes the pages: after a change there all have changed."""


@cache
def changed_files() -> frozenset[str] | None:
    """Return the files that differ from the commit on which this branch began; None: unknown, or the tests did."""
    try:
        found = {*_git("diff", "--name-only", _base()), *_git("ls-files", "--others", "--exclude-standard")}
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if any(name.startswith(f"{OURS}/") for name in found) else frozenset(found)


def _base() -> str:
    """Return the commit on which this branch began; on the main branch the one before."""
    if given := os.environ.get("ATOLL_BASE"):
        return given
    [head] = _git("rev-parse", "HEAD")
    known = _git("for-each-ref", "--format=%(objectname)", "refs/remotes/origin/main", "refs/heads/main")
    base = _git("merge-base", head, known[0])[0] if known else head
    return f"{head}~1" if base == head else base


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


@cache
def files_of(page: str) -> frozenset[str]:
    """Return a page, or the files of a folder, and the files that it names or imports, and those that they do."""
    found, left = set(), _files_at(page) or [page]
    while left:
        name = left.pop()
        found.add(name)
        text = (ROOT / name).read_text("utf-8")
        beside = [ROOT.joinpath(name).with_name(f"{module}.py") for module in BESIDE.findall(text)]
        left += [path.relative_to(ROOT).as_posix() for path in beside if path.is_file()]
        left += [each for named in _named(text) for each in _files_at(named)]
        left = sorted({*left} - found)
    return frozenset(found)


def _named(text: str) -> list[str]:
    """Return the paths and modules that a text names or imports."""
    imported = IMPORTED.findall(text)
    return NAMED.findall(text) + [
        f"{room}{rest}.{name}" for room, rest, names in imported for name in names.split(", ")
    ]


def _files_at(named: str) -> list[str]:
    """Return the files behind a path or a module's name, without what follows it: an attribute, a sentence."""
    parts = re.split(r"[/.]", named)
    while len(parts) > 1:
        place = ROOT.joinpath(*parts)
        if place.is_dir():
            return [path.relative_to(ROOT).as_posix() for path in place.glob("**/*") if path.suffix in READ]
        if place.with_suffix(".py").is_file():
            return [place.with_suffix(".py").relative_to(ROOT).as_posix()]
        parts.pop()
    return []


def has_changed(page: str) -> bool:
    """Return whether a page, or a file that it names or imports, has changed."""
    changed = changed_files()
    return changed is None or not changed.isdisjoint(files_of(page))


def when_due(*values: Any, page: str, number: int, id: str | None = None) -> Any:
    """Return the parameters of a page's test, `long` unless the page has changed or has its turn today."""
    is_now = DAY != "all" and (is_due(number, DAYS) or has_changed(page))
    return pytest.param(*values, marks=() if is_now else pytest.mark.long, id=id)
