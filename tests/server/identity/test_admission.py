"""The admission of callers, at a coordinator and at a rank that asks it."""

import asyncio

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.names import Identity, Role
from atoll.server.identity import admission
from atoll.server.identity.admission import Admission, AskedAdmission
from atoll.server.identity.guard import Caller
from atoll.server.transport.peer import Peer
from tests.client.fake_coordinator import live

NORTH = Caller(Peer(Identity(Role.CLIENT, "north"), 2**159 + 7), "r-1")
SOUTH = Caller(Peer(Identity(Role.CLIENT, "south"), 8), "r-1")
ADA = Caller(Peer(Identity(Role.OWNER, "ada"), 9), "r-1")


class Known:
    """A coordinator's register, and the stub of a rank that asks it."""

    def __init__(self):
        self.revoked, self.members, self.asked, self.is_away = set(), {("north", "r-1")}, [], False
        self.admission = Admission(
            lambda identity, serial: serial in self.revoked, lambda client, run: (client, run) in self.members
        )

    async def Admit(self, request, timeout):
        if self.is_away:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        self.asked.append(len(request.callers))
        return self.admission.answer(pb.AdmitRequest.FromString(request.SerializeToString()))


def asking(known, of_a_rank):
    return AskedAdmission(lambda: known) if of_a_rank else known.admission


@pytest.mark.parametrize("of_a_rank", [False, True])
@live
async def test_members_are_served_in_the_runs_that_they_joined(of_a_rank):
    known = Known()
    north, south, ada = await asking(known, of_a_rank).refusals([NORTH, SOUTH, ADA])
    assert (north, ada) == (None, None)
    assert south == (grpc.StatusCode.PERMISSION_DENIED, "client south has not joined run 'r-1'")
    assert await asking(known, of_a_rank).refusals([Caller(SOUTH.peer)]) == [None]
    known.revoked.add(NORTH.peer.serial)
    [north] = await asking(known, of_a_rank).refusals([NORTH])
    assert north == (grpc.StatusCode.UNAUTHENTICATED, "the certificate of client north is revoked")


@live
async def test_a_rank_asks_about_all_at_once_and_believes_it_for_a_moment():
    known = Known()
    rank = AskedAdmission(lambda: known)
    await rank.refusals([NORTH, SOUTH])
    await rank.refusals([NORTH, SOUTH, ADA])
    assert known.asked == [2, 2]  # whoever was refused is asked about at once


@live
async def test_a_rank_that_cannot_ask_serves_those_it_had_admitted_and_not_for_long(monkeypatch):
    known = Known()
    rank, now = AskedAdmission(lambda: known), 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    assert await rank.refusals([NORTH]) == [None]
    known.is_away, now = True, now + admission.FRESH_S
    north, ada = await rank.refusals([NORTH, ADA])
    assert north is None
    assert ada.code is grpc.StatusCode.UNAVAILABLE
    now = 100.0 + admission.STALE_S
    [north] = await rank.refusals([NORTH])
    assert north.code is grpc.StatusCode.UNAVAILABLE
    assert "client north" in north.detail


@pytest.mark.parametrize("caller", [pb.Caller(role="king", name="x"), pb.Caller(role="client", name="../x")])
def test_what_no_certificate_says_is_an_error(caller):
    with pytest.raises(ValueError, match=r"king|\.\./x"):
        Known().admission.answer(pb.AdmitRequest(callers=[caller]))
