"""A thousand renewals of certificates under load, and calls with certificates that must be refused.

    python -m benchmarks.rotation [--quick] [--rotations N] [--clients N] [--lifetime S]

The coordinator is the real process; all certificates, its own included, are valid for a few seconds. The clients are
whole agents in this process, without training, in one round after the other, with control streams, downloads and
uploads over mutual TLS all the time. Every call that breaks anywhere in an agent is counted, also one that it repeats.
Then one client is revoked while its streams are open, and calls with unacceptable certificates are refused.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from atoll.client.agent import Agent
from atoll.client.config import AgentConfig
from atoll.client.disk.seen_store import Memory
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.disk.verifier import Verifier
from atoll.client.policy.gate import Gate
from atoll.client.wire import control_stream
from atoll.operations import admin
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity import renewal
from atoll.protocol.identity.certificates import (
    USAGES,
    Issuer,
    key_to_pem,
    new_key,
    read_certificates,
    read_key,
    read_leaf,
    server_name,
    to_pem,
)
from atoll.protocol.identity.membership import Membership
from atoll.protocol.identity.names import COORDINATOR, Identity, Role, aggregator
from atoll.protocol.identity.renewal import MembershipEnded
from atoll.protocol.vocabulary import Phase, RunId
from atoll.protocol.wire.channel import PROTOCOL, client_options
from atoll.server.identity.setup import AUTHORITY, MINE, identity_folder
from atoll.server.views.history import History
from benchmarks.crowd import Instant
from benchmarks.processes import NotMeasured, Processes, coordinator_command, toml, wait_for_address
from benchmarks.report import Bar, conclude, say

TASK = "benchmarks.tasks:noise"
ELEMENTS = 100_000  # 400 kB: more than an invitation can carry
REFUSALS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
LIMIT_S = 900.0


@dataclass
class Count:
    """The counts of events in all agents of this process."""

    calls: int = 0
    rotations: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    def failed(self, what: str) -> None:
        """Count a call that failed."""
        if not self.is_over:
            self.broken[what[:120]] += 1

    def broke(self, error: control_stream.StreamBroken) -> None:
        """Count a broken call of an agent; the exception of a call that ended well is no failure."""
        if error.code is not grpc.StatusCode.OK:
            self.failed(str(error))

    def counting(self, kind: type[Any], note: Callable[..., None]) -> Any:
        """Call `note` with each object of a class that is created."""
        begin = kind.__init__

        def init(made: Any, *arguments: Any, **options: Any) -> None:
            begin(made, *arguments, **options)
            note(made)

        return mock.patch.object(kind, "__init__", init)

    def called(self, _: object) -> None:
        """Count a call that has begun."""
        self.calls += 1


@dataclass
class Site:
    """One agent with the folder of its state."""

    name: str
    membership: Membership
    running: "asyncio.Task[int]"


async def begin(count: Count, state: Path, folder: Path, num_clients: int) -> list[Site]:
    """Invite, enrol and start the agents; return when all of them are connected."""
    sites, agents = [], []
    for number in range(num_clients):
        name = f"client-{number}"
        config = AgentConfig(site=name, state=folder / name, reconnect_max=1.0)
        directory = StateDirectory(config.state)
        code = (await asyncio.to_thread(admin.invite, state, Role.CLIENT, name, 600.0)).join_code
        place = await Membership.take(directory.identity, Identity(Role.CLIENT, name), join=code)
        assert place.keeper is not None
        place.keeper.on_replaced(lambda _: _rotated(count))
        keeper = place.keeper
        verifier = Verifier(name, lambda keeper=keeper: keeper.current.ca_pem, Memory(directory.seen))
        agent = Agent(config, [TASK], Instant(), directory, Gate(None, directory.path), place, verifier)
        agents.append(agent)
        sites.append(Site(name, place, asyncio.ensure_future(agent.run())))
    while not all(agent.session.is_connected for agent in agents):  # noqa: ASYNC110 - agents announce nothing
        await asyncio.sleep(0.02)
    return sites


def _rotated(count: Count) -> None:
    count.rotations += 1


def own_serial(state: Path) -> int:
    """Return the serial number of the coordinator's present certificate."""
    return read_leaf((identity_folder(state) / MINE / "certificate.pem").read_bytes()).serial


def start_run(state: Path, num_clients: int) -> str:
    """Start a run of rounds without an end."""
    settings = {
        "task": TASK,
        "name": "rotation",
        "rounds": 1_000_000,
        "evaluation.server_every": 0,
        "round.cohort_size": num_clients,
        "round.quorum": 1,
        "round.deadline": 60.0,
    }
    return str(admin.start(state, "\n".join(f"{key} = {toml(value)}" for key, value in settings.items())).run_id)


