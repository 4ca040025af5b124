"""The answers to operators that invite and revoke."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import grpc
import pytest

from atoll.ground.durable import DiskFull
from atoll.protocol import atoll_pb2 as pb
from atoll.server.identity.authority import Authority
from atoll.server.identity.enrolments import Enrolments
from atoll.server.identity.membership_services import MembersAdmin
from atoll.server.identity.register import Register
from atoll.server.journal.state_directory import StateDirectory
from tests.client.fake_coordinator import live


class Aborted(Exception):
    """A call has ended so."""


class Call:
    """The context of a call."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Aborted(f"{code.name}: {details}")

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[MembersAdmin]:
    """Yield the administration of a coordinator with four aggregation ranks."""
    with StateDirectory.open(tmp_path / "state") as state:
        enrolments = Enrolments(Register(state.database), Authority.create(tmp_path / "authority", "test"))
        enrolments.addresses = ("127.0.0.1:7071",)
        yield MembersAdmin(enrolments, 4, state.database)


@pytest.mark.parametrize("name", ["3a", "00", "03", "a", "1-0"])
@live
async def test_an_aggregators_name_is_its_number(admin: MembersAdmin, name: str) -> None:
    request = pb.InviteRequest(role="aggregator", name=name, lifetime_s=60)
    with pytest.raises(Aborted, match=f"INVALID_ARGUMENT: aggregator {name}: an aggregator's name is its number"):
        await admin.Invite(request, Call())


@live
async def test_an_aggregator_is_invited_for_a_rank_that_is_here(admin: MembersAdmin) -> None:
    assert (await admin.Invite(pb.InviteRequest(role="aggregator", name="3", lifetime_s=60), Call())).join_code
    with pytest.raises(Aborted, match="FAILED_PRECONDITION: aggregator 4: this coordinator has 4 aggregation ranks"):
        await admin.Invite(pb.InviteRequest(role="aggregator", name="4", lifetime_s=60), Call())


@live
async def test_a_full_disk_is_named_to_whoever_invites_or_revokes(
    admin: MembersAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskFull("state.db: no room: database or disk is full")

    monkeypatch.setattr(Register, "invite", full)
    monkeypatch.setattr(Register, "revoke", full)
    told = "RESOURCE_EXHAUSTED: cannot be stored now: state.db: no room: database or disk is full"
    with pytest.raises(Aborted, match=told):
        await admin.Invite(pb.InviteRequest(role="client", name="north", lifetime_s=60), Call())
    with pytest.raises(Aborted, match=told):
        await admin.Revoke(pb.RevokeRequest(role="client", name="north"), Call())
