"""Calls of a coordinator's Admin service.

They go to the coordinator that holds a state directory or, where there is no such directory, to the one on another
machine at which `atoll join` has enrolled this person.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc

from atoll.operations.faults import CommandError, without_frames
from atoll.operations.place import STATE, credential_folder, is_elsewhere, named_here, user_here
from atoll.operations.reporter import note, waiting_for
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.audit.files import FILE_BYTES, is_log_file
from atoll.protocol.identity.certificates import read_certificates, validity_of
from atoll.protocol.identity.clock_hint import instant
from atoll.protocol.identity.credential import alone_with
from atoll.protocol.identity.dialer import Dialer, InsecureDialer, MutualDialer
from atoll.protocol.identity.enrolling import Place
from atoll.protocol.identity.handshake_fault import explained
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import COORDINATOR, PLACE, Identity, Role
from atoll.protocol.identity.proxy import through_proxy
from atoll.protocol.identity.renewal import NotRenewed, over, renew_once
from atoll.protocol.paging import ALL, Paging
from atoll.server.identity.setup import owner_folder
from atoll.server.journal.holder import RunningCoordinator, is_held, running_coordinator

STARTING_S = 30.0
"""Seconds in which a coordinator that is starting locks its state directory."""

RECOVERY_S = 660.0
"""Longest wait in seconds for a coordinator that holds its state directory to listen: it recovers its runs first."""

STOPPING_S = 5.0
"""Seconds in which a coordinator that no longer answers, because it is stopping, must end."""

CONNECT_S = 60.0
"""Seconds in which a coordinator that lives must take a connection: a stopped or overloaded process takes none."""

TIMEOUT_S = 660.0
"""Timeout of a call in seconds, longer than the ten minutes in which the coordinator loads a run's task and makes its
version 0.
"""

MEMBERS_TIMEOUT_S = 120.0
"""Timeout in seconds of a call about members, which waits for nothing but the database and a busy machine."""

POLL_S = 0.05

_NOT_IN_TIME = ("timed out", "timeout", "endpoint closing", "shutting down endpoint", "deadline")
"""Words of gRPC about a connection that was begun and not completed in time."""

_BY_HAND = "begin with `atoll authority request {0} --out FILE` (docs/identity.md)"


class NoAnswer(CommandError):
    """No answer at the coordinator's address."""


class NotTrusted(NoAnswer):
    """A server at the coordinator's address, but no connection, because of a certificate: the address is right."""


def dialer(state: Path) -> Dialer:
    """Return the dialer, with the owner's credential, of the coordinator that holds `state` and of its ranks.

    Raises:
        CredentialError: this user may not read the owner's key in that directory.
        CommandError: the owner has no certificate yet, or an expired one.
    """
    running = running_coordinator(state)
    if running is not None and running.is_insecure:
        return InsecureDialer()
    folder = owner_folder(state)
    if running is not None and os.access(folder.parent, os.X_OK) and not folder.exists():
        what = f"there is no {folder}: the authority is on another machine, so the owner's certificate is made by hand"
        raise CommandError(what, _BY_HAND.format(folder))
    keeper = Keeper(folder)
    now = time.time()
    if keeper.current.is_expired(now) or keeper.current.is_early(now):
        state_of_it = "is not valid yet" if keeper.current.is_early(now) else "has expired"
        what = f"the owner's certificate in {folder} {state_of_it}, and the coordinator has not renewed it: see its log"
        times = validity_of(read_certificates(keeper.current.certificate_pem)[0])
        clocks = f"it is valid {times}, and this machine's clock shows {instant(now)}: the clock may be wrong"
        raise CommandError(
            what,
            clocks,
            "a running coordinator renews it within a minute of a setting of the clock: try again, restart it, or,"
            f" with the authority on another machine, {_BY_HAND.format(folder)}",
        )
    return MutualDialer(keeper)


def is_listening(state: Path) -> bool:
    """Return whether a coordinator holds `state` and answers at its address."""
    return running_coordinator(state) is not None


