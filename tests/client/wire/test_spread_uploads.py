"""The rank that each part of an update goes to, and when it takes the next one."""

import asyncio
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from atoll.client.wire.ranks import PATIENCE_S, Ranks
from atoll.client.wire.uploads import Uploads
from atoll.protocol import atoll_pb2 as pb

KEY = ("round", "run-1", 1)


class Part(NamedTuple):
    """A part of an update."""

    name: str
    num_bytes: int = 1


class Three(Ranks):
    """Three ranks; a connection to one gives its number."""

    def __init__(self):
        self._addresses = ("x", "y", "z")

    def connection(self, rank):
        return rank


@pytest.fixture
def uploads():
    spool = SimpleNamespace(entries=dict)
    connection = SimpleNamespace(ranks=Three())
    ignored = dict.fromkeys(("spawn", "on_event", "ask", "report", "disclosure"))
    return Uploads(spool, connection, bytes_per_s=0, **ignored)


def test_each_part_goes_to_the_next_rank_and_moves_by_its_own_time(uploads):
    async def check():
        link, now = SimpleNamespace(connection=None), asyncio.get_running_loop().time()
        assert [uploads._receiver(KEY, 2, part, link) for part in range(4)] == [2, 0, 1, 2]
        uploads._stalled[KEY][1] = link, now - PATIENCE_S  # its rank is away
        assert [uploads._receiver(KEY, 2, part, link) for part in range(4)] == [2, 1, 1, 2]
        assert uploads._receiver(KEY, 2, 1, object()) == 0, "the coordinator was away: its own rank again"

    asyncio.run(check())


@pytest.mark.real
@pytest.mark.parametrize("spreads", [False, True])
def test_parts_go_to_one_rank_unless_the_invitation_spreads_them(uploads, spreads, monkeypatch):
    """An older coordinator does not say so: then the one rank has every part."""
    went = []

    async def upload(stub, entry, pace, *, part, on_progress, **rest):
        went.append((part, stub))
        on_progress(1)
        return pb.Verdict(accepted=True) if part == parts[-1] else None

    class Channel:
        def __init__(self, rank):
            self.rank = rank

        async def bulk_calls(self, num_bytes):
            return Calls(self.rank)

    class Calls:
        def __init__(self, rank):
            self.rank = rank

        async def __aenter__(self):
            return self.rank

        async def __aexit__(self, *_):
            pass

    monkeypatch.setattr("atoll.client.wire.uploads.upload", upload)
    monkeypatch.setattr(Three, "connection", lambda _, rank: Channel(rank))
    uploads._connection.current, uploads._disclosure = object(), lambda _: None
    parts = tuple(map(Part, "abcd"))
    entry = SimpleNamespace(num_bytes=4, parts=parts, rank=1, spreads=spreads)

    async def check():
        assert (await uploads._verdict(entry, KEY, True)).accepted
        assert went == list(zip(parts, [1, 2, 0, 1] if spreads else [1] * 4, strict=True))
        assert KEY not in uploads._stalled

    asyncio.run(check())
