"""The pages on other interfaces: TLS, with a client certificate of a role that may look, until it is revoked."""

import asyncio
import http.client
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.dashboard import process
from atoll.dashboard.access import CertificateDoor
from atoll.dashboard.app import Dashboard
from atoll.dashboard.process import _config, _Server
from atoll.dashboard.sources import only_state, sources
from atoll.interface.errors import AtollError
from atoll.interface.places import readers_of
from atoll.protocol.identity.credential import AUTHORITIES, CERTIFICATE, KEY
from atoll.protocol.identity.names import COORDINATOR, Identity, Role
from atoll.server.identity.authority import Authority
from atoll.server.identity.register import Register
from atoll.server.identity.setup import MINE, identity_folder
from atoll.server.journal.state_directory import StateDirectory
from tests.cli.federation import wait_for
from tests.cli.invoking import refused
from tests.server.views.test_history import IN_ROUND_4, write_history
from tests.waiting import BOUND_S

NAME = "main.coordinator.atoll.internal"
REVOKED = "the certificate of operator olga is revoked\n"


class Served:
    """A dashboard of a state directory with TLS, and its members."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.connections: list[http.client.HTTPConnection] = []
        self.authority = Authority.open_or_create(folder / "authority", "test", 1e6)
        with StateDirectory.open(self.state) as state:
            write_history(state, IN_ROUND_4)
            Register(state.database)
        self.authority.credential(COORDINATOR).store(self.identity)
        self.readers = readers_of(self.state)
        app = Dashboard(sources([str(self.state)])).app(CertificateDoor(self.readers, "0.0.0.0"))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        ready = threading.Event()
        self.server = _Server(_config(app, self.readers), ready.set)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self.socket])))
        self.thread.start()
        assert ready.wait(BOUND_S)

    @property
    def identity(self) -> Path:
        return identity_folder(self.state) / MINE

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.server.end()
        self.thread.join(BOUND_S)
        self.socket.close()

    def context(self, role: Role | None, name: str = "olga", authority: Authority | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.identity / AUTHORITIES))
        context.check_hostname = False
        if role is not None:
            place = self.folder / f"{role}-{name}"
            (authority or self.authority).credential(Identity(role, name)).store(place)
            context.load_cert_chain(place / CERTIFICATE, place / KEY)
        return context

    def connection(self, role: Role, name: str = "olga") -> http.client.HTTPConnection:
        return self.dialled(self.context(role, name))

    def dialled(self, context: ssl.SSLContext | None) -> http.client.HTTPConnection:
        """A connection, by TLS or without, that is closed at the end."""
        where = {"host": "127.0.0.1", "port": self.port, "timeout": BOUND_S}
        found = (
            http.client.HTTPConnection(**where)  # type: ignore[arg-type]
            if context is None
            else http.client.HTTPSConnection(**where, context=context)  # type: ignore[arg-type]
        )
        self.connections.append(found)
        return found

    def revoke(self, identity: Identity) -> None:
        with StateDirectory.open(self.state) as state:
            Register(state.database).revoke(identity, now=time.time())


def asked(
    connection: http.client.HTTPConnection, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, str]:
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("tls"))
    yield found
    found.close()


@pytest.mark.real
@pytest.mark.parametrize("role", [Role.OWNER, Role.OPERATOR, Role.AUDITOR])
def test_a_member_that_may_look_sees_the_pages_by_each_name_of_the_listener(served: Served, role: Role) -> None:
    connection = served.connection(role, "ann")
    assert "r</bdi>" in asked(connection)[1]
    for host in (f"{NAME}:{served.port}", NAME, "127.0.0.1", "[::1]:7", "localhost:1", NAME.upper()):
        assert asked(connection, Host=host)[0] == 200, host
    for host in ("evil.example", f"evil.{NAME}", f"{NAME}.evil.example", "[evil]", "", "127.0.0.1.evil.example"):
        assert asked(connection, Host=host)[0] == 403, host
    own = f"127.0.0.1:{served.port}"
    assert asked(connection, origin=f"https://{own}")[0] == 200
    for origin in ("https://evil.example", f"http://{own}", "null"):
        assert asked(connection, origin=origin)[0] == 403, origin
    for method in ("POST", "PUT", "DELETE"):
        assert asked(connection, method=method, origin=f"https://{own}")[0] == 403
    assert asked(connection, "/login")[0] == 404, "there is no link"


@pytest.mark.real
def test_a_client_a_stranger_and_a_caller_without_a_certificate_see_nothing(served: Served, tmp_path: Path) -> None:
    assert asked(served.connection(Role.CLIENT, "north")) == (
        403,
        "client north may not read here; allowed: owner, operator, auditor\n",
    )
    stranger = Authority.open_or_create(tmp_path / "elsewhere", "elsewhere", 1e6)
    for context in (served.context(None), served.context(Role.OWNER, "eve", stranger)):
        connection = served.dialled(context)
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            asked(connection)
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        asked(served.dialled(None))
    smuggled = {"X-Client-Cert": "owner", "X-Forwarded-User": "owner", "X-Forwarded-Host": NAME}
    assert asked(served.connection(Role.CLIENT, "north"), **smuggled)[0] == 403


@pytest.mark.real
def test_a_revocation_holds_for_a_kept_connection_and_ends_a_stream(served: Served) -> None:
    kept, stream, other = (served.connection(Role.OPERATOR, name) for name in ("olga", "olga", "ann"))
    assert asked(kept)[0] == asked(other)[0] == 200
    stream.request("GET", "/live?run=1/r")
    news = stream.getresponse()
    assert news.status == 200
    assert news.readline().startswith(b"data: ")
    begun = kept.sock
    served.revoke(Identity(Role.OPERATOR, "olga"))
    wait_for(lambda: asked(kept)[0] == 403)
    assert asked(kept) == (403, REVOKED)
    assert kept.sock is begun, "it is the same connection"
    while news.readline():
        pass
    assert asked(served.connection(Role.OPERATOR)) == (403, REVOKED)
    assert asked(other)[0] == 200


@pytest.mark.real
def test_a_renewed_certificate_of_the_coordinator_is_shown_also_without_a_server_name(served: Served) -> None:
    served.authority.credential(COORDINATOR).store(served.identity)  # as the coordinator does, another process
    renewed = (served.identity / CERTIFICATE).read_bytes()
    context = served.context(Role.AUDITOR, "bob")

    def shown(name: str | None) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", served.port), timeout=BOUND_S) as plain,
            context.wrap_socket(plain, server_hostname=name) as connection,
        ):
            return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").strip().encode()

    wait_for(lambda: shown(None) in renewed)
    assert shown(NAME) in renewed
    assert asked(served.connection(Role.AUDITOR, "bob"))[0] == 200


@pytest.mark.real
@pytest.mark.parametrize("asks_first", [False, True])
def test_a_connection_that_sends_half_a_request_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch, asks_first: bool
) -> None:
    monkeypatch.setattr(process, "HEADERS_S", 0.2)
    connection = served.connection(Role.AUDITOR, "eve")
    connection.connect()
    if asks_first:
        assert asked(connection)[0] == 200
    connection.sock.sendall(b"GET / HTTP/1.1\r\nHost: ")
    assert connection.sock.recv(1) == b""


def test_all_are_refused_while_the_register_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority.open_or_create(tmp_path / "authority", "test", 1e6)
    state = tmp_path / "state"
    with StateDirectory.open(state) as opened:
        register = Register(opened.database)
        register.revoke(Identity(Role.AUDITOR, "eve"), now=time.time())
    authority.credential(COORDINATOR).store(identity_folder(state) / MINE)
    readers = readers_of(state)

    def refusal(name: str) -> str:
        pem = authority.credential(Identity(Role.AUDITOR, name)).certificate_pem
        return readers.refusal(ssl.PEM_cert_to_DER_cert(pem.decode()))

    assert refusal("ann") == ""
    assert refusal("eve") == "the certificate of auditor eve is revoked"
    for damaged in (None, b"", b"no certificate"):
        assert "no certificates in PEM" in readers.refusal(damaged)
    monkeypatch.setattr("atoll.server.identity.readers.LOOK_UP_S", 0.0)
    with readers._lock:  # as while the database hangs
        assert "cannot be read now: the look-up of another" in refusal("ann")
    assert refusal("ann") == ""
    shutil.rmtree(state)
    assert "cannot be read now" in refusal("bob")


def test_a_listener_that_strangers_reach_needs_one_state_directory_with_a_certificate(
    places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.nice", lambda _: 0)
    with pytest.raises(AtollError, match="got none; allowed: one state directory"):
        only_state(sources(places[2:]))
    with pytest.raises(AtollError, match=r"got .*, .*; allowed: one state directory"):
        only_state(sources(places))
    assert only_state(sources([places[0], places[2]])) == places[0]
    with pytest.raises(AtollError, match=r"no site .*: got .*atoll-agent-north; allowed: the coordinator's"):
        only_state(sources([places[0], places[3]]))
    (fault,) = refused("dashboard", places[0], "--listen", "0.0.0.0:0")
    assert "enrol first" in fault or "certificate" in fault
    (fault,) = refused("dashboard", places[0], "--listen", "0.0.0.0:0", "--control")
    assert fault.startswith("--control: got --listen 0.0.0.0:0; allowed: an address on loopback")