async def rotate(count: Count, state: Path, sites: list[Site], wanted: int) -> int:
    """Wait for this number of rotations; return the number of renewals of the coordinator's certificate meanwhile."""
    begun, serials, reported = time.monotonic(), {own_serial(state)}, 0
    while count.rotations < wanted:
        if time.monotonic() - begun > LIMIT_S:
            raise NotMeasured(f"{count.rotations} rotations in {LIMIT_S:g} s; broken: {dict(count.broken)}")
        for site in sites:
            if site.running.done():
                raise NotMeasured(f"{site.name} has ended: {site.running.exception()}")
        serials.add(own_serial(state))
        if count.rotations >= reported + wanted / 5:
            reported = count.rotations
            say(f"  {reported} rotations, {count.calls} calls, {count.broken.total()} broken")
        await asyncio.sleep(0.1)
    return len(serials) - 1


# ---------------------------------------------------------------- refusals


async def revoke(state: Path, site: Site, address: str) -> tuple[float, float]:
    """Return the seconds from the command's begin to the end of the open stream, and to the first new call refused."""
    keeper = site.membership.keeper
    assert keeper is not None
    mine, begun = keeper.current, time.monotonic()
    request = pb.RevokeRequest(role=Role.CLIENT, name=site.name)
    command = asyncio.ensure_future(asyncio.to_thread(admin.ask, state, lambda it: it.Revoke(request, timeout=30)))
    refused_s = None
    while refused_s is None:
        if await call(address, mine.ca_pem, (mine.key_pem, mine.certificate_pem)) is grpc.StatusCode.UNAUTHENTICATED:
            refused_s = time.monotonic() - begun
    await command
    await asyncio.wait({site.running}, timeout=30)
    ended_s = time.monotonic() - begun
    if not (site.running.done() and isinstance(site.running.exception(), MembershipEnded)):
        raise NotMeasured(f"{site.name} was revoked and goes on")
    return ended_s, refused_s


async def call(
    address: str, ca_pem: bytes, pair: tuple[bytes | None, bytes | None], *, hello: str = ""
) -> grpc.StatusCode:
    """Return the status of a call: for a manifest that does not exist, or a control stream under a name."""
    credentials = grpc.ssl_channel_credentials(ca_pem, *pair)
    options = client_options([("grpc.ssl_target_name_override", server_name(COORDINATOR))])
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        return await _outcome(channel, hello)


