"""The rows of a run's members: what a snapshot writes, and what a reader of some of them reads.

A run may have a million members. A reader of a few names, or of the next hundred after a name, reads the pages of
those names only: the contents of the complete set say which number they have (`rounds/member_pages`).
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from atoll.protocol.vocabulary import ClientId, RunId
from atoll.server.errors import StoreCorrupted
from atoll.server.journal import checksums
from atoll.server.journal.codec import decode_page, encode_page
from atoll.server.journal.schema import MEMBERS
from atoll.server.members.member import Member
from atoll.server.members.member_pages import CONTENTS, Written, page_of


@dataclass(frozen=True, slots=True)
class Page:
    """Page of the members that had changed when the snapshot `seq` was taken, from `encode_page`."""

    run_id: RunId
    seq: int
    page: int
    body: str


def pages_of(run_id: RunId, seq: int, written: Written, members: Mapping[ClientId, Member]) -> Iterator[Page]:
    """Yield the rows of a snapshot's pages.

    Args:
        run_id: the run.
        seq: the entry of the snapshot.
        written: the pages.
        members: the members of the run.
    """
    for number, names in written.pages.items():
        yield Page(run_id, seq, number, encode_page(members, names))
    if written.lows:
        yield Page(run_id, seq, CONTENTS, json.dumps(written.lows))


class MemberReader:
    """Reader of some members of a run, as they were after the entry of a snapshot, within the caller's transaction.

    Args:
        connection: the transaction's connection.
        run_id: the run.
        first: the entry of the snapshot's complete set.
        seq: the entry of the snapshot.
    """

    def __init__(self, connection: Connection, run_id: RunId, first: int, seq: int) -> None:
        self._connection, self._run_id, self._first, self._seq = connection, run_id, first, seq
        of_contents = (MEMBERS.c.run_id == run_id, MEMBERS.c.seq == first, MEMBERS.c.page == CONTENTS)
        row = connection.execute(select(MEMBERS).where(*of_contents)).one_or_none()
        self._lows: list[str] = json.loads(self._checked(row).body) if row is not None else []

    def after(self, name: str, prefix: str = "") -> Iterator[tuple[ClientId, Member]]:
        """Yield the members after a name that begin with a prefix, in the order of their names.

        Raises:
            StoreCorrupted: a page is damaged.
        """
        for number in range(page_of(max(name, prefix), self._lows), max(1, len(self._lows))):
            if prefix and number < len(self._lows) and self._lows[number] > prefix + "\U0010ffff":
                return
            page = self._page(number)
            yield from ((c, page[c]) for c in sorted(page) if c > name and c.startswith(prefix))

    def named(self, names: Collection[str]) -> dict[ClientId, Member]:
        """Return the members with these names; raises the errors of `after`."""
        found: dict[ClientId, Member] = {}
        for number in sorted({page_of(name, self._lows) for name in names}):
            page = self._page(number)
            found |= {ClientId(name): page[ClientId(name)] for name in names if name in page}
        return found

    def _page(self, number: int) -> dict[ClientId, Member]:
        """Return the members of all pages of a number."""
        of_number = (MEMBERS.c.run_id == self._run_id, MEMBERS.c.page == number)
        rows = select(MEMBERS).where(*of_number, MEMBERS.c.seq.between(self._first, self._seq)).order_by(MEMBERS.c.seq)
        found: dict[ClientId, Member] = {}
        for row in self._connection.execute(rows):
            found |= decode_page(self._checked(row).body, where=self._where(row))
        return found

    def _checked(self, row: Row[Any]) -> Row[Any]:
        if checksums.of_page(row) != row.checksum:
            raise StoreCorrupted(f"{self._where(row)}: its checksum is wrong")
        return row

    def _where(self, row: Row[Any]) -> str:
        return f"run {self._run_id}, page {row.page} of entry {row.seq}"
