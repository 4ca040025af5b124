"""The endpoint of metrics: who may read, and how much of a process a reader gets."""

import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.registry import Collector

from atoll.protocol.identity.credential import AUTHORITIES, CERTIFICATE, KEY
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import COORDINATOR, Identity, Role
from atoll.server.identity.authority import Authority
from atoll.server.identity.readers import Readers
from atoll.telemetry.endpoint import CALLS_MAX, Endpoint
from tests.cli.federation import wait_for
from tests.waiting import BOUND_S


@pytest.fixture(name="registry")
def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("answer", "The answer", registry=registry).set(42)
    return registry


@pytest.fixture(name="endpoint")
def _endpoint(registry: CollectorRegistry) -> Iterator[Endpoint]:
    endpoint = Endpoint("127.0.0.1:0")
    endpoint.serve(registry, None)
    yield endpoint
    endpoint.close()


def asked(
    endpoint: Endpoint,
    path: str = "/metrics",
    method: str = "GET",
    context: ssl.SSLContext | None = None,
    **headers: str,
) -> tuple[int, str]:
    """Return status and text of one request."""
    host, _, port = endpoint.address.rpartition(":")
    if context is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=BOUND_S)
    else:
        connection = http.client.HTTPSConnection(host, int(port), timeout=BOUND_S, context=context)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_everyone_on_this_machine_may_read_and_read_alone(endpoint: Endpoint) -> None:
    status, text = asked(endpoint)
    assert (status, "answer 42.0" in text) == (200, True)
    assert asked(endpoint, "/metrics?name[]=answer")[0] == 200
    assert asked(endpoint, "/") == (404, "the metrics are at /metrics\n")
    assert {asked(endpoint, method=method)[0] for method in ("POST", "PUT", "DELETE", "OPTIONS")} == {501}


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9464", "127.0.0.1.evil.example", "10.0.0.1", "", "["])
def test_a_name_of_elsewhere_is_refused(endpoint: Endpoint, host: str) -> None:
    assert asked(endpoint, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]:9464", "127.0.0.9:1"])
def test_a_name_of_this_machine_is_answered(endpoint: Endpoint, host: str) -> None:
    assert asked(endpoint, Host=host)[0] == 200


def test_silent_connections_are_bounded_and_the_port_is_free_after_the_end(registry: CollectorRegistry) -> None:
    endpoint = Endpoint("127.0.0.1:0")
    endpoint.serve(registry, None)
    host, _, port = endpoint.address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=BOUND_S) for _ in range(CALLS_MAX)]
    until = time.monotonic() + BOUND_S
    while True:  # all places are taken as soon as a further connection is closed without an answer
        try:
            answered = asked(endpoint)[0]
        except (http.client.RemoteDisconnected, ConnectionError):
            break
        assert (answered, time.monotonic() < until) == (200, True)
    for one in silent:
        one.close()
    while True:
        try:
            assert asked(endpoint)[0] == 200
            break
        except (http.client.RemoteDisconnected, ConnectionError):
            assert time.monotonic() < until
    endpoint.close()
    Endpoint(endpoint.address).close()


def test_a_fault_of_ours_is_logged_and_ends_no_later_scrape(
    endpoint: Endpoint, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Collector):
        def collect(self) -> Iterator[Metric]:
            raise ValueError("a planted fault")

        def describe(self) -> Iterator[Metric]:
            yield from ()

    faulty = Faulty()
    registry.register(faulty)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        asked(endpoint)
    wait_for(lambda: "a planted fault" in caplog.text)
    registry.unregister(faulty)
    assert asked(endpoint)[0] == 200


class Members:
    """An authority, the endpoint of its coordinator, and a context for each member."""

    def __init__(self, folder: Path, registry: CollectorRegistry) -> None:
        self.folder, self.revoked = folder, set[str]()
        self.authority = Authority.open_or_create(folder / "authority", "test", 1e6)
        self.authority.credential(COORDINATOR).store(folder / "coordinator")
        self.endpoint = Endpoint("127.0.0.1:0")
        keeper = Keeper(folder / "coordinator")
        self.endpoint.serve(registry, Readers(keeper, lambda identity, serial: identity.name in self.revoked))

    def context(self, role: Role, name: str, authority: Authority | None = None) -> ssl.SSLContext:
        place = self.folder / f"{role}-{name}"
        (authority or self.authority).credential(Identity(role, name)).store(place)
        context = ssl.create_default_context(cafile=str(self.folder / "coordinator" / AUTHORITIES))
        context.check_hostname = False  # a scrape names it: `server_name` of the certificate
        context.load_cert_chain(place / CERTIFICATE, place / KEY)
        return context


@pytest.fixture(name="members")
def _members(tmp_path: Path, registry: CollectorRegistry) -> Iterator[Members]:
    members = Members(tmp_path, registry)
    yield members
    members.endpoint.close()


@pytest.mark.parametrize("role", [Role.OWNER, Role.OPERATOR, Role.AUDITOR])
def test_a_member_that_may_look_may_read_until_it_is_revoked(members: Members, role: Role) -> None:
    context = members.context(role, "ann")
    assert asked(members.endpoint, context=context, Host="fl.example.org:9464")[0] == 200
    members.revoked.add("ann")
    assert asked(members.endpoint, context=context) == (403, f"the certificate of {role} ann is revoked\n")


def test_a_client_a_stranger_and_a_caller_without_a_certificate_may_not(members: Members, tmp_path: Path) -> None:
    status, text = asked(members.endpoint, context=members.context(Role.CLIENT, "north"))
    assert (status, text) == (403, "client north may not read here; allowed: owner, operator, auditor\n")
    stranger = Authority.open_or_create(tmp_path / "elsewhere", "elsewhere", 1e6)
    nobody = ssl.create_default_context(cafile=str(tmp_path / "coordinator" / AUTHORITIES))
    nobody.check_hostname = False
    for context in (members.context(Role.OWNER, "eve", stranger), nobody):
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            asked(members.endpoint, context=context)
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        asked(members.endpoint)  # without TLS


def test_a_renewed_certificate_is_shown_without_a_restart(members: Members) -> None:
    context = members.context(Role.AUDITOR, "bob")
    assert asked(members.endpoint, context=context)[0] == 200
    readers = members.endpoint._server.readers
    assert readers is not None
    readers._keeper.replace(members.authority.credential(COORDINATOR))
    host, _, port = members.endpoint.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=BOUND_S) as plain:
        with context.wrap_socket(plain) as shown:
            shown_pem = ssl.DER_cert_to_PEM_cert(shown.getpeercert(binary_form=True) or b"")
    assert shown_pem.encode().strip() in readers._keeper.current.certificate_pem
