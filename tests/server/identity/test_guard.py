"""Every method x every role x own and foreign, over a real server with mutual TLS."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import MISSING, fields
from itertools import combinations

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from atoll.ground.strict_json import ManifestError
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.names import Role, is_name
from atoll.protocol.manifest import Part, UpdateManifest, parse_update
from atoll.protocol.wire.stream import first_status
from atoll.server.identity import guard as guard_module
from atoll.server.identity.guard import Denied, Guard, client_of
from atoll.server.identity.rules import RULES, Touches
from atoll.tensors.layout import Piece
from tests.client.fake_coordinator import live
from tests.server.identity.secure import Member, listening, member
from tests.waiting import BOUND_S

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (pb, health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

MEMBERS = {
    role: member(role, {Role.AGGREGATOR: "1", Role.CLIENT: "north", Role.COORDINATOR: "main"}.get(role, "ada"))
    for role in Role
}

ON_RUNS = ("StartRun", "CollectStatistics", "StopRun", "PauseRun", "ResumeRun")
MAY = {
    Role.OPERATOR: {"GetManifest", "Download", *ON_RUNS, "ListRanks", "ServerReflectionInfo"}
    | {"Invite", "Revoke", "ListMembers", "Look", "Follow", "ReadAuditLog"},
    Role.AUDITOR: {"GetManifest", "ListRanks", "ListMembers", "Look", "Follow", "ReadAuditLog"},
    Role.CLIENT: {"Session", "GetManifest", "Download", "Upload"},
    Role.AGGREGATOR: {"Admit", "OpenUpdate", "SubmitUpdate", "SubmitPart", "GetUpdates", "FindUnused"},
    Role.COORDINATOR: set(),
    Role.AUTHORITY: set(),
}
MAY[Role.OWNER] = MAY[Role.OPERATOR] | {"DeleteRun"}
BETWEEN_SERVERS = {
    (Role.AGGREGATOR, "/atoll.v1.Aggregation/Serve"),
    (Role.AGGREGATOR, "/atoll.v1.Coordinator/GetManifest"),
    (Role.AGGREGATOR, "/atoll.v1.Coordinator/Download"),
    (Role.COORDINATOR, "/atoll.v1.Aggregator/Download"),
    (Role.AUTHORITY, "/atoll.v1.Signing/Serve"),
    *((role, "/atoll.v1.Membership/Renew") for role in Role if role is not Role.AUTHORITY),
}


OWNED = {
    (Role.CLIENT, "/atoll.v1.Coordinator/Session", "its own name"),
    (Role.CLIENT, "/atoll.v1.Coordinator/GetManifest", "the runs that it has joined"),
    (Role.CLIENT, "/atoll.v1.Coordinator/Download", "the runs that it has joined"),
    (Role.CLIENT, "/atoll.v1.Coordinator/Upload", "its own name"),
    (Role.CLIENT, "/atoll.v1.Aggregator/Download", "the runs that it has joined"),
    (Role.CLIENT, "/atoll.v1.Aggregator/Upload", "its own name"),
    (Role.AGGREGATOR, "/atoll.v1.Aggregation/Serve", "its own number"),
    (Role.AGGREGATOR, "/atoll.v1.Aggregation/SubmitUpdate", "its own number"),
    (Role.AGGREGATOR, "/atoll.v1.Aggregation/SubmitPart", "its own number"),
    (Role.AGGREGATOR, "/atoll.v1.Aggregation/GetUpdates", "its own number"),
    (Role.AGGREGATOR, "/atoll.v1.Aggregation/FindUnused", "its own number"),
    (Role.OPERATOR, "/atoll.v1.Admin/Invite", "clients and aggregators"),
    (Role.OPERATOR, "/atoll.v1.Admin/Revoke", "clients and aggregators"),
}
"""The calls in which a caller must keep to its own, written a second time: a rule that forgets it is found."""


def may(role, method):
    """The table of docs/authorisation.md, written a second time and in other words than the code's."""
    name = method.rpartition("/")[2]
    return name in {"Check", "Watch", "GetAuthority", "Enrol"} or name in MAY[role] or (role, method) in BETWEEN_SERVERS


