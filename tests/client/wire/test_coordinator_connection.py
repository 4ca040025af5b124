"""The log of an agent that gets no connection: the reason, once for each cause in a row."""

import asyncio
import time

import grpc
import pytest

from atoll.client.wire.coordinator_connection import ConnectionHandlers, CoordinatorConnection, cause_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.certificates import Issuer
from atoll.protocol.identity.dialer import InsecureDialer, MutualDialer
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.wire.stream import StreamBroken
from benchmarks.processes import free_address
from tests.client.fake_coordinator import Lagoon, live, until
from tests.server.identity.secure import MAIN, Member

FAILED = "failed to connect to all addresses; last error: "
SSL = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
TLS = (
    f"{FAILED}UNKNOWN: ipv4:127.0.0.1:44941: {SSL}CERTIFICATE_VERIFY_FAILED: unable to get local issuer "
    "certificate: OK",
    f"{FAILED}UNKNOWN: ipv4:127.0.0.1:37145: {SSL}WRONG_VERSION_NUMBER: Invalid certificate verification context: OK",
    f"{FAILED}UNKNOWN: ipv4:127.0.0.1:44941: Custom verification check failed with error: UNAUTHENTICATED: Hostname "
    "Verification Check failed.",
)
AWAY = (
    f"{FAILED}UNKNOWN: ipv4:127.0.0.1:44941: Failed to connect to remote host: Connection refused",
    f"{FAILED}UNAVAILABLE: ipv4:127.0.0.1:33675: Handshake read failed (Socket closed)",
    f"{FAILED}UNAVAILABLE: ipv4:127.0.0.1:33675: Handshake read failed (recvmsg:Connection reset by peer (104))",
    "errors resolving nowhere.invalid:1234: [field:hostname lookup error:address lookup failed for "
    "nowhere.invalid:1234: Domain name not found]",
    "Socket closed",
)


@pytest.mark.parametrize("details", [TLS, AWAY], ids=["TLS", "away"])
def test_what_fails_alike_has_one_cause_whatever_its_detail_names(details):
    (cause,) = {cause_of(StreamBroken(grpc.StatusCode.UNAVAILABLE, detail)) for detail in details}
    assert cause == ("TLS" if details is TLS else "UNAVAILABLE")


def test_the_cause_of_a_refusal_is_its_code_also_when_it_quotes_grpc():
    assert cause_of(StreamBroken(grpc.StatusCode.FAILED_PRECONDITION, TLS[0])) == "FAILED_PRECONDITION"


class Holder:
    """A keeper of a credential that is never renewed."""

    def __init__(self, member):
        self.current = member.credential


class Dialling:
    """A connection that dials again at once; `count` is the number of times that it did."""

    def __init__(self, address, dialer):
        self.count = 0
        handlers = ConnectionHandlers(
            hello=pb.Hello, on_connected=lambda _: None, on_message=lambda _: None, on_lost=self._again
        )
        self._connection = CoordinatorConnection(
            address, dialer, handlers, displaced_wait=1.0, spawn=asyncio.ensure_future, verifier=None
        )

    def _again(self):
        self.count += 1
        self._connection.dial(0.01)

    async def __aenter__(self):
        self._connection.dial(0.0)
        return self

    async def __aexit__(self, *_):
        await self._connection.hang_up()

    async def times(self, count):
        await until(lambda until_count=self.count + count: self.count >= until_count)


@pytest.mark.real
@live
async def test_an_untrusted_certificate_is_named_also_after_an_outage(caplog):
    stranger = Member(Identity(Role.CLIENT, "north"), Issuer.create("another", now=time.time()))
    address = free_address()
    server, own = grpc.aio.server(), Member(MAIN)
    rpc.add_servicer(Lagoon(), server, "Coordinator")
    async with Dialling(address, MutualDialer(Holder(stranger))) as line:
        await line.times(3)
        server.add_secure_port(address, grpc.ssl_server_credentials([own.pair], own.roots, True))
        await server.start()
        await line.times(5)
        await server.stop(0)
    assert caplog.text.count("Connection refused") == 1
    assert caplog.text.count("CERTIFICATE_VERIFY_FAILED") == 1


@pytest.mark.real
@live
@pytest.mark.parametrize("is_tls", [True, False], ids=["insecure agent", "insecure coordinator"])
async def test_one_side_without_tls_is_named_with_the_way_out(caplog, is_tls):
    server, own = grpc.aio.server(), Member(MAIN)
    rpc.add_servicer(Lagoon(), server, "Coordinator")
    if is_tls:
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([own.pair], own.roots, True))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    dialer = InsecureDialer() if is_tls else MutualDialer(Holder(Member(Identity(Role.CLIENT, "north"))))
    async with Dialling(f"127.0.0.1:{port}", dialer) as line:
        await line.times(3)
    await server.stop(0)
    told = {
        True: "wants certificates, and this end is --insecure: enrol it with a join code, and leave --insecure out",
        False: "speaks no TLS, and this end wants certificates: leave --insecure out at a coordinator there",
    }[is_tls]
    assert caplog.text.count(f"no connection to 127.0.0.1:{port}: 127.0.0.1:{port} {told}") == 1