def has_ended(state: Path, patience_s: float) -> bool:
    """Return whether no coordinator holds `state`; one that is stopping has `patience_s` seconds to end."""
    deadline = time.monotonic() + patience_s
    while is_held(state):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def ask(state: Path, request: "Callable[[rpc.Stub], Any]", *, patience_s: float = 0.0) -> Any:
    """Call the coordinator that holds `state`, or the joined one, and return its answer.

    Args:
        state: the coordinator's state directory.
        request: the call; its argument is the stub of the Admin service.
        patience_s: seconds to wait for a coordinator that is starting.

    Raises:
        CommandError: no coordinator holds the directory, or it refuses; the message is the coordinator's.
        NoAnswer: no answer at its address, or not in time.
    """
    if is_elsewhere(state):
        return _ask_elsewhere(state, request)
    running = _listening(state, patience_s)
    if running is not None:
        return _ask(dialer(state), running.admin_address, request, is_alive=lambda: is_held(state))
    if is_held(state):
        raise CommandError(
            f"the coordinator that holds {state} does not listen after {RECOVERY_S:g} s: see its log, and try again"
        )
    raise CommandError(
        f"no coordinator holds {state}: name another directory with --state, or start one with "
        f"`atoll coordinator --state {state}`"
    )


def _listening(state: Path, patience_s: float) -> RunningCoordinator | None:
    """Return the coordinator that holds `state`, after waiting for one that is starting; None: there is none.

    Args:
        state: the coordinator's state directory.
        patience_s: seconds to wait for a process that holds the directory; once one holds it, the wait ends with it.
    """
    if (running := running_coordinator(state)) is not None or not (patience_s or is_held(state)):
        return running
    begun = time.monotonic()
    what, limit = f"a coordinator that holds {state}", f"up to {patience_s:g} s, as one may be starting"
    if is_held(state):
        what, limit = f"the coordinator that holds {state} to listen", "it recovers its runs first"
    with waiting_for(what, limit):
        while running is None:
            waited, is_starting = time.monotonic() - begun, is_held(state)
            if waited > RECOVERY_S or (waited > patience_s and not is_starting):
                return None
            time.sleep(POLL_S)
            running = running_coordinator(state)
    return running


def credential_and_place() -> tuple[Keeper, Place]:
    """Return the credential, and the addresses of the coordinator to ask.

    Raises:
        CredentialError: there is no credential, or it has expired, or no address is stored beside it.
    """
    folder = credential_folder()
    keeper, place = Keeper(folder), Place.load(folder)
    keeper.check()
    named = named_here()
    if named is not None and named.address and named.address not in (place.address, place.admin_address):
        place = replace(place, admin_address=named.address)
    return keeper, place


def elsewhere() -> tuple[Dialer, Place]:
    """Return the dialer and the addresses of the coordinator that `atoll join` has enrolled this person at.

    A certificate that is due is renewed on the way.

    Raises:
        CredentialError: the certificate has expired.
    """
    keeper, place = credential_and_place()
    dialer = through_proxy(MutualDialer(keeper), os.environ)
    if _is_due(keeper):
        with (
            waiting_for(f"a renewed certificate from {place.admin_address}", "the command continues without one"),
            suppress(NotRenewed),
            alone_with(keeper.folder) as is_alone,
        ):  # it is still valid: a later command tries again
            if is_alone:
                _renew(keeper, lambda: dialer.channel(place.admin_address, COORDINATOR))
    return dialer, place


def _renew(keeper: Keeper, channel: Callable[[], grpc.aio.Channel]) -> None:
    """Renew a person's certificate, unless another command of the same person has renewed it meanwhile."""
    keeper.reload()
    if _is_due(keeper):
        keeper.replace(asyncio.run(renew_once(keeper.current, over(channel))))


def _is_due(keeper: Keeper) -> bool:
    return time.time() > keeper.current.renew_at(0.0)


def _ask_elsewhere(state: Path, request: "Callable[[rpc.Stub], Any]") -> Any:
    dialer, place = elsewhere()
    if state != STATE and named_here() is None:
        note(f"there is no {state} here: asking the coordinator at {place.admin_address}")
    try:
        return _ask(dialer, place.admin_address, request)
    except NotTrusted:
        raise
    except NoAnswer as error:
        where = credential_folder() / PLACE
        hint = f"if its address has changed, ask its operator for the new one, and set admin_address in {where}"
        raise CommandError(*error.faults, hint) from None


