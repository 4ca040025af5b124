"""The values that a shell completes: runs, members and settings, read at once, without torch and without a connection.

What cannot be read at once, such as a remote or a damaged database, completes nothing.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import typer

BUSY_S = 0.2
"""Longest wait in seconds for a state directory's database: a person has pressed a key."""

Found = list[tuple[str, str]]
"""Values, each with its explanation, which zsh and fish show."""


def runs(context: typer.Context, incomplete: str) -> Found:
    """Return the ids of the runs in the state directory of the command, the newest first."""
    rows = _rows(context, 'SELECT run_id, task, state FROM runs ORDER BY "order" DESC, run_id')
    return [(run, f"{task}, {state}") for run, task, state in rows if run.startswith(incomplete)]


def members(context: typer.Context, incomplete: str) -> Found:
    """Return the names that were invited or have a certificate, with their roles."""
    rows = _rows(context, "SELECT name, role FROM certificates UNION SELECT name, role FROM invitations")
    return [(name, role) for name, role in sorted(rows) if name.startswith(incomplete)]


def settings(context: typer.Context, incomplete: str) -> Found:
    """Return the keys that the command's --set takes, each with its `=`."""
    from atoll.cli.sections import Section, described

    if "=" in incomplete:
        return []
    sections = SECTIONS.get(context.info_name or "", ("run", "coordinator"))
    found = {each.key: each for section in sections for each in described(Section(section))}
    return [(f"{key}=", each.type) for key, each in found.items() if key.startswith(incomplete)]


SECTIONS = {
    "agent": ("agent",),
    "aggregator": ("aggregator",),
    "train": ("local", "train", "plan", "privacy"),
    "simulate": ("run", "local", "simulation"),
    "compare": ("run", "local", "simulation", "train", "plan"),
    "sweep": ("run", "local", "simulation"),
    "population": ("run", "simulation"),
    "coordinator": ("run", "local", "coordinator"),
    "start": ("run", "local"),
    "resume": ("run", "local"),
}
"""The sections of `atoll settings` whose keys the --set of a command takes, by its name."""


def _rows(context: typer.Context, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query of a state directory's database; none if it is missing or unreadable."""
    path = Path(context.params.get("state") or "atoll-state") / "state.db"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as database:
            yield from database.execute(query).fetchall()
    except sqlite3.Error:
        return
