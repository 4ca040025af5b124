"""Mutual TLS: every kind of stream, refused callers, unproven names, and certificates that are renewed."""

import asyncio
import ssl

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from atoll.client.wire.control_stream import Link
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.certificates import Issuer, server_name
from atoll.protocol.identity.dialer import InsecureDialer, MutualDialer
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.membership import Membership
from atoll.protocol.identity.names import COORDINATOR, Identity, Role, aggregator
from atoll.protocol.settings import ConfigError
from atoll.protocol.wire import channel as channel_module
from atoll.protocol.wire.channel import client_options
from atoll.protocol.wire.stream import Stream, StreamBroken
from atoll.server.identity.authority import Authority
from atoll.server.identity.enrolment_port import MESSAGE_BYTES_MAX
from atoll.server.identity.setup import owner_folder
from atoll.server.transport.listener import MutualListener
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_round import live, report

SECURE = {"coordinator__insecure": False}
NORTH = Identity(Role.CLIENT, "north")


async def code_of(channel, request=None):
    """Return the status code of a health check, or of another request, on this channel."""
    try:
        await (request or _check)(channel)
    except StreamBroken as error:
        return error.code
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _check(channel):
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)


async def _check_at_length(channel):
    long = health_pb2.HealthCheckRequest(service="x" * MESSAGE_BYTES_MAX)
    await health_pb2_grpc.HealthStub(channel).Check(long, timeout=BOUND_S)


async def _list_ranks(channel):
    await rpc.Stub(channel, "Admin").ListRanks(pb.ListRanksRequest(), timeout=BOUND_S)


def keeper_of(folder, identity, authority):
    authority.credential(identity).store(folder)
    return Keeper(folder)


@live
async def test_a_run_is_finished_by_members_and_an_owner_looks_on(tmp_path):
    """Sessions, downloads and uploads of two clients; the operators' port."""
    async with running(tmp_path / "state", rounds=2, **SECURE) as it, it.client("a") as a, it.client("b") as b:
        for _ in range(2):
            (_, one), (_, two) = await asyncio.gather(report(a), report(b))
            assert one.accepted
            assert two.accepted
        assert (await a.next("run_ended")).state == "finished"
        async with it.admin() as admin:
            assert not (await admin.ListRanks(pb.ListRanksRequest())).ranks
            with pytest.raises(grpc.aio.AioRpcError, match="no run 'other-1'"):
                await admin.StopRun(pb.StopRunRequest(run_id="other-1"))


@live
async def test_a_client_goes_by_the_name_of_its_certificate(tmp_path):
    async with running(tmp_path / "state", **SECURE) as it, it.client("north", as_name="south") as posing:
        assert (await posing.ending).code is grpc.StatusCode.PERMISSION_DENIED
        assert "client south" in (await posing.ending).detail


@live
async def test_only_the_enrolment_port_hears_a_caller_without_a_valid_certificate(tmp_path):
    foreign = Authority(Issuer.create("another", now=0.0 + 1e9, lifetime_s=1e10))
    async with running(tmp_path / "state", **SECURE) as it:
        ca_pem = it.dialer(NORTH)._keeper.current.ca_pem
        strangers = {"plain": InsecureDialer().channel(it.address, COORDINATOR)}
        options = client_options([("grpc.ssl_target_name_override", server_name(COORDINATOR))])
        strangers["bare"] = grpc.aio.secure_channel(it.address, grpc.ssl_channel_credentials(ca_pem), options=options)
        mine = foreign.credential(NORTH)
        pair = mine.key_pem, mine.certificate_pem
        strangers["foreign"] = grpc.aio.secure_channel(
            it.address, grpc.ssl_channel_credentials(ca_pem, *pair), options=options
        )
        for name, channel in strangers.items():
            assert await code_of(channel) is grpc.StatusCode.UNAVAILABLE, name
            await channel.close()
        async with grpc.aio.secure_channel(
            it.ports.enrolment.address, grpc.ssl_channel_credentials(ca_pem), options=options
        ) as channel:
            assert await code_of(channel) is grpc.StatusCode.OK
            assert await code_of(channel, _list_ranks) is grpc.StatusCode.UNIMPLEMENTED
            assert await code_of(channel, _check_at_length) is grpc.StatusCode.RESOURCE_EXHAUSTED


