"""Real handshakes with certificates that are not valid yet, or have expired: both sides speak of clocks."""

import asyncio
import contextlib
import os
import re
import socket
import time
from dataclasses import dataclass

import grpc
import pytest
from cryptography import x509

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import Issuer, key_to_pem, new_key, to_pem
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.enrolling import Place, Unreachable, enrol
from atoll.protocol.identity.join_code import JoinCode
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import COORDINATOR, Identity, Role, aggregator
from atoll.server.transport import handshakes
from atoll.server.transport.listener import MutualListener
from tests.cli.federation import ATOLL, TINY
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_round import live

DAY = 86400.0
SITE_A, OWNER = Identity(Role.CLIENT, "a"), Identity(Role.OWNER, "me")
NOW, EARLY, LATE = (-1.0, 1.0), (1.0, 2.0), (-3.0, -2.0)
"""Times of validity [days from now]: valid, not valid yet, expired."""

TWO_CLOCKS = "the clock of this machine or of the other one may be wrong"

pytestmark = pytest.mark.real


@dataclass
class Authority:
    """An authority whose certificates are valid in the time that a test wants."""

    issuer: Issuer
    leaves_of: Issuer

    @classmethod
    def of(cls, days=(-100.0, 100.0)):
        begin, end = (time.time() + DAY * day for day in days)
        own = Issuer.create("test", now=begin, lifetime_s=end - begin)
        wide = Issuer.create("test", now=time.time() - 1000 * DAY)  # it signs also what its own time does not cover
        return cls(own, Issuer(wide.certificate, own.key))

    def credential(self, identity, days):
        key, (begin, end) = new_key(), (time.time() + DAY * day for day in days)
        leaf = self.leaves_of.issue(key.public_key(), identity, now=begin, lifetime_s=end - begin)
        return Credential(key_to_pem(key), to_pem(leaf), to_pem(self.issuer.certificate))

    def keeper(self, folder, identity, days=NOW):
        self.credential(identity, days).store(folder)
        return Keeper(folder)


@contextlib.asynccontextmanager
async def serving(folder, authority, days=NOW, identity=COORDINATOR):
    """The address of a port that shows a certificate of this time, and admits whom the handshake lets through."""
    server = grpc.aio.server()
    address = MutualListener(authority.keeper(folder, identity, days)).bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def process(folder, *arguments, **environment):
    """A process of `atoll`, and the file with its output."""
    log = folder / "log"
    with log.open("wb") as stream:
        started = await asyncio.create_subprocess_exec(
            ATOLL, *map(str, arguments), cwd=folder, stdout=stream, stderr=stream, env=os.environ | environment
        )
    try:
        yield log
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


async def said(log, words):
    """The line of a log with these words."""
    async with asyncio.timeout(BOUND_S):
        while True:
            for line in log.read_text().splitlines():
                if words in line:
                    return line
            await asyncio.sleep(0.05)


def sound(line, credential):
    """Whether a line names the certificate's times, as X.509 counts them, this machine's time, and no raw text."""
    leaf = x509.load_pem_x509_certificate(credential)
    times = (leaf.not_valid_before_utc, leaf.not_valid_after_utc)
    assert all(f"{at:%Y-%m-%d %H:%M:%S} UTC" in line for at in times), line
    assert f"clock shows {time.strftime('%Y-%m-%d', time.gmtime())}" in line, line
    assert not any(raw in line for raw in ("SSL", "TSI", "CERTIFICATE_VERIFY", "ipv4:")), line
    return True


def starts(who, folder, authority, address, days):
    """The command of a member whose certificate has this time, its environment, and its certificate."""
    identity = {"agent": SITE_A, "cli": OWNER, "rank": aggregator(0)}[who]
    place = folder / ("mine" if who == "cli" else "mine/identity")
    keeper = authority.keeper(place, identity, days)
    Place(address, address, "00").store(place)
    command = {
        "agent": ("agent", f"{TINY}:task", "--site=a", "--state=mine"),
        "cli": ("run", "list"),
        "rank": ("aggregator", "--rank=0", "--of=1", "--state=mine"),
    }[who]
    return command, {"ATOLL_IDENTITY": str(place)}, keeper.current


@pytest.mark.parametrize("days", [EARLY, LATE], ids=["early", "late"])
@pytest.mark.parametrize("who", ["agent", "cli", "rank"])
@live
async def test_the_certificate_of_the_server_is_not_valid_by_this_clock(tmp_path, who, days):
    authority = Authority.of()
    async with serving(tmp_path / "coordinator", authority, days) as address:
        command, environment, _ = starts(who, tmp_path, authority, address, NOW)
        async with process(tmp_path, *command, **environment) as log:
            line = await said(log, TWO_CLOCKS)
    assert f"the certificate of the server at {address} is valid from" in line
    assert sound(line, (tmp_path / "coordinator/certificate.pem").read_bytes())


