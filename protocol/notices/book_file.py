"""The file of the notification state.

notices.json     in the state directory, replaced when the book changes. Not part of a backup
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.protocol.notices.book import Book, Due, Told
from atoll.protocol.notices.notice import Condition, Notice

FILE = "notices.json"

_CONDITIONS = frozenset(map(str, Condition))


def notices_shown(folder: Path) -> list[str]:
    """Return the messages about persisting conditions from the notification state in a state directory."""
    return read_book(folder / FILE)[0].lasting


def conditions_shown(folder: Path) -> list[Notice]:
    """Return the persisting conditions from the notification state in a state directory, each with its subject."""
    book = read_book(folder / FILE)[0]
    known = ((key.partition(" "), told.sentence) for key, told in book.told.items())
    found = {said: Notice(Condition(kind), subject, said) for (kind, _, subject), said in known if kind in _CONDITIONS}
    found |= {due.notice.sentence: due.notice for due in book.due.values()}
    return [found[sentence] for sentence in book.lasting if sentence in found]


def encoded(book: Book) -> bytes:
    """Return the content of the file for a notification state."""
    told = {key: asdict(each) for key, each in book.told.items()}
    due = {key: {**asdict(each.notice), "since": each.since} for key, each in book.due.items()}
    found = {"told": told, "begun": book.begun, "due": due, "facts": book.facts, "lasting": book.lasting}
    return json.dumps(found).encode()


def read_book(path: Path) -> tuple[Book, bytes]:
    """Return the notification state in a file, and the file's content; a missing or unreadable file is a new state."""
    try:
        content = path.read_bytes()
        found: dict[str, Any] = json.loads(content)
        due = {key: Due(_notice({**row}), float(row["since"])) for key, row in found["due"].items()}
        told = {key: Told(**row) for key, row in found["told"].items()}
        book = Book(told, found["begun"], due, found["facts"], found["lasting"], is_new=False)
    except (OSError, ValueError, KeyError, TypeError):
        return Book(), b""
    return book, content


def _notice(row: dict[str, Any]) -> Notice:
    row.pop("since")
    return Notice(**{**row, "condition": Condition(row["condition"])})