class Members:
    """A register of members, with their runs and the serial numbers that are revoked."""

    def __init__(self):
        self.revoked, self.runs = set(), {"ours"}

    async def refusals(self, callers):
        return [self.refusal(*caller) for caller in callers]

    def refusal(self, peer, run_id):
        if peer.serial in self.revoked:
            return Denied(grpc.StatusCode.UNAUTHENTICATED, f"{peer.identity} is revoked")
        if run_id is not None and peer.identity.role is Role.CLIENT and run_id not in self.runs:
            return Denied(grpc.StatusCode.PERMISSION_DENIED, f"{peer.identity} has not joined {run_id}")
        return None


def manifest(client_id, **optional):
    piece = Piece("w", "F32", (0,), (4,), "0" * 64)
    given = {"pieces": () if "parts" in optional else (piece,), **(optional or {"effective_steps": 2.0})}
    return UpdateManifest("ours", 1, client_id, 0, "1" * 64, 10, 1.0, **given).encode()


def messages(method, *, own):
    """Return a message that a caller may send, about itself or about another one."""
    client, rank, run = ("north", 1, "ours") if own else ("south", 2, "theirs")
    made = {
        pb.ClientMessage: lambda: pb.ClientMessage(hello=pb.Hello(client_id=client)),
        pb.UploadRequest: lambda: pb.UploadRequest(open=pb.UploadOpen(manifest=manifest(client))),
        pb.DownloadRequest: lambda: pb.DownloadRequest(open=pb.DownloadOpen(run_id=run)),
        pb.ManifestRequest: lambda: pb.ManifestRequest(run_id=run),
        pb.RankMessage: lambda: pb.RankMessage(hello=pb.RankHello(rank=rank)),
        pb.SubmittedUpdate: lambda: pb.SubmittedUpdate(opened=pb.UploadOpen(manifest=manifest(client)), rank=rank),
        pb.UpdatesRequest: lambda: pb.UpdatesRequest(rank=rank),
        pb.InviteRequest: lambda: pb.InviteRequest(role="client" if own else "operator"),
        pb.RevokeRequest: lambda: pb.RevokeRequest(role="aggregator" if own else "owner"),
    }
    kind = GetMessageClass(method.input_type)
    return made[kind]() if kind in made else kind()