@pytest.mark.parametrize("who", ["agent", "cli", "rank"])
@live
async def test_a_member_whose_own_certificate_is_not_valid_yet_says_so(tmp_path, who, monkeypatch, caplog):
    """And the port logs the address of the peer, of whose certificate gRPC tells it nothing."""
    monkeypatch.setattr(handshakes, "WAIT_S", 0.5)
    authority = Authority.of()
    async with serving(tmp_path / "coordinator", authority) as address:
        command, environment, mine = starts(who, tmp_path, authority, address, EARLY)
        async with process(tmp_path, *command, **environment) as log:
            line = await said(log, TWO_CLOCKS)
            async with asyncio.timeout(BOUND_S):
                while "proven no identity" not in caplog.text:
                    await asyncio.sleep(0.05)
    assert f"this machine's certificate, of {mine.identity}, is valid from" in line
    assert sound(line, mine.certificate_pem)
    assert re.search(r"a connection from 127.0.0.1 port \d+ has|\d connections \(127.0.0.1: \d\) have", caplog.text)
    assert f"by this machine's clock, which shows {time.strftime('%Y-%m-%d', time.gmtime())}" in caplog.text


@pytest.mark.parametrize("who", ["agent", "rank", "cli"])
@live
async def test_a_member_whose_own_certificate_has_expired_ends_and_says_so(tmp_path, who):
    authority = Authority.of()
    async with serving(tmp_path / "coordinator", authority) as address:
        command, environment, mine = starts(who, tmp_path, authority, address, LATE)
        async with process(tmp_path, *command, **environment) as log:
            line = await said(log, TWO_CLOCKS)
    assert line.endswith("enrol again, with a new join code")
    assert sound(line, mine.certificate_pem)


@pytest.mark.parametrize("days", [EARLY, LATE], ids=["early", "late"])
@live
async def test_the_certificate_of_the_authority_is_not_valid_by_this_clock(tmp_path, days):
    authority = Authority.of(days)
    async with serving(tmp_path / "coordinator", authority) as address:
        command, environment, mine = starts("agent", tmp_path, authority, address, NOW)
        async with process(tmp_path, *command, **environment) as log:
            line = await said(log, TWO_CLOCKS)
    assert "the certificate of the federation's authority is valid from" in line
    assert sound(line, mine.ca_pem)


@live
async def test_a_refusal_of_a_valid_certificate_blames_the_clock_of_the_server(tmp_path):
    """As of a coordinator whose clock is behind; here one that does not know the authority: it closes just so."""
    ours, theirs = Authority.of(), Authority.of()
    async with serving(tmp_path / "coordinator", theirs) as address:
        command, environment, mine = starts("agent", tmp_path, ours, address, NOW)
        both = to_pem(ours.issuer.certificate, theirs.issuer.certificate)
        Credential(mine.key_pem, mine.certificate_pem, both).store(tmp_path / "mine/identity")
        async with process(tmp_path, *command, **environment) as log:
            line = await said(log, "the clock of the other machine may be wrong")
    assert f"the server ends the connection when it has seen the certificate of {SITE_A}, which is valid from" in line
    assert sound(line, mine.certificate_pem)


@pytest.mark.parametrize("days", [EARLY, LATE], ids=["early", "late"])
@live
async def test_who_enrols_at_a_server_outside_of_its_time_says_so(tmp_path, days):
    """The address that the code names shows a certificate; nothing of the code is sent to it."""
    authority = Authority.of()
    async with serving(tmp_path / "coordinator", authority, days) as address:
        code = JoinCode((address,), bytes(32), bytes(8), bytes(16))
        with pytest.raises(Unreachable, match=TWO_CLOCKS) as refused:
            await enrol(code, tmp_path / "me")
    assert sound(str(refused.value), (tmp_path / "coordinator/certificate.pem").read_bytes())


@live
async def test_a_port_that_is_outside_of_its_own_time_logs_just_that(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(handshakes, "WAIT_S", 0.5)
    authority = Authority.of()
    async with serving(tmp_path / "coordinator", authority, EARLY) as address:
        command, environment, _ = starts("agent", tmp_path, authority, address, NOW)
        async with process(tmp_path, *command, **environment), asyncio.timeout(BOUND_S):
            while "this machine's certificate, of coordinator" not in caplog.text:
                await asyncio.sleep(0.05)
    line = next(line for line in caplog.text.splitlines() if "proven no identity" in line)
    assert sound(line, (tmp_path / "coordinator/certificate.pem").read_bytes())


@live
async def test_who_has_called_is_not_logged_and_who_is_refused_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(handshakes, "WAIT_S", 0.5)
    async with running(tmp_path / "state", coordinator__insecure=False) as it, it.admin() as admin:
        await admin.ListRanks(pb.ListRanksRequest())
        host, _, port = it.address.rpartition(":")
        with socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0)) as stranger:
            place = f"from 127.0.0.2 port {stranger.getsockname()[1]}"
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
            async with asyncio.timeout(BOUND_S):
                while "has proven no identity" not in caplog.text:
                    await asyncio.sleep(0.05)
    assert f"a connection {place} has proven no identity" in caplog.text
    assert caplog.text.count("proven no identity") == 1
