"""The lives of the ranks that a coordinator starts: each begins with a valid credential."""

import asyncio

from atoll.protocol.identity.credential import CredentialError
from atoll.server.identity.authority import AuthorityAway, NotSigned
from atoll.server.ranks import local_ranks
from atoll.server.ranks.local_ranks import SpawnedRanks
from tests.waiting import BOUND_S


class Dying(SpawnedRanks):
    """Ranks whose processes end at once."""

    def __init__(self, state, equip):
        super().__init__(1, state, "127.0.0.1:1", max_connections=1, insecure=False, equip=equip)
        self.lives = 0

    async def _life(self, rank, environment):
        self.lives += 1
        return "has ended with exit code 2"


async def lives_of(state, faults, count):
    """Return the number of lives at each call for a credential; the first calls fail."""
    found, enough = [], asyncio.Event()

    async def equip(rank):
        found.append(ranks.lives)
        if len(found) == count:
            enough.set()
        if len(found) <= len(faults):
            raise faults[len(found) - 1]

    ranks = Dying(state, equip)
    ranks.start()
    async with asyncio.timeout(BOUND_S):
        await enough.wait()
    await ranks.stop()
    return found


def test_a_rank_gets_a_valid_credential_before_each_life_and_waits_for_one(tmp_path, monkeypatch, caplog):
    """One that had expired while the coordinator ran was used again and again, and ended each life."""
    monkeypatch.setattr(local_ranks, "AGAIN_S", (0.001, 0.002))
    faults = [AuthorityAway("it is away"), NotSigned("it refuses"), CredentialError(["it is damaged"])]
    assert asyncio.run(lives_of(tmp_path, faults, 6)) == [0, 0, 0, 0, 1, 2]
    assert [line.message.split(";")[0].partition(" 0 ")[2] for line in caplog.records[:4]] == [
        *(f"cannot be started ({why})" for why in ("it is away", "it refuses", "it is damaged")),
        "has ended with exit code 2",
    ]