def add_all(server):
    """Add every method of every service; each answers once for each message that gets that far."""
    for file in (pb, health_pb2, reflection_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            handlers = {method.name: handler_of(method) for method in service.methods}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def handler_of(method):
    reply = GetMessageClass(method.output_type)

    async def one(request, context):
        if method.client_streaming:
            async for _ in request:
                pass
        return reply()

    async def many(request, context):
        if method.client_streaming:
            async for _ in request:
                yield reply()
        else:
            yield reply()

    make = getattr(grpc, f"{_arity(method.client_streaming)}_{_arity(method.server_streaming)}_rpc_method_handler")
    read = GetMessageClass(method.input_type).FromString
    return make(many if method.server_streaming else one, read, reply.SerializeToString)


def _arity(is_streaming):
    return "stream" if is_streaming else "unary"


def calling(channel, path):
    """The call of a method, from its descriptor alone."""
    method = METHODS[path]
    make = getattr(channel, f"{_arity(method.client_streaming)}_{_arity(method.server_streaming)}")
    return make(path, lambda message: message.SerializeToString(), GetMessageClass(method.output_type).FromString)


async def outcome(channel, path, *, own=True, sent=None):
    """The status code of one call, and what it says."""
    method = METHODS[path]
    call, sent = calling(channel, path), sent or messages(METHODS[path], own=own)

    async def requests():
        yield sent

    called = call(requests() if method.client_streaming else sent, timeout=BOUND_S)
    status, raised = first_status(called), None
    try:
        if method.server_streaming:
            async for _ in called:
                pass
        else:
            await called
    except grpc.aio.AioRpcError as error:
        raised = error.code(), error.details()
    # Of a call with one reply to many messages grpc.aio's own INTERNAL may come first, and the server's status then.
    return raised if (await status).detail == "Internal error from Core" else await status


def test_every_method_has_its_row_and_every_row_its_method():
    assert set(RULES) == set(METHODS)


def test_every_rule_keeps_a_caller_to_its_own_where_it_should_and_nowhere_else():
    ruled = {
        (role, path, touches.value)
        for path, rule in RULES.items()
        for role, touches in rule.roles.items()
        if touches is not Touches.NOTHING
    }
    assert ruled == OWNED


@live
async def test_a_role_calls_what_it_may_for_its_own_and_nothing_else():
    async with listening(add_all, Guard(Members())) as address:
        for role, caller in MEMBERS.items():
            async with caller.channel(address) as channel:
                for path in METHODS:
                    code, detail = await outcome(channel, path)
                    if may(role, path):
                        assert code is grpc.StatusCode.OK, (role, path, detail)
                        continue
                    assert code is grpc.StatusCode.PERMISSION_DENIED, (role, path, detail)
                    assert detail.startswith(f"{caller.identity} may not call {path[1:]}: it takes the role "), detail


@live
async def test_nobody_touches_what_is_somebody_elses():
    assert {path for _, path, _ in OWNED} <= set(METHODS)
    async with listening(add_all, Guard(Members())) as address:
        for role, path, _ in sorted(OWNED):
            async with MEMBERS[role].channel(address) as channel:
                code, detail = await outcome(channel, path, own=False)
                assert code is grpc.StatusCode.PERMISSION_DENIED, (role, path)
                assert str(MEMBERS[role].identity) in detail
                assert any(name in detail for name in ("'south'", "'2'", "theirs", "'operator'", "'owner'")), detail


@live
async def test_a_call_that_does_not_begin_by_saying_what_it_touches_is_refused():
    async with listening(add_all, Guard(Members())) as address:
        for role, path, begun in (
            (Role.CLIENT, "/atoll.v1.Coordinator/Session", pb.ClientMessage(heartbeat=pb.Heartbeat())),
            (Role.CLIENT, "/atoll.v1.Coordinator/Upload", pb.UploadRequest(chunk=pb.Chunk(data=b"x"))),
            (Role.CLIENT, "/atoll.v1.Aggregator/Download", pb.DownloadRequest(credit=1)),
            (Role.AGGREGATOR, "/atoll.v1.Aggregation/Serve", pb.RankMessage(status=pb.RankStatus())),
            (Role.AGGREGATOR, "/atoll.v1.Aggregation/SubmitUpdate", pb.SubmittedUpdate(rank=1)),
            (Role.AGGREGATOR, "/atoll.v1.Aggregation/SubmitPart", pb.SubmittedUpdate(rank=1)),
        ):
            async with MEMBERS[role].channel(address) as channel:
                code, detail = await outcome(channel, path, sent=begun)
                assert code is grpc.StatusCode.PERMISSION_DENIED, path
                assert detail.endswith(", and named nothing")


@live
async def test_without_a_members_certificate_only_health_answers():
    async with listening(add_all, Guard(Members()), asks_for_certificates=False) as address:
        async with nameless().channel(address) as channel:
            for path, rule in RULES.items():
                code, _ = await outcome(channel, path)
                assert code is (grpc.StatusCode.OK if rule.is_open else grpc.StatusCode.UNAUTHENTICATED), path


def nameless():
    """Return a caller without a certificate."""
    stranger = Member(MEMBERS[Role.CLIENT].identity)
    stranger.pair = (None, None)
    return stranger


@asynccontextmanager
async def talking(guard):
    """An open stream of the client north, past its Hello."""
    async with listening(add_all, guard) as address, MEMBERS[Role.CLIENT].channel(address) as channel:
        call = calling(channel, "/atoll.v1.Coordinator/Session")(timeout=BOUND_S)
        await call.write(messages(METHODS["/atoll.v1.Coordinator/Session"], own=True))
        assert await call.read() == pb.ServerMessage()
        yield call, channel


async def end_of(call):
    """Return the status of an open call that ends from now on."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), caught.value.details()


@live
async def test_who_is_revoked_loses_its_open_streams_and_begins_none():
    members = Members()
    async with talking(Guard(members)) as (call, channel):
        members.revoked.add(MEMBERS[Role.CLIENT].serial)
        # nobody tells the guard: it looks again by itself
        assert await end_of(call) == (grpc.StatusCode.UNAUTHENTICATED, "client north is revoked")
        code, _ = await outcome(channel, "/atoll.v1.Coordinator/GetManifest")
        assert code is grpc.StatusCode.UNAUTHENTICATED


@live
async def test_a_certificate_that_has_run_out_begins_no_call_on_an_older_connection(monkeypatch):
    async with talking(Guard(Members())) as (call, channel):
        later = MEMBERS[Role.CLIENT].certificate.not_valid_after_utc.timestamp()
        monkeypatch.setattr(guard_module.time, "time", lambda: later)
        code, detail = await outcome(channel, "/atoll.v1.Coordinator/GetManifest")
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "client north has expired" in detail
        await call.write(messages(METHODS["/atoll.v1.Coordinator/Session"], own=True))
        assert await call.read() == pb.ServerMessage()  # what is open goes on


@live
async def test_who_leaves_a_run_loses_its_downloads_of_it():
    members, guard = Members(), None
    guard = Guard(members)
    path = "/atoll.v1.Coordinator/Download"
    async with listening(add_all, guard) as address, MEMBERS[Role.CLIENT].channel(address) as channel:
        call = calling(channel, path)(timeout=BOUND_S)
        await call.write(messages(METHODS[path], own=True))
        await call.read()
        members.runs.clear()
        await guard.look_again()
        assert (await end_of(call))[0] is grpc.StatusCode.PERMISSION_DENIED


@live
async def test_who_is_refused_while_a_reply_waits_to_be_taken_is_told_so():
    members, path = Members(), "/atoll.v1.Coordinator/Download"
    guard = Guard(members)

    async def download(requests, context):
        await anext(requests)
        while True:
            yield pb.DownloadReply(data=bytes(1 << 20))

    def add(server):
        read, write = pb.DownloadRequest.FromString, pb.DownloadReply.SerializeToString
        handlers = {"Download": grpc.stream_stream_rpc_method_handler(download, read, write)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("atoll.v1.Coordinator", handlers),))

    async with listening(add, guard) as address, MEMBERS[Role.CLIENT].channel(address) as channel:
        call = calling(channel, path)(timeout=BOUND_S)
        await call.write(messages(METHODS[path], own=True))
        await call.read()
        await asyncio.sleep(0.3)  # the connection is full
        members.runs.clear()
        await guard.look_again()
        with suppress(grpc.aio.AioRpcError):
            while True:
                await call.read()
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


@live
async def test_a_later_message_is_looked_at_too():
    async with talking(Guard(Members())) as (call, _):
        await call.write(messages(METHODS["/atoll.v1.Coordinator/Session"], own=False))
        assert (await end_of(call))[0] is grpc.StatusCode.PERMISSION_DENIED


SESSION = "/atoll.v1.Coordinator/Session"


async def session_read_beside(requests, context):
    """Serve as the control stream does: another task than the handler's reads it, and swallows what grpc raises."""

    async def read():
        async for _ in requests:
            pass

    await anext(requests)
    reading = asyncio.ensure_future(read())
    try:
        yield pb.ServerMessage()
        await asyncio.get_running_loop().create_future()
    finally:
        reading.cancel()


def add_session_read_beside(server):
    handler = grpc.stream_stream_rpc_method_handler(
        session_read_beside, pb.ClientMessage.FromString, pb.ServerMessage.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("atoll.v1.Coordinator", {"Session": handler}),)
    )


