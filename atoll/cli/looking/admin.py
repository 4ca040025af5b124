"""Asks the coordinator that holds a state directory, or the one elsewhere that `atoll join` has made us a member of."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from atoll.cli.faults import CommandError, without_frames
from atoll.cli.options import STATE
from atoll.cli.printing import note
from atoll.cli.serving.join import identity_of_person
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.audit.files import FILE_BYTES, is_log_file
from atoll.protocol.identity.credential import alone_with
from atoll.protocol.identity.dialer import Dialer, InsecureDialer, MutualDialer
from atoll.protocol.identity.enrolling import PLACE, Place
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import COORDINATOR, Role
from atoll.protocol.identity.proxy import through_proxy
from atoll.protocol.identity.renewal import NotRenewed, over, renew_once
from atoll.server.identity.setup import owner_folder
from atoll.server.journal.state_directory import is_held, running_coordinator

STARTING_S = 30.0
"""In which a coordinator that is being started has its state directory."""


class NoAnswer(CommandError):
    """Nobody answers at the coordinator's address."""


_BY_HAND = "begin with `atoll authority request {0} --out FILE` (docs/identity.md)"

QUIET_S = 5.0
"""Then it is said that the coordinator has not answered yet."""

TIMEOUT_S = 660.0
"""A run starts when its task is loaded and its version 0 is made: the coordinator gives that ten minutes."""


def dialer(state: Path) -> Dialer:
    """How this machine's operator dials the coordinator that holds `state`, and its ranks.

    Raises:
        CredentialError: it is not for whoever asks: the owner's key lies in that directory.
        CommandError: there is none yet.
    """
    running = running_coordinator(state)
    if running is not None and running.is_insecure:
        return InsecureDialer()
    folder = owner_folder(state)
    if running is not None and os.access(folder.parent, os.X_OK) and not folder.exists():
        what = f"there is no {folder}: with its authority elsewhere the owner's certificate is made by hand"
        raise CommandError(what, _BY_HAND.format(folder))
    keeper = Keeper(folder)
    if keeper.current.is_expired(time.time()):
        what = f"the owner's certificate in {folder} has expired, and the coordinator has not renewed it: see its log"
        raise CommandError(what, f"start it again, or, with its authority elsewhere, {_BY_HAND.format(folder)}")
    return MutualDialer(keeper)


def is_elsewhere(state: Path) -> bool:
    """Whether there is no such directory here, and `atoll join` has made us a member of a coordinator elsewhere."""
    return not state.exists() and (identity_of_person() / PLACE).exists()


def ask(state: Path, request: "Callable[[rpc.AdminStub], Any]", *, patience_s: float = 0.0) -> Any:
    """The answer of the coordinator that holds `state`.

    Args:
        state: its directory.
        request: what is asked.
        patience_s: how long to wait for one that is just starting.

    Raises:
        CommandError: none does, or it refuses; the message is the coordinator's own.
    """
    if is_elsewhere(state):
        return _ask_elsewhere(state, request)
    until = time.monotonic() + patience_s
    while (running := running_coordinator(state)) is None and patience_s and time.monotonic() < until:
        if is_held(state):  # it recovers its runs before it listens
            until = time.monotonic() + patience_s
        time.sleep(0.05)
    if running is not None:
        return _ask(dialer(state), running.admin_address, request)
    raise CommandError(
        f"no coordinator holds {state}: name another directory with --state, or start one with "
        f"`atoll coordinator --state {state}`"
    )


def elsewhere() -> tuple[Dialer, Place]:
    """How to dial the coordinator that `atoll join` has made us a member of, and where it is.

    Raises:
        CredentialError: the certificate has run out.
    """
    folder = identity_of_person()
    keeper, place = Keeper(folder), Place.load(folder)
    keeper.check()
    dialer = through_proxy(MutualDialer(keeper), os.environ)
    if _is_due(keeper):
        with suppress(NotRenewed), alone_with(folder) as is_alone:  # there is time
            if is_alone:
                _renew(keeper, lambda: dialer.channel(place.admin_address, COORDINATOR))
    return dialer, place


def _renew(keeper: Keeper, channel: Callable[[], grpc.aio.Channel]) -> None:
    """Renew a person's certificate, unless another command of theirs has done it by now."""
    keeper.reload()
    if _is_due(keeper):
        keeper.replace(asyncio.run(renew_once(keeper.current, over(channel))))


def _is_due(keeper: Keeper) -> bool:
    return time.time() > keeper.current.renew_at(0.0)


def _ask_elsewhere(state: Path, request: "Callable[[rpc.AdminStub], Any]") -> Any:
    dialer, place = elsewhere()
    if state != STATE:
        note(f"there is no {state} here: asking the coordinator on {place.admin_address}")
    try:
        return _ask(dialer, place.admin_address, request)
    except NoAnswer as error:
        where = identity_of_person() / PLACE
        hint = f"if it listens elsewhere by now, ask its operator, and change admin_address in {where}"
        raise CommandError(*error.faults, hint) from None