async def _outcome(channel: grpc.aio.Channel, hello: str = "") -> grpc.StatusCode:
    stub = rpc.Stub(channel, "Coordinator")
    try:
        if hello:
            first = pb.ClientMessage(hello=pb.Hello(protocol=PROTOCOL, client_id=hello, session="x", tasks=[TASK]))
            await anext(aiter(stub.Session(iter([first]), timeout=20)))
        else:
            await stub.GetManifest(pb.ManifestRequest(run_id="rotation-1", digest="0" * 64), timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def refusals(state: Path, address: str, insider: Identity) -> dict[str, grpc.StatusCode]:
    """Return the status of calls with unacceptable certificates; the insider's own certificate is good."""
    folder = identity_folder(state) / AUTHORITY
    issuer = Issuer(
        read_certificates((folder / "certificate.pem").read_bytes())[0], read_key((folder / "key.pem").read_bytes())
    )
    ca_pem, now = to_pem(issuer.certificate), time.time()
    good = _pair(issuer, insider, now)
    if await call(address, ca_pem, good) is not grpc.StatusCode.PERMISSION_DENIED:  # it has joined no run
        raise NotMeasured("a good certificate does not come in either")
    with mock.patch.dict(USAGES, {Role.CLIENT: (ExtendedKeyUsageOID.SERVER_AUTH,)}):
        listens_only = _pair(issuer, insider, now)
    plain = grpc.aio.insecure_channel(address, options=client_options())
    return {
        "expired": await call(address, ca_pem, _pair(issuer, insider, now - 1000, lifetime_s=10)),
        "foreign authority": await call(address, ca_pem, _pair(Issuer.create("x", now=now), insider, now)),
        "wrong usage": await call(address, ca_pem, listens_only),
        "wrong name": await call(address, ca_pem, good, hello="client-1"),
        "wrong server": await _call_an_impostor(issuer, good),
        "none": await call(address, ca_pem, (None, None)),
        "no TLS": await _outcome(plain),
    }


def _pair(issuer: Issuer, identity: Identity, now: float, lifetime_s: float = 600.0) -> tuple[bytes, bytes]:
    key = new_key()
    leaf: x509.Certificate = issuer.issue(key.public_key(), identity, now=now, lifetime_s=lifetime_s)
    return key_to_pem(key), to_pem(leaf)


async def _call_an_impostor(issuer: Issuer, pair: tuple[bytes, bytes]) -> grpc.StatusCode:
    """Call a rank that has a good certificate and claims to be the coordinator."""
    server = grpc.aio.server()
    rpc.add_servicer(object(), server, "Coordinator")
    ca_pem = to_pem(issuer.certificate)
    shown = grpc.ssl_server_credentials([_pair(issuer, aggregator(0), time.time())], ca_pem, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", shown)
    await server.start()
    try:
        return await call(f"127.0.0.1:{port}", ca_pem, pair)
    finally:
        await server.stop(0)


# ---------------------------------------------------------------- the measurement


async def measure(processes: Processes, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything in one federation."""
    state, count = processes.folder / "coordinator", Count()
    settings = {"coordinator__state": state, "coordinator__listen": "127.0.0.1:0", "coordinator__keep_rounds": 100_000}
    lifetime = {"coordinator__certificate_lifetime": arguments.lifetime}
    environment = {"ATOLL_BENCH_ELEMENTS": str(ELEMENTS)}
    processes.start("coordinator", coordinator_command(**settings, **lifetime), environment)
    address = await asyncio.to_thread(wait_for_address, processes, "coordinator", state)
    with (
        count.counting(control_stream.Stream, count.called),
        count.counting(control_stream.StreamBroken, count.broke),
        count.counting(renewal.NotRenewed, lambda error: count.failed(f"renewal: {error}")),
    ):
        sites = await begin(count, state, processes.folder / "clients", arguments.clients)
        run_id, begun = await asyncio.to_thread(start_run, state, arguments.clients), time.monotonic()
        own = await rotate(count, state, sites, arguments.rotations)
        seconds, count.is_over = time.monotonic() - begun, True
        say(f"  {count.rotations} rotations of {len(sites)} clients in {seconds:.1f} s; the coordinator's own: {own}")
        ended_s, refused_s = await revoke(state, sites[0], address)
        say(f"  revoked: its streams ended after {ended_s:.3f} s, a new call was refused after {refused_s:.3f} s")
        turned_away = await refusals(state, address, Identity(Role.CLIENT, "intruder"))
        say("  " + ", ".join(f"{name}: {code.name}" for name, code in turned_away.items()))
        for site in sites:
            site.running.cancel()
        await asyncio.gather(*(site.running for site in sites), return_exceptions=True)
    rounds = History(state).rounds(RunId(run_id))
    return {
        "clients": arguments.clients,
        "lifetime_s": arguments.lifetime,
        "seconds": round(seconds, 1),
        "rotations": count.rotations,
        "rotations_of_the_coordinator": own,
        "calls": count.calls,
        "broken": dict(count.broken),
        "rounds_committed": sum(record.phase is Phase.COMMITTED for record in rounds),
        "rounds_abandoned": sum(record.phase is Phase.ABANDONED for record in rounds),
        "revoked_stream_ended_s": ended_s,
        "revoked_call_refused_s": refused_s,
        "refused": {name: code.name for name, code in turned_away.items()},
    }


def bars(ours: dict[str, Any], wanted: int) -> list[Bar]:
    """Return the bars on the figures."""
    codes = [grpc.StatusCode[name] for name in ours["refused"].values()]
    return [
        Bar.at_least("rotations of clients' certificates", ours["rotations"], wanted),
        Bar.exactly("failed calls", sum(ours["broken"].values()), 0),
        Bar.below("open streams of a revoked client end [s]", ours["revoked_stream_ended_s"], 5.0),
        Bar.below("a new call of a revoked client is refused [s]", ours["revoked_call_refused_s"], 5.0),
        Bar.exactly("certificates that must not do, refused", sum(code in REFUSALS for code in codes), len(codes)),
    ]


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rotation", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="a few rotations: a check that it works")
    parser.add_argument("--rotations", type=int, default=1000, metavar="N", help="rotations of clients' certificates")
    parser.add_argument("--clients", type=int, default=24, metavar="N", help="agents in this process")
    parser.add_argument("--lifetime", type=float, default=6.0, metavar="S", help="validity of a certificate [s]")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rotations, arguments.clients, arguments.lifetime = 3, 3, 4.0
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder, Processes(Path(folder)) as processes:
        try:
            ours = asyncio.run(measure(processes, arguments))
        except NotMeasured as error:
            raise NotMeasured(f"{error}\n{processes.last_words('coordinator')}") from None
    why = "no peer was found that renews certificates while it runs"
    return conclude("rotation", bars(ours, arguments.rotations), ours=ours, theirs=None, why_not=why)


if __name__ == "__main__":
    sys.exit(main())
