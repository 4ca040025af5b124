"""When a credential is renewed, by a clock that was right or ahead when its certificate was made."""

import asyncio
import random

import pytest

from atoll.protocol.identity.renewal import NotRenewed, keep_renewed
from tests.protocol.identity.test_handshake_fault import EARLY, LATE, NOW, SITE_A, Authority
from tests.wire.test_round import live


@pytest.mark.parametrize(("days", "is_due"), [(NOW, False), (EARLY, True), (LATE, True)])
@live
async def test_what_is_not_valid_yet_is_renewed_at_once_as_what_is_no_longer(tmp_path, days, is_due):
    asked = asyncio.Event()

    async def renew(request, consent):
        asked.set()
        raise NotRenewed("the authority is away")

    keeper = Authority.of().keeper(tmp_path, SITE_A, days)
    renewing = asyncio.create_task(keep_renewed(keeper, renew, rng=random.Random(0)))
    for _ in range(3):
        await asyncio.sleep(0)
    renewing.cancel()
    await asyncio.wait([renewing])
    assert asked.is_set() is is_due
