"""An authority on another machine: a server that dials in, over a real port, and what it does not sign."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.certificates import CertificateError, consent, make_request, new_key, read_leaf, vouched
from atoll.protocol.identity.names import COORDINATOR, Identity, Role
from atoll.protocol.identity.proxy import HttpProxy
from atoll.protocol.wire.stream import StreamBroken
from atoll.server.identity import authority_server, remote_signer
from atoll.server.identity.admission import Admission
from atoll.server.identity.authority import Authority, AuthorityAway, NotSigned, Renewal
from atoll.server.identity.authority_server import LOG, AuthorityServer
from atoll.server.identity.guard import Guard
from atoll.server.identity.remote_signer import RemoteSigner, SigningService
from tests.client.connect_proxy import connect_proxy
from tests.client.fake_coordinator import live, until

NORTH, ANN = Identity(Role.CLIENT, "north"), Identity(Role.OWNER, "ann")


@asynccontextmanager
async def listening(authority: Authority, signer: RemoteSigner) -> AsyncIterator[str]:
    mine = authority.credential(COORDINATOR)
    server = grpc.aio.server(interceptors=[Guard(Admission(lambda *_: False, lambda *_: True))])
    rpc.add_servicer(SigningService(signer), server, "Signing")
    secret = grpc.ssl_server_credentials([(mine.key_pem, mine.certificate_pem)], mine.ca_pem, True)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', secret)}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


def renewal(authority: Authority, identity: Identity, request: bytes) -> Renewal:
    older = authority.credential(identity)
    return Renewal(older.certificate_pem, consent(older.key, request))


@pytest.mark.real
@live
async def test_an_authority_server_elsewhere_signs_over_the_stream_that_it_opens(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "test")
    signer = RemoteSigner(authority.ca_pem)
    async with listening(authority, signer) as address:
        serving = asyncio.create_task(AuthorityServer(authority, tmp_path).serve(address))
        pems = await asyncio.gather(*(signer.sign(make_request(new_key()), NORTH) for _ in range(20)))
        assert len({read_leaf(pem).serial for pem in pems}) == 20
        request = make_request(new_key())
        renewed = await signer.sign(request, ANN, renewal(authority, ANN, request))
        assert read_leaf(renewed).identity == ANN
        with pytest.raises(NotSigned, match="owner ann gets its first certificate by hand"):
            await signer.sign(make_request(new_key()), ANN)
        serving.cancel()
    entries = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [entry["why"] for entry in entries] == ["by itself"] * 20 + ["renewal"]


@pytest.mark.real
@live
async def test_a_next_authority_elsewhere_is_trusted_on_the_word_of_the_present_one_alone(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "test")
    signer, first = RemoteSigner(authority.ca_pem), authority.ca_pem
    following = authority.prepare_next(tmp_path, "next")
    authority = Authority.open(tmp_path, begins=True)
    async with listening(authority, signer) as address:
        serving = asyncio.create_task(AuthorityServer(authority, tmp_path).serve(address))
        await signer.sign(make_request(new_key()), NORTH)
        assert signer.ca_pem == first + following
        assert vouched(signer.ca_pem, signer.cross_pem, first) == signer.ca_pem, "as a member sees it"
        assert authority.succession is not None
        authority.succession = replace(authority.succession, cross_pem=b"")  # it names one, and vouches for none
        signer.ca_pem = first
        await signer.sign(make_request(new_key()), NORTH)
        assert signer.ca_pem == first
        serving.cancel()


@pytest.mark.real
@live
async def test_two_authority_servers_wait_for_each_other_ever_longer_and_both_sides_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(authority_server, "RECONNECT_S", (0.01, 0.02))
    authority = Authority.create(tmp_path, "test")
    signer = RemoteSigner(authority.ca_pem)
    async with listening(authority, signer) as address:
        both = [asyncio.create_task(AuthorityServer(authority, tmp_path).serve(address)) for _ in range(2)]
        await until(lambda: "authority main may be used twice: its connection from 127.0.0.1:" in caplog.text)
        replaced = f"another authority serves {address}: replaced by a newer stream of an authority, from 127.0.0.1:"
        await until(lambda: replaced in caplog.text)
        assert read_leaf(await signer.sign(make_request(new_key()), NORTH)).identity == NORTH
        for serving in both:
            serving.cancel()


@pytest.mark.real
@live
async def test_an_authority_server_behind_a_proxy_dials_over_it(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "test")
    signer = RemoteSigner(authority.ca_pem)
    async with listening(authority, signer) as address, connect_proxy(int(address.rpartition(":")[2])) as way_out:
        proxy = HttpProxy.of({"HTTPS_PROXY": f"http://{way_out.address}"})
        serving = asyncio.create_task(AuthorityServer(authority, tmp_path, proxy).serve("atoll.example:7070"))
        assert read_leaf(await signer.sign(make_request(new_key()), NORTH)).identity == NORTH
        serving.cancel()
        assert [line["to"] for line in way_out.lines if "to" in line] == ["atoll.example:7070"]


@pytest.mark.real
@live
async def test_an_authority_server_that_was_welcomed_reconnects_at_once_and_logs_each_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority, waits = Authority.create(tmp_path, "test"), list[float]()
    sleep = asyncio.sleep

    async def waiting(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    class Cut:
        """A coordinator that is there at every fifth try, and cuts the line at once."""

        def __init__(self, call: object) -> None:
            self.orders = [pb.SignOrder()] if len(waits) % 5 == 4 else []

        async def read(self) -> pb.SignOrder:
            if not self.orders:
                raise StreamBroken(grpc.StatusCode.UNAVAILABLE, "away")
            return self.orders.pop()

    monkeypatch.setattr(authority_server, "Stream", Cut)
    serving = asyncio.create_task(AuthorityServer(authority, tmp_path).serve("127.0.0.1:1"))
    monkeypatch.setattr(asyncio, "sleep", waiting)
    while len(waits) < 15:
        await sleep(0.01)
    serving.cancel()
    steps = [0.5, 1.0, 2.0, 4.0, 0.5, 1.0, 2.0, 4.0, 5.0, 0.5]
    assert all(step / 2 <= wait <= step for step, wait in zip(steps, waits, strict=False)), waits
    assert caplog.text.count("no connection to 127.0.0.1:1") == 1 + len(waits) // 5
    assert authority_server.RECONNECT_S[1] < remote_signer.PATIENCE_S  # a coordinator starts its ranks meanwhile


@live
async def test_while_it_is_away_nobody_waits_for_ever_and_nothing_is_kept(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "test")
    signer = RemoteSigner(authority.ca_pem, patience_s=0.05)
    with pytest.raises(AuthorityAway, match="does not answer"):
        await signer.sign(make_request(new_key()), NORTH)
    line = signer.connect()
    with pytest.raises(AuthorityAway, match="does not answer"):  # it is here, and silent
        await signer.sign(make_request(new_key()), NORTH)
    assert line.pending == {}
    assert signer._num_waiting == 0


@live
async def test_an_order_to_a_stream_that_is_replaced_goes_to_the_newer_one(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "test")
    signer = RemoteSigner(authority.ca_pem)
    older = signer.connect()
    waiting = asyncio.create_task(signer.sign(make_request(new_key()), NORTH))
    assert await older.outbox.get() is not None
    newer = signer.connect()
    order = await newer.outbox.get()
    assert order is not None
    signer.answered(newer, AuthorityServer(authority, tmp_path).answer(order))
    assert read_leaf(await waiting).identity == NORTH
    assert older.pending == newer.pending == {}


@live
async def test_whoever_waits_for_one_that_goes_is_told(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "test")
    signer = RemoteSigner(authority.ca_pem)
    line = signer.connect()
    waiting = asyncio.create_task(signer.sign(make_request(new_key()), NORTH))
    order = await line.outbox.get()
    assert order is not None
    signer.disconnect(line)
    with pytest.raises(AuthorityAway, match="went away before it had signed"):
        await waiting
    newer = signer.connect()
    again = asyncio.create_task(signer.sign(order.request, NORTH))
    order = await newer.outbox.get()
    assert order is not None
    signer.answered(newer, AuthorityServer(authority, tmp_path).answer(order))
    assert read_leaf(await again).identity == NORTH


@live
async def test_waiting_signatures_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_signer, "PENDING_MAX", 1)
    authority = Authority.create(tmp_path, "test")
    signer = RemoteSigner(authority.ca_pem)
    first = asyncio.create_task(signer.sign(make_request(new_key()), NORTH))
    await asyncio.sleep(0)
    with pytest.raises(AuthorityAway, match="signatures are waiting for the authority"):
        await signer.sign(make_request(new_key()), NORTH)
    first.cancel()
    await asyncio.wait({first})
    assert signer._num_waiting == 0


@live
async def test_an_answer_that_does_not_fit_is_no_certificate(tmp_path: Path) -> None:
    authority, other = Authority.create(tmp_path / "a", "test"), Authority.create(tmp_path / "b", "test")
    signer, request = RemoteSigner(authority.ca_pem), make_request(new_key())
    line = signer.connect()
    wrong = (
        other.issue(request, NORTH),
        authority.issue(make_request(new_key()), NORTH),
        authority.issue(request, ANN),
    )
    for pem in wrong:
        asking = asyncio.create_task(signer.sign(request, NORTH))
        order = await line.outbox.get()
        assert order is not None
        signer.answered(line, pb.SignAnswer(number=order.number, certificate_pem=pem))
        with pytest.raises(NotSigned, match="has answered with another certificate"):
            await asking


def test_an_authority_server_signs_for_sites_and_renews_on_the_older_keys_word_alone(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "test")
    keeper, request = AuthorityServer(authority, tmp_path), make_request(new_key())
    for role in (Role.OWNER, Role.OPERATOR, Role.AUDITOR, Role.COORDINATOR, Role.AUTHORITY):
        with pytest.raises(NotSigned, match="by hand"):
            keeper.sign(request, Identity(role, "main"), None)
        assert read_leaf(
            keeper.sign(request, Identity(role, "main"), renewal(authority, Identity(role, "main"), request))
        )
    with pytest.raises(NotSigned, match="client north asks to become owner ann"):
        keeper.sign(request, ANN, renewal(authority, NORTH, request))
    stolen = Renewal(authority.credential(ANN).certificate_pem, consent(new_key(), request))
    with pytest.raises(CertificateError, match="not signed by the key of the older certificate"):
        keeper.sign(request, ANN, stolen)
    foreign = Authority.create(tmp_path / "foreign", "test")
    with pytest.raises(CertificateError, match="not signed by this authority"):
        keeper.sign(request, ANN, renewal(foreign, ANN, request))


def test_an_authority_server_renews_nothing_that_has_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority.create(tmp_path, "test", lifetime_s=10)
    keeper, request = AuthorityServer(authority, tmp_path), make_request(new_key())
    old = renewal(authority, NORTH, request)
    later = read_leaf(old.certificate_pem).expires_at + 1
    monkeypatch.setattr("time.time", lambda: later)
    with pytest.raises(NotSigned, match="has expired"):
        keeper.sign(request, NORTH, old)