def _ask(
    dialer: Dialer,
    address: str,
    request: "Callable[[rpc.Stub], Any]",
    *,
    is_alive: Callable[[], bool] = lambda: True,
) -> Any:
    """Call the server at an address, which has `CONNECT_S` to accept a connection, and return its answer.

    A process that is stopped, or starved by a busy machine, lets connections time out: they are tried again. A refused
    connection is final, as nothing listens there, and so is a call that the server may have received.
    """
    begun = time.monotonic()
    limit = f"up to {CONNECT_S:g} s for a connection; it finishes a call that it has received, also if you do not wait"
    with waiting_for(f"the coordinator at {address}", limit):
        while True:
            with dialer.blocking_channel(address, COORDINATOR) as channel:
                try:
                    return request(rpc.Stub(channel, "Admin"))
                except grpc.RpcError as error:
                    waited = time.monotonic() - begun
                    if waited >= CONNECT_S or not is_unheard(error) or not is_alive():
                        raise refusal_of(error, address, waited, dialer) from error
            time.sleep(POLL_S)


def is_unheard(error: Any) -> bool:
    """Return whether a call failed because a connection was not completed in time: the server has received nothing."""
    details = error.details() or ""
    return (
        error.code() is grpc.StatusCode.UNAVAILABLE
        and details.startswith("failed to connect to all addresses")
        and any(words in details.lower() for words in _NOT_IN_TIME)
    )


def refusal_of(error: Any, address: str, waited: float, dialer: Dialer) -> CommandError:
    """Convert a failed call into an error with the coordinator's message.

    Args:
        error: the error of a call, a grpc.RpcError that is also a grpc.Call, which grpc's types do not state.
        address: the address of the coordinator.
        waited: the seconds that the call has waited.
        dialer: the dialer of the call.
    """
    details = error.details() or str(error.code())
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        within = f" within {waited:.0f} s" if waited >= 1 else ""
        why = asyncio.run(explained(details, address, dialer.credential))
        kind = NoAnswer if why == details else NotTrusted
        return kind(f"the coordinator at {address} does not answer{within}: {why}")
    return CommandError(*without_frames(details))


def start(state: Path, config_toml: str) -> pb.RunReply:
    """Start a run with the given settings (TOML)."""
    request = pb.StartRunRequest(config_toml=config_toml)
    reply: pb.RunReply = ask(state, lambda admin: admin.StartRun(request, timeout=TIMEOUT_S))
    return reply


def collect_statistics(state: Path, config_toml: str, deadline_s: float, longer_s: float = 0.0) -> int:
    """Ask the sites of a planned run for statistics of their data; return the number of the result.

    Args:
        state: the state directory.
        config_toml: the settings of the run, TOML.
        deadline_s: seconds in which sites may answer.
        longer_s: seconds that a secure sum may take after that.
    """
    request = pb.CollectStatisticsRequest(config_toml=config_toml, deadline_s=deadline_s, on_behalf_of=user_here())
    timeout = TIMEOUT_S + deadline_s + longer_s
    reply: pb.CollectStatisticsReply = ask(state, lambda admin: admin.CollectStatistics(request, timeout=timeout))
    return reply.number


def stop(state: Path, run_id: str, reason: str) -> pb.RunReply:
    """Stop a run, for a reason that its record keeps."""
    request = pb.StopRunRequest(run_id=run_id, reason=reason, on_behalf_of=user_here())
    reply: pb.RunReply = ask(state, lambda admin: admin.StopRun(request, timeout=TIMEOUT_S))
    return reply


def pause(state: Path, run_id: str, reason: str) -> pb.RunReply:
    """Pause a run before its next round."""
    request = pb.PauseRunRequest(run_id=run_id, reason=reason, on_behalf_of=user_here())
    reply: pb.RunReply = ask(state, lambda admin: admin.PauseRun(request, timeout=TIMEOUT_S))
    return reply


def delete(state: Path, run_id: str) -> pb.RunReply:
    """Delete a run with all its versions."""
    request = pb.DeleteRunRequest(run_id=run_id)
    reply: pb.RunReply = ask(state, lambda admin: admin.DeleteRun(request, timeout=TIMEOUT_S))
    return reply


def resume(state: Path, run_id: str, overrides: Sequence[str] = ()) -> pb.RunReply:
    """Continue a paused run, or reopen an ended one, with changed settings (`key=value`) if there are some."""
    request = pb.ResumeRunRequest(run_id=run_id, overrides=overrides, on_behalf_of=user_here())
    reply: pb.RunReply = ask(state, lambda admin: admin.ResumeRun(request, timeout=TIMEOUT_S))
    return reply