@asynccontextmanager
async def reading_beside():
    """A channel of a client to such a control stream."""
    guard = Guard(Members())
    async with listening(add_session_read_beside, guard) as address, MEMBERS[Role.CLIENT].channel(address) as channel:
        yield channel


@live
async def test_also_when_another_task_than_the_handlers_reads_it():
    async with reading_beside() as channel:
        call = calling(channel, SESSION)(timeout=BOUND_S)
        await call.write(messages(METHODS[SESSION], own=True))
        await call.read()
        await call.write(messages(METHODS[SESSION], own=False))
        assert (await end_of(call))[0] is grpc.StatusCode.PERMISSION_DENIED


@live
async def test_a_call_that_is_refused_while_its_first_reply_is_written_is_told_so():
    """gRPC cannot end a call of which it does not know that it has begun: before, one in some hundred hung."""
    async with reading_beside() as channel:
        for _ in range(200):
            call = calling(channel, SESSION)(timeout=BOUND_S)
            ending = first_status(call)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(messages(METHODS[SESSION], own=True))
                await call.write(messages(METHODS[SESSION], own=False))
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert (await ending).code is grpc.StatusCode.PERMISSION_DENIED


@live
async def test_an_insecure_server_takes_everybody_at_their_word():
    server = grpc.aio.server(interceptors=[Guard(None)])
    add_all(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for path in METHODS:
            assert (await outcome(channel, path, own=False))[0] is grpc.StatusCode.OK, path
    await server.stop(0)


@live
async def test_a_method_that_no_server_has_is_said_to_be_unknown():
    async with listening(lambda server: None, Guard(Members())) as address:
        async with MEMBERS[Role.OWNER].channel(address) as channel:
            assert (await outcome(channel, "/atoll.v1.Admin/StopRun"))[0] is grpc.StatusCode.UNIMPLEMENTED


@live
async def test_a_method_without_a_row_is_denied(monkeypatch):
    monkeypatch.setattr(guard_module, "RULES", {path: RULES[path] for path in RULES if "ListRanks" not in path})
    async with listening(add_all, Guard(Members())) as address, MEMBERS[Role.OWNER].channel(address) as channel:
        code, detail = await outcome(channel, "/atoll.v1.Admin/ListRanks")
        assert (code, detail) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "owner ada may not call atoll.v1.Admin/ListRanks: no rule allows it, for any role",
        )