@live
async def test_nobody_but_the_coordinator_is_believed_to_be_it(tmp_path):
    """Neither a client who listens, nor a rank, nor a coordinator of another authority."""
    authority, other = Authority.create(tmp_path / "ca", "one"), Authority.create(tmp_path / "other", "two")
    dialer = MutualDialer(keeper_of(tmp_path / "north", NORTH, authority))
    for name, identity, issuer, expected in (
        ("coordinator", COORDINATOR, authority, grpc.StatusCode.UNIMPLEMENTED),
        ("client", Identity(Role.CLIENT, "main"), authority, grpc.StatusCode.UNAVAILABLE),
        ("rank", aggregator(0), authority, grpc.StatusCode.UNAVAILABLE),
        ("foreign", COORDINATOR, other, grpc.StatusCode.UNAVAILABLE),
    ):
        server = grpc.aio.server()
        keeper = keeper_of(tmp_path / name, identity, issuer)
        address = MutualListener(keeper).bind(server, "127.0.0.1:0")
        await server.start()
        async with dialer.channel(address, COORDINATOR) as channel:
            assert await code_of(channel) is expected, name
        await server.stop(0)


@live
async def test_a_renewed_certificate_is_shown_and_used_without_a_restart(tmp_path):
    authority = Authority.create(tmp_path / "ca", "one")
    server, serials = grpc.aio.server(), []

    class Looking:
        async def ListRanks(self, request, context):
            serials.append(bytes(context.auth_context()["x509_pem_cert"][0]))
            return pb.ListRanksReply()

    rpc.add_servicer(Looking(), server, "Admin")
    ours = keeper_of(tmp_path / "coordinator", COORDINATOR, authority)
    mine = keeper_of(tmp_path / "owner", Identity(Role.OWNER, "me"), authority)
    address = MutualListener(ours).bind(server, "127.0.0.1:0")
    await server.start()
    dialer, shown = MutualDialer(mine), []
    for _ in range(2):
        async with dialer.channel(address, COORDINATOR) as channel:
            assert await code_of(channel, _list_ranks) is grpc.StatusCode.OK
        port = int(address.rpartition(":")[2])
        shown.append(await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port)))
        assert shown[-1].encode().split() == ours.current.certificate_pem.split()
        assert serials[-1].split() == mine.current.certificate_pem.split()
        ours.replace(authority.credential(COORDINATOR))
        mine.replace(authority.credential(mine.identity))
    assert shown[0] != shown[1]
    assert serials[0] != serials[1]
    await server.stop(0)


@live
async def test_an_old_connection_takes_no_new_call_and_ends_none_that_is_open(tmp_path, monkeypatch):
    """Check that callers prove themselves anew, with the newest certificate, and that no long transfer is cut."""
    monkeypatch.setattr(channel_module, "CONNECTION_AGE_S", 1)
    authority, peers = Authority.create(tmp_path / "ca", "one"), set()

    class Looking:
        async def ListRanks(self, request, context):
            peers.add(context.peer())
            return pb.ListRanksReply()

    server = grpc.aio.server(options=channel_module.server_options())
    rpc.add_servicer(Looking(), server, "Admin")
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = MutualListener(keeper_of(tmp_path / "main", COORDINATOR, authority)).bind(server, "127.0.0.1:0")
    await server.start()
    async with MutualDialer(keeper_of(tmp_path / "north", NORTH, authority)).channel(address, COORDINATOR) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        while len(peers) < 3:
            assert await code_of(channel, _list_ranks) is grpc.StatusCode.OK
            await asyncio.sleep(0.02)
        await checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(0)


