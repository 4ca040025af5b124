"""The wait of a member whose certificate has expired by a clock that may be the wrong one."""

import asyncio

import pytest

from atoll.protocol.identity import expiry
from atoll.protocol.identity.credential import CredentialError
from atoll.protocol.identity.expiry import doubt_about_clock, wait_until_valid
from benchmarks.processes import free_address
from tests.protocol.identity.test_handshake_fault import (
    EARLY,
    LATE,
    NOW,
    SITE_A,
    Authority,
    process,
    said,
    serving,
    starts,
)
from tests.wire.test_round import live

pytestmark = pytest.mark.real


@live
async def test_a_valid_certificate_waits_for_nothing_and_looks_at_nothing(tmp_path):
    await wait_until_valid(Authority.of().keeper(tmp_path, SITE_A, NOW), "192.0.2.1:1")


@pytest.mark.parametrize("days", [LATE, EARLY])
@live
async def test_a_coordinator_that_is_out_of_its_time_too_means_a_wrong_clock(tmp_path, days):
    authority = Authority.of()
    mine = authority.credential(SITE_A, LATE)
    async with serving(tmp_path / "coordinator", authority, days) as address:
        doubt = await doubt_about_clock(mine, address)
    assert doubt is not None
    assert doubt.startswith(f"the certificate of the coordinator at {address} is valid from")
    assert doubt.endswith("so this machine's clock is probably wrong (NTP)")


@live
async def test_a_coordinator_that_is_valid_or_of_another_authority_means_that_it_has_expired(tmp_path):
    authority = Authority.of()
    mine = authority.credential(SITE_A, LATE)
    async with serving(tmp_path / "valid", authority) as address:
        assert await doubt_about_clock(mine, address) is None
    async with serving(tmp_path / "other", Authority.of(), LATE) as address:
        assert await doubt_about_clock(mine, address) is None


@live
async def test_it_waits_while_nothing_answers_and_ends_once_the_clocks_agree(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(expiry, "AGAIN_S", 0.05)
    authority, address = Authority.of(), free_address()
    keeper = authority.keeper(tmp_path / "me", SITE_A, LATE)
    waiting = asyncio.ensure_future(wait_until_valid(keeper, address))
    while "does not answer" not in caplog.text:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert not waiting.done()
    assert caplog.text.count("does not answer, so its clock is not known: waiting") == 1
    keeper.replace(authority.credential(SITE_A, NOW))  # as if the clock were set right
    await waiting
    keeper.replace(authority.credential(SITE_A, LATE))
    async with serving(tmp_path / "coordinator", authority) as address:
        with pytest.raises(CredentialError, match="has expired"):
            await wait_until_valid(keeper, address)


@live
async def test_an_agent_that_boots_past_its_certificate_s_end_waits_beside_a_coordinator_that_is_away(tmp_path):
    """Its unit stays up until the clock is set; exit code 2 comes once the coordinator is seen to agree."""
    authority, address = Authority.of(), free_address()
    command, environment, _ = starts("agent", tmp_path, authority, address, LATE)
    async with process(tmp_path, *command, **environment) as log:
        line = await said(log, "does not answer, so its clock is not known: waiting")
    assert "a: warning: the certificate in " in line
    assert "has expired" in line
