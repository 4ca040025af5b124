"""Enrolling and renewing over real ports: a register, an authority, and the port for strangers."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from atoll.ground.durable import DiskFull
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity import enrolling
from atoll.protocol.identity.certificates import consent, make_request, new_key, server_name
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.dialer import MutualDialer
from atoll.protocol.identity.enrolling import ENROLLING, EnrolmentFailed, Place, Unreachable, enrol, is_enrolled
from atoll.protocol.identity.join_code import JoinCode
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.membership import Membership
from atoll.protocol.identity.names import ANYBODY, COORDINATOR, Identity, Role
from atoll.protocol.identity.proxy import through_proxy
from atoll.protocol.identity.renewal import MembershipEnded, NotRenewed, keep_renewed, over, renew_once
from atoll.server.audit.calls import CallAudit
from atoll.server.audit.log import AuditLog
from atoll.server.audit.reading import Source, events_of
from atoll.server.identity.admission import Admission
from atoll.server.identity.authority import Authority
from atoll.server.identity.enrolment_port import EnrolmentPort
from atoll.server.identity.enrolments import RENEWALS_BURST, Enrolments
from atoll.server.identity.guard import Guard
from atoll.server.identity.membership_services import TRIES_BURST, MembershipService
from atoll.server.identity.own_certificates import OwnCertificates
from atoll.server.identity.register import WRONG_TRIES_MAX, Register
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.transport.listener import MutualListener
from tests.client.connect_proxy import connect_proxy
from tests.client.fake_coordinator import live

NORTH = Identity(Role.CLIENT, "north")


@dataclass
class House:
    """The parts of a coordinator that concern members."""

    enrolments: Enrolments
    register: Register
    keeper: Keeper
    port: EnrolmentPort
    members_port: str

    def channel(self, credential: Credential) -> grpc.aio.Channel:
        secret = grpc.ssl_channel_credentials(credential.ca_pem, credential.key_pem, credential.certificate_pem)
        options = [("grpc.ssl_target_name_override", server_name(COORDINATOR))]
        return grpc.aio.secure_channel(self.members_port, secret, options)

    async def invite(self, identity: Identity = NORTH) -> JoinCode:
        return (await self.enrolments.invite(identity, 60.0))[0]


@asynccontextmanager
async def house(path: Path, lifetime_s: float = 1000.0) -> AsyncIterator[House]:
    with StateDirectory.open(path) as state, AuditLog(path / "audit", time.time) as audit:
        authority = Authority.open_or_create(path / "authority", "test", lifetime_s)
        register = Register(state.database)
        enrolments, certificates = Enrolments(register, authority), OwnCertificates(register, authority)
        keeper = await certificates.keeper(path / "identity", COORDINATOR)
        admission = Admission(register.revocations.is_revoked, lambda client, run: True)
        members = grpc.aio.server(interceptors=[Guard(admission)])
        rpc.add_servicer(MembershipService(enrolments), members, "Membership")
        address = MutualListener(keeper).bind(members, "127.0.0.1:0")
        guards, admin_address = (Guard(admission), CallAudit(audit)), "127.0.0.1:1"
        port = EnrolmentPort(enrolments, keeper, *guards, "127.0.0.1:0", address=address, admin_address=admin_address)
        enrolments.addresses, enrolments.audit = (port.address,), audit
        await members.start()
        await port.start()
        try:
            yield House(enrolments, register, keeper, port, address)
        finally:
            await asyncio.gather(members.stop(0), port.stop(), certificates.close())


@live
async def test_whoever_has_a_code_becomes_who_it_is_for_and_knows_the_place(tmp_path: Path) -> None:
    async with house(tmp_path / "state") as at:
        code = JoinCode.parse(str(await at.invite()))
        assert not is_enrolled(tmp_path / "me", code, time.time())
        credential = await enrol(code, tmp_path / "me")
        assert credential.identity == NORTH
        assert Credential.load(tmp_path / "me") == credential
        assert Place.load(tmp_path / "me").address == at.members_port
        assert is_enrolled(tmp_path / "me", code, time.time())
        assert not is_enrolled(tmp_path / "me", code, time.time() + 2000)
        assert not is_enrolled(tmp_path / "me", await at.invite(), time.time())
        assert "enrolling.pem" not in {file.name for file in (tmp_path / "me").iterdir()}
        with pytest.raises(EnrolmentFailed, match=r"refuses: .*(no such invitation|used, by another key)"):
            await enrol(code, tmp_path / "thief")


@live
async def test_a_code_for_somebody_else_is_refused_and_stays_good(tmp_path: Path) -> None:
    async with house(tmp_path / "state") as at:
        code = await at.invite()
        for wanted in (Identity(Role.CLIENT, "south"), Identity(Role.OPERATOR, "north")):
            with pytest.raises(EnrolmentFailed, match=f"is for client north, and not for {wanted}; it remains valid"):
                await Membership.take(tmp_path / "me", wanted, join=str(code))
        membership = await Membership.take(tmp_path / "me", NORTH, join=str(code))
        assert membership.keeper is not None
        assert membership.keeper.identity == NORTH
        with pytest.raises(
            EnrolmentFailed, match="not for client south"
        ):  # what holds already is not lost by a mistake
            await Membership.take(tmp_path / "me", Identity(Role.CLIENT, "south"), join=str(await at.invite()))
        assert Credential.load(tmp_path / "me").identity == NORTH


@live
async def test_one_enrols_and_renews_through_proxies_that_see_addresses_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path / "state") as at:
        async with connect_proxy(int(at.port.address.rpartition(":")[2]), "north:s3cret") as proxy:
            monkeypatch.setenv("https_proxy", f"http://north:s3cret@{proxy.address}")
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
            code = replace(await at.invite(), addresses=("atoll.example:7070",))
            assert (await enrol(code, tmp_path / "me")).identity == NORTH
            assert [line for line in proxy.lines if "to" in line] == [{"to": "atoll.example:7070", "status": "200"}] * 2
        async with connect_proxy(int(at.members_port.rpartition(":")[2])) as proxy:
            mine = Keeper(tmp_path / "me")
            dialer = through_proxy(MutualDialer(mine), {"HTTPS_PROXY": f"http://{proxy.address}"})
            newer = await renew_once(mine.current, over(lambda: dialer.channel("atoll.example:7071", COORDINATOR)))
            assert newer.identity == NORTH
            assert proxy.lines[0] == {"to": "atoll.example:7071", "status": "200"}


@live
async def test_an_enrolment_whose_answer_was_lost_is_repeated(tmp_path: Path) -> None:
    async with house(tmp_path / "state") as at:
        code = await at.invite()
        key = enrolling.key_in(tmp_path / "me")
        lost, _ = await enrolling._ask(at.port.address, code, key, ANYBODY)
        credential = await enrol(code, tmp_path / "me")
        assert credential.certificate_pem == lost.certificate_pem


@live
async def test_nothing_is_told_to_somebody_else_than_the_code_says(tmp_path: Path) -> None:
    async with house(tmp_path / "ours") as ours, house(tmp_path / "theirs") as theirs:
        code = await ours.invite()
        with pytest.raises(EnrolmentFailed, match="is not the coordinator of this join code: its authority has"):
            await enrol(replace(code, addresses=(theirs.port.address,)), tmp_path / "me")
        # one that shows our authority's certificate has none from it
        theirs.enrolments._signer = Liar(ours.enrolments.ca_pem)  # type: ignore[assignment]
        with pytest.raises(EnrolmentFailed, match="is not signed by this authority"):
            await enrol(replace(code, addresses=(theirs.port.address,)), tmp_path / "me")
        assert (await enrol(code, tmp_path / "me")).identity == NORTH  # the secret has stayed one


@dataclass
class Liar:
    ca_pem: bytes
    cross_pem: bytes = b""


@live
async def test_the_first_address_that_answers_is_taken_and_all_that_do_not_are_named(tmp_path: Path) -> None:
    async with house(tmp_path / "state") as at:
        code = await at.invite()
        nobody = "127.0.0.1:9"
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9"):
            await enrol(replace(code, addresses=(nobody,)), tmp_path / "me")
        both = replace(code, addresses=(nobody, at.port.address))
        assert (await enrol(both, tmp_path / "me")).identity == NORTH


@live
async def test_tries_from_one_address_are_limited(tmp_path: Path) -> None:
    async with house(tmp_path / "state") as at:
        code = await at.invite()
        credentials = grpc.ssl_channel_credentials(at.keeper.current.ca_pem)
        options = [("grpc.ssl_target_name_override", server_name(COORDINATOR))]
        async with grpc.aio.secure_channel(at.port.address, credentials, options) as channel:
            stub, request = rpc.Stub(channel, "Enrolment"), make_request(new_key())
            codes = []
            for _ in range(25):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Enrol(pb.EnrolRequest(id=bytes(8), secret=code.secret, request=request))
                codes.append(refused.value.code())
        assert codes[:20] == [grpc.StatusCode.PERMISSION_DENIED] * 20
        assert codes[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED


@live
async def test_many_sites_behind_one_address_that_enrol_at_once_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.protocol.identity.enrolling.BUSY_WAIT_S", (0.05, 0.5))
    async with house(tmp_path / "state") as at:
        names = [Identity(Role.CLIENT, f"site-{number}") for number in range(2 * TRIES_BURST)]
        codes = [await at.invite(name) for name in names]
        credentials = await asyncio.gather(*(enrol(code, tmp_path / code.id.hex()) for code in codes))
        assert [credential.identity for credential in credentials] == names


@live
async def test_who_waits_in_vain_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.protocol.identity.enrolling.BUSY_WAIT_S", (0.01, 0.02))
    monkeypatch.setattr("atoll.protocol.identity.enrolling.PATIENCE_S", 0.2)
    async with house(tmp_path / "state") as at:
        guess = replace(await at.invite(), secret=bytes(16))
        told = ""
        while "wait a minute" not in told:
            with pytest.raises(EnrolmentFailed) as failed:
                await enrol(guess, tmp_path / "guessing")
            told = str(failed.value)
        assert isinstance(failed.value, Unreachable)
        assert told.startswith(f"cannot enrol at {guess.addresses[0]}: too many tries from this address")


@live
async def test_many_sites_behind_one_address_enrol_one_after_the_other(tmp_path: Path) -> None:
    async with house(tmp_path / "state") as at:
        code = await at.invite()
        for _ in range(25):  # the same code and key: an enrolment that is repeated after its answer was lost
            assert (await enrol(code, tmp_path / "me")).identity == NORTH
            (tmp_path / "me" / "key.pem").replace(tmp_path / "me" / ENROLLING)


@live
async def test_refused_strangers_and_a_code_that_they_void_are_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(tmp_path / "state") as at:
        wrong = replace(await at.invite(), secret=bytes(16))
        for _ in range(WRONG_TRIES_MAX):
            with pytest.raises(EnrolmentFailed, match="secret is wrong"):
                await enrol(wrong, tmp_path / "thief")
    assert f"the invitation of client north is void after {WRONG_TRIES_MAX} wrong tries" in caplog.text
    assert "refused: the invitation's secret is wrong (from ipv4:127.0.0.1:" in caplog.text
    events = [line.event for line in events_of(Source.of_state(tmp_path / "state")) if line.event is not None]
    refused = [event for event in events if event.action == "call.refuse"]
    assert len(refused) == WRONG_TRIES_MAX
    assert {(event.actor, event.role, event.object) for event in refused} == {
        ("ipv4:127.0.0.1", "anonymous", "/atoll.v1.Enrolment/Enrol")
    }
    assert refused[0].outcome == "PERMISSION_DENIED: the invitation's secret is wrong"
    [void] = [event for event in events if event.action == "client.void"]
    assert (void.actor, void.object, void.outcome) == (
        "coordinator",
        "client north",
        f"its invitation, after {WRONG_TRIES_MAX} wrong tries",
    )


@live
async def test_a_full_disk_is_told_without_a_path_and_the_code_stays_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskFull("/secret/state.db: no room: database or disk is full")

    monkeypatch.setattr(enrolling, "PATIENCE_S", 0.0)
    async with house(tmp_path / "state") as at:
        code = await at.invite()
        with monkeypatch.context() as patch:
            patch.setattr(at.register, "enrolled", full)
            with pytest.raises(EnrolmentFailed, match=r"cannot be stored now: no room$"):
                await enrol(code, tmp_path / "me")
        mine = await enrol(code, tmp_path / "me")
        with monkeypatch.context() as patch:
            patch.setattr(at.register, "renewed", full)
            with pytest.raises(NotRenewed, match=r"RESOURCE_EXHAUSTED: cannot be stored now: no room$"):
                await renew_once(mine, over(lambda: at.channel(mine)))
            with pytest.raises(NotRenewed, match="no room"):  # the coordinator tries again with its own, too
                await renew_once(
                    at.keeper.current, OwnCertificates(at.register, at.enrolments._signer)._renew(at.keeper)
                )


@live
async def test_a_member_renews_with_a_new_key_and_not_too_often(tmp_path: Path) -> None:
    async with house(tmp_path / "state") as at:
        mine = await enrol(await at.invite(), tmp_path / "me")
        newer = await renew_once(mine, over(lambda: at.channel(mine)))
        assert newer.identity == NORTH
        assert newer.key_pem != mine.key_pem
        tries = [renew_once(newer, over(lambda: at.channel(newer))) for _ in range(2 * RENEWALS_BURST)]
        refused = [str(error) for error in await asyncio.gather(*tries, return_exceptions=True) if error is not None]
        assert any("RESOURCE_EXHAUSTED" in detail for detail in refused)


@live
async def test_a_renewal_takes_the_older_keys_word(tmp_path: Path) -> None:
    async with house(tmp_path / "state") as at:
        mine = await enrol(await at.invite(), tmp_path / "me")
        request = make_request(new_key())
        with pytest.raises(NotRenewed, match="not signed by the key of the older certificate"):
            await over(lambda: at.channel(mine))(request, consent(new_key(), request))


@live
async def test_who_is_revoked_renews_nothing_and_is_told_to_stop(tmp_path: Path) -> None:
    async with house(tmp_path / "state") as at:
        told: list[Identity] = []
        at.enrolments.on_revoked(told.append)
        mine = await enrol(await at.invite(), tmp_path / "me")
        await at.enrolments.revoke(NORTH)
        assert told == [NORTH]
        with pytest.raises(MembershipEnded, match="revoked: this needs a new join code"):
            await renew_once(mine, over(lambda: at.channel(mine)))
        again = await enrol(await at.invite(), tmp_path / "me")
        assert (await renew_once(again, over(lambda: at.channel(again)))).identity == NORTH


@live
async def test_short_lives_are_renewed_again_and_again_on_both_sides(tmp_path: Path) -> None:
    async with house(tmp_path / "state", lifetime_s=3.0) as at:
        certificates = OwnCertificates(at.register, at.enrolments._signer)
        certificates.keep(at.keeper)
        await enrol(await at.invite(), tmp_path / "me")
        keeper, seen, enough = Keeper(tmp_path / "me"), [], asyncio.Event()

        def replaced(credential: Credential) -> None:
            seen.append(credential)
            if len(seen) == 2:
                enough.set()

        keeper.on_replaced(replaced)
        first = at.keeper.current
        renewing = asyncio.create_task(
            keep_renewed(keeper, over(lambda: at.channel(keeper.current)), rng=random.Random(1))
        )
        await asyncio.wait({renewing, asyncio.create_task(enough.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert not renewing.done(), renewing.exception()
        renewing.cancel()
        await certificates.close()
        assert Credential.load(tmp_path / "me") == seen[-1]
        assert at.keeper.current != first


@live
async def test_an_authority_that_is_away_is_asked_again_until_time_is_over(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "authority", "test", lifetime_s=1.0)
    authority.credential(NORTH).store(tmp_path / "me")
    tries = 0

    async def away(request: bytes, signature: bytes) -> tuple[bytes, bytes, bytes]:
        nonlocal tries
        tries += 1
        raise NotRenewed("nobody answers")

    keeper = Keeper(tmp_path / "me")

    async def check() -> None:
        keeper.check()

    with pytest.raises(MembershipEnded, match="has expired"):
        await keep_renewed(keeper, away, rng=random.Random(1), check=check)
    assert 1 <= tries <= 8