@live
async def test_a_join_code_is_needed_once_and_good_for_one_site(tmp_path):
    async with running(tmp_path / "state", **SECURE) as it, it.admin() as admin:
        code = (await admin.Invite(pb.InviteRequest(role="client", name="north", lifetime_s=60))).join_code
        place = await Membership.take(tmp_path / "north", NORTH, join=code)
        assert place.address == it.address
        for join in (code, ""):
            again = await Membership.take(tmp_path / "north", NORTH, join=join)
            assert again.keeper.current == place.keeper.current
        async with place.dialer.channel(place.address, COORDINATOR) as channel:
            assert await code_of(channel) is grpc.StatusCode.OK
        for folder, identity, join, fault in (
            ("north", Identity(Role.CLIENT, "south"), "", "credential of client north, and this is client south"),
            ("another", NORTH, code, "has been used, by another key"),
            ("nobody", NORTH, "", "enrol first, with a join code"),
            ("mistyped", NORTH, code[:-3], "join: the join code"),
        ):
            with pytest.raises(ConfigError, match=fault) as refusal:
                await Membership.take(tmp_path / folder, identity, join=join)
            assert code[20:60] not in str(refusal.value)


@live
async def test_calls_after_a_renewal_use_the_new_certificate_and_the_stream_goes_on(tmp_path):
    authority = Authority.open_or_create(tmp_path / "state" / "identity" / "authority", "one")
    async with running(tmp_path / "state", **SECURE) as it:
        keeper = keeper_of(tmp_path / "north", NORTH, authority)
        link = Link(MutualDialer(keeper), it.address)
        staying_fresh = asyncio.create_task(link.connection.keep_fresh())
        hello = pb.Hello(
            protocol=channel_module.PROTOCOL, client_id="north", session="1", tasks=["four_numbers_task:task"]
        )
        await link.open(hello)
        asked = pb.ManifestRequest(run_id="tiny-1", digest=it.run.reducer.version(0).digest)
        async with link.calls() as older:
            keeper.replace(authority.credential(NORTH))
            link.connection.renew()
            async with asyncio.timeout(BOUND_S):
                while True:
                    async with link.calls() as stub:
                        if stub is not older:
                            break
                    await asyncio.sleep(0.01)
            for each in (stub, older):
                assert (await each.GetManifest(asked)).manifest
        assert [connection.client_id for connection in it.coordinator.attendance.hub] == ["north"]
        staying_fresh.cancel()
        await link.close()


@live
async def test_who_is_revoked_loses_its_stream_and_comes_back_with_a_new_certificate_only(tmp_path):
    async with running(tmp_path / "state", **SECURE) as it, it.client("north") as north:
        await north.next("welcome")
        async with it.admin() as admin:
            await admin.Revoke(pb.RevokeRequest(role="client", name="north"))
            async with asyncio.timeout(BOUND_S):
                assert (await north.ending).code is grpc.StatusCode.UNAUTHENTICATED
            async with it.client("north") as again:
                assert (await again.ending).code is grpc.StatusCode.UNAUTHENTICATED
            members = (await admin.ListMembers(pb.ListMembersRequest())).members
            assert ("north", "revoked") in {(row.name, row.standing) for row in members}


@live
async def test_the_owner_needs_no_enrolment_and_reflection_answers_admins_only(tmp_path):
    async with running(tmp_path / "state", **SECURE) as it:
        owner = MutualDialer(Keeper(owner_folder(tmp_path / "state")))

        async def reflect(channel):
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            stream = Stream(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo)
            await stream.write(request)
            await stream.half_close()
            while (reply := await stream.read()) is not None:
                assert "atoll.v1.Admin" in {service.name for service in reply.list_services_response.service}

        async with owner.channel(it.admin_address, COORDINATOR) as channel:
            assert await code_of(channel, _list_ranks) is grpc.StatusCode.OK
            assert await code_of(channel, reflect) is grpc.StatusCode.OK
        async with it.dialer(NORTH).channel(it.admin_address, COORDINATOR) as channel:
            assert await code_of(channel, _list_ranks) is grpc.StatusCode.PERMISSION_DENIED
            assert await code_of(channel, reflect) is grpc.StatusCode.PERMISSION_DENIED
        async with owner.channel(it.address, COORDINATOR) as channel:
            assert await code_of(channel, reflect) is grpc.StatusCode.UNIMPLEMENTED