@pytest.mark.parametrize("spoilt", [b"", b"{}", manifest("north")[1:], manifest("no\\rth"), b" " + manifest("north")])
def test_what_does_not_begin_as_a_manifest_names_nobody(spoilt):
    assert client_of(spoilt) == ""


def test_a_manifest_names_its_client_at_its_head():
    assert client_of(manifest("north")) == "north"
    assert client_of(manifest("north").replace(b'"effective_steps":2.0,', b"")) == "north"


OPTIONAL = {"normalizer": 2.0, "effective_steps": 2.0, "parts": (Part(4, 4, "2" * 64),), "attempt": 7}


def test_a_manifest_names_its_client_whatever_else_it_has():
    """A new key that sorts before the client's name would refuse every upload that has it."""
    assert OPTIONAL.keys() == {each.name for each in fields(UpdateManifest) if each.default is not MISSING}
    for count in range(len(OPTIONAL) + 1):
        for names in combinations(OPTIONAL, count):
            made = manifest("north", **({name: OPTIONAL[name] for name in names} or {"attempt": 0}))
            assert client_of(made) == parse_update(made).client_id == "north"


@given(st.integers(0, 400), st.binary(max_size=3), st.integers(0, 4), st.sampled_from([{}, {"attempt": 2}]))
def test_what_is_parsed_later_names_whom_the_guard_has_seen_and_no_other(start, put, left_out, optional):
    spoilt = bytearray(manifest("north", **optional))
    spoilt[start : start + left_out] = put
    try:
        parsed = parse_update(bytes(spoilt))
    except ManifestError:
        return
    assert client_of(bytes(spoilt)) in ("", parsed.client_id)


@given(st.text(min_size=1, max_size=20).filter(str.isprintable))
def test_a_name_that_no_certificate_has_is_read_rightly_or_not_at_all(name):
    encoded = manifest(name)
    assert client_of(encoded) in ("", parse_update(encoded).client_id)
    assert client_of(encoded) == name or not is_name(name)