def _ask(dialer: Dialer, address: str, request: "Callable[[rpc.AdminStub], Any]") -> Any:
    with dialer.blocking_channel(address, COORDINATOR) as channel, _patience(address):
        try:
            return request(rpc.AdminStub(channel))
        except grpc.RpcError as error:
            raise _refusal(error, address) from error


@contextmanager
def _patience(address: str) -> Iterator[None]:
    """Tell the person who waits that somebody does."""
    what = f"the coordinator on {address} has not answered yet; what it has begun it will do, whether or not you wait"
    telling = threading.Timer(QUIET_S, note, [what])
    telling.start()
    try:
        yield
    finally:
        telling.cancel()


def _refusal(error: Any, address: str) -> CommandError:
    """What the coordinator said; `error` is a grpc.Call, too, which grpc's types do not tell."""
    details = error.details() or str(error.code())
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return NoAnswer(f"the coordinator on {address} does not answer: {details}")
    return CommandError(*without_frames(details))


def start(state: Path, config_toml: str) -> pb.RunReply:
    """Host one more run."""
    request = pb.StartRunRequest(config_toml=config_toml)
    reply: pb.RunReply = ask(state, lambda admin: admin.StartRun(request, timeout=TIMEOUT_S))
    return reply


def stop(state: Path, run_id: str, reason: str) -> pb.RunReply:
    """End a run."""
    request = pb.StopRunRequest(run_id=run_id, reason=reason)
    reply: pb.RunReply = ask(state, lambda admin: admin.StopRun(request, timeout=TIMEOUT_S))
    return reply


def pause(state: Path, run_id: str, reason: str) -> pb.RunReply:
    """Let no new round of a run begin."""
    request = pb.PauseRunRequest(run_id=run_id, reason=reason)
    reply: pb.RunReply = ask(state, lambda admin: admin.PauseRun(request, timeout=TIMEOUT_S))
    return reply


def delete(state: Path, run_id: str) -> pb.RunReply:
    """Forget a run."""
    request = pb.DeleteRunRequest(run_id=run_id)
    reply: pb.RunReply = ask(state, lambda admin: admin.DeleteRun(request, timeout=TIMEOUT_S))
    return reply


def resume(state: Path, run_id: str) -> pb.RunReply:
    """Reopen a run."""
    request = pb.ResumeRunRequest(run_id=run_id)
    reply: pb.RunReply = ask(state, lambda admin: admin.ResumeRun(request, timeout=TIMEOUT_S))
    return reply


def invite(state: Path, role: Role, name: str, lifetime_s: float) -> pb.InviteReply:
    """A join code."""
    request = pb.InviteRequest(role=role, name=name, lifetime_s=lifetime_s)
    reply: pb.InviteReply = ask(state, lambda it: it.Invite(request, timeout=TIMEOUT_S), patience_s=STARTING_S)
    return reply


def ranks(state: Path) -> pb.ListRanksReply:
    """The aggregation ranks."""
    reply: pb.ListRanksReply = ask(state, lambda admin: admin.ListRanks(pb.ListRanksRequest(), timeout=TIMEOUT_S))
    return reply


def look(state: Path, view: str, run: str, number: int) -> Any:
    """A view of `server.views`."""
    try:
        request = pb.LookRequest(view=view, run_id=run, number=number)
    except ValueError as error:  # text that is none, or a number beyond all rounds
        raise CommandError(f"run {run!r}, round {number}: {error}") from None
    answer = ask(state, lambda it: b"".join(reply.json for reply in it.Look(request, timeout=TIMEOUT_S)))
    try:
        return json.loads(answer)
    except ValueError as error:
        raise CommandError(f"the coordinator's answer is no JSON: {error}") from None


def fetch_audit_log(state: Path, folder: Path) -> None:
    """Write the coordinator's audit log, as it is now, and its public key to an empty folder.

    Raises:
        CommandError: as `ask`; or what comes is no audit log: another file, one too large, or out of order.
    """

    def fetch(it: rpc.AdminStub) -> None:
        name, num_bytes = "", 0
        for part in it.ReadAuditLog(pb.ReadAuditLogRequest(), timeout=TIMEOUT_S):
            if part.file != name:
                if not is_log_file(part.file) or (folder / part.file).exists():
                    raise CommandError(
                        f"the coordinator sent {part.file[:80]!r}, which is no next file of an audit log"
                    )
                name, num_bytes = part.file, 0
            num_bytes += len(part.data)
            if num_bytes > 2 * FILE_BYTES:
                raise CommandError(f"the coordinator sent more than {2 * FILE_BYTES} bytes of {name}")
            with (folder / name).open("ab") as file:
                file.write(part.data)

    ask(state, fetch)