def invite(state: Path, role: Role, name: str, lifetime_s: float) -> pb.InviteReply:
    """Make a join code for a name that expires after `lifetime_s` seconds.

    Raises:
        CommandError: no member can have this name or role, whatever coordinator answers; otherwise as `ask`.
    """
    check_member(role, name)
    request = pb.InviteRequest(role=role, name=name, lifetime_s=lifetime_s, on_behalf_of=user_here())
    reply: pb.InviteReply = ask(state, lambda admin: admin.Invite(request, timeout=TIMEOUT_S), patience_s=STARTING_S)
    return reply


def revoke(state: Path, role: Role, name: str) -> None:
    """Revoke the certificates and join codes of a name; raises as `invite`."""
    check_member(role, name)
    request = pb.RevokeRequest(role=role, name=name, on_behalf_of=user_here())
    ask(state, lambda admin: admin.Revoke(request, timeout=MEMBERS_TIMEOUT_S))


def check_member(role: Role, name: str) -> None:
    """Check that a member can have this name, before anything waits for a coordinator.

    Raises:
        CommandError: the name has another form, or its role is never invited.
    """
    try:
        identity = Identity(role, name)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if role in (Role.COORDINATOR, Role.AUTHORITY):
        raise CommandError(f"{identity} can be neither invited nor revoked")
    if role is Role.AGGREGATOR and not (name.isascii() and name.isdigit() and str(int(name)) == name):
        raise CommandError(f"{identity}: an aggregator's name is its number, such as 0 or 12")


def members(state: Path) -> pb.ListMembersReply:
    """List the names that were invited or have a certificate."""
    request = pb.ListMembersRequest()
    reply: pb.ListMembersReply = ask(state, lambda admin: admin.ListMembers(request, timeout=MEMBERS_TIMEOUT_S))
    return reply


def ranks(state: Path) -> pb.ListRanksReply:
    """List the aggregation ranks with their addresses and traffic."""
    reply: pb.ListRanksReply = ask(state, lambda admin: admin.ListRanks(pb.ListRanksRequest(), timeout=TIMEOUT_S))
    return reply


def read_view(state: Path, view: str, run: str, number: int, paging: Paging = ALL) -> Any:
    """Return a view of `server.views` from the coordinator; see `runs.views.read_view`."""
    try:
        request = pb.LookRequest(view=view, run_id=run, number=number, **asdict(paging))
    except ValueError as error:  # surrogates in the text, or a number of more than 32 bits
        raise CommandError(f"run {run!r}, round {number}: {error}") from None
    answer = ask(state, lambda admin: b"".join(reply.json for reply in admin.Look(request, timeout=TIMEOUT_S)))
    try:
        found = json.loads(answer)
    except ValueError as error:
        raise CommandError(f"the coordinator's answer is not JSON: {error}") from None
    if paging.count is not None and "next" not in found:
        if paging.after or paging.is_filtered:
            what = "the coordinator is of an earlier Atoll, which neither filters rows nor begins after one"
            raise CommandError(f"{what}: leave the options that limit the rows out")
        found["next"] = None
    return found


def fetch_audit_log(state: Path, folder: Path) -> None:
    """Write the coordinator's audit log, as it is now, and its public key to an empty folder.

    Raises:
        CommandError: as `ask`; or the stream is no audit log: a file of another name, too large, or sent twice.
    """

    def fetch(admin: rpc.Stub) -> None:
        name, num_bytes = "", 0
        for part in admin.ReadAuditLog(pb.ReadAuditLogRequest(), timeout=TIMEOUT_S):
            if part.file != name:
                if not is_log_file(part.file) or (folder / part.file).exists():
                    raise CommandError(
                        f"the coordinator sent {part.file[:80]!r}, which is not the next file of an audit log"
                    )
                name, num_bytes = part.file, 0
            num_bytes += len(part.data)
            if num_bytes > 2 * FILE_BYTES:
                raise CommandError(f"the coordinator sent more than {2 * FILE_BYTES} bytes of {name}")
            with (folder / name).open("ab") as file:
                file.write(part.data)

    ask(state, fetch)
