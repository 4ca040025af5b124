"""A run or a round in progress, for `--follow`: from a state directory, or from a coordinator on another machine."""

import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from atoll.operations.faults import CommandError
from atoll.operations.place import STATE, is_elsewhere, named_here
from atoll.operations.reporter import note
from atoll.operations.views import open_history

Document = dict[str, Any]

RETRY_MIN_S, RETRY_MAX_S = 0.5, 15.0
"""The wait before a coordinator elsewhere is called again [s]: it doubles up to the second one."""

LINE_BYTES_MAX = 256 * 2**20
"""The longest line of a coordinator, in bytes: the record of a round of 100,000 clients is shorter."""

TERMINAL = ("finished", "failed", "stopped")


class Ended(Exception):
    """Raised when another thread has asked to stop following."""


class Ending:
    """A request of another thread to stop following, obeyed at the next read of the journal."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._cancel: Callable[[], object] = lambda: None

    def ask(self) -> None:
        """Request the end, and cancel the call for which `items` waits."""
        self._asked.set()
        self._cancel()

    def wait(self, seconds: float) -> None:
        """Wait for some seconds; raise `Ended` as soon as the end is asked for."""
        if self._asked.wait(seconds):
            raise Ended

    def cancels(self, cancel: Callable[[], object]) -> None:
        """Set the function that cancels the call for which `items` waits from now on."""
        self._cancel = cancel
        if self._asked.is_set():
            cancel()


def items(
    run: str, state: Path, database: str = "", after: int | None = None, *, ending: Ending | None = None
) -> Iterator[Document]:
    """Yield the items of a run (`server.following`), from the state directory or, without one, the joined coordinator.

    Args:
        run: id or name of the run; empty: the newest run.
        state: the coordinator's state directory.
        database: URL of the PostgreSQL database to read instead of the one that the state directory names.
        after: the entry after which the items begin; None: the newest snapshot.
        ending: the request to end it; None: it ends with the run.

    Raises:
        CommandError: no such run, or the coordinator refuses.
        Ended: the end was asked for.
        OSError: the state directory is missing, damaged, or of a newer version of Atoll.
    """
    ending = ending or Ending()
    if not database and is_elsewhere(state):
        if state != STATE and named_here() is None:
            note(f"there is no {state} here: following at the joined coordinator")
        yield from _from_elsewhere(run, after, ending)
        return
    from atoll.protocol.json_values import plain
    from atoll.server.following.items import document_of
    from atoll.server.following.reader import follow
    from atoll.server.views.views import run_of

    with open_history(state, database) as history:
        for item in follow(history, run_of(history, run), after, wait=ending.wait):
            yield plain(document_of(item))


# ---------------------------------------------------------------- a coordinator elsewhere


def _from_elsewhere(run: str, after: int | None, ending: Ending) -> Iterator[Document]:
    """Yield the items of a run at the joined coordinator; a broken call resumes after the last entry.

    Raises:
        CommandError: the coordinator refuses.
    """
    from atoll.ground.backoff import delay

    rng, attempt, has_begun, has_ended, why = random.Random(), 0, False, False, ""
    while True:
        try:
            for item in _one_call(run, after, ending, has_begun=has_begun):
                attempt, has_begun = 0, True
                if item["kind"] in ("began", "event"):
                    after = item["seq"]
                    run, has_ended = _after(item, run, has_ended)
                yield item
        except _Broken as broken:
            now_why = str(broken)
        else:
            if has_ended:
                return
            now_why = "the coordinator has ended the call before the end of the run"
        if not attempt and now_why != why:
            why = now_why
            yield {"kind": "waiting", "why": f"{why}; trying again"}
        ending.wait(delay(attempt, RETRY_MIN_S, RETRY_MAX_S, rng))
        attempt += 1


class _Broken(Exception):
    """A call of the coordinator broke off; another call may continue it."""


def _after(item: Document, run: str, has_ended: bool) -> tuple[str, bool]:
    """Return the run's id, and whether the run has ended, after an item."""
    here = item["run"]
    return (run, has_ended) if here is None else (here["run"], here["state"] in TERMINAL)


def _one_call(run: str, after: int | None, ending: Ending, *, has_begun: bool) -> Iterator[Document]:
    """Yield the items of a run from one call of the coordinator.

    Raises:
        _Broken: the call was broken off, or the coordinator does not answer.
        CommandError: the coordinator refuses.
    """
    import grpc

    from atoll.operations import admin
    from atoll.protocol import atoll_pb2 as pb
    from atoll.protocol import services as rpc
    from atoll.protocol.identity.names import COORDINATOR

    passing = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    if has_begun:  # an older call may not have ended there yet; and a certificate may have been renewed meanwhile
        passing |= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
    dialer, place = admin.elsewhere()
    is_fresh, address = True, place.admin_address
    try:
        request = pb.FollowRequest(run_id=run, after=after)
    except ValueError as error:
        raise CommandError(f"run {run!r}: {error}") from None
    with dialer.blocking_channel(address, COORDINATOR) as channel:
        try:
            call = rpc.Stub(channel, "Admin").Follow(request)
            ending.cancels(call.cancel)
            for item in documents(reply.lines for reply in call):
                is_fresh = False
                yield item
        except grpc.RpcError as error:
            code = error.code()
            fault = admin.refusal_of(error, address, 0.0, dialer)
            if code is grpc.StatusCode.UNIMPLEMENTED:
                raise CommandError(f"the coordinator at {address} is too old to be followed: update it") from error
            renewed = code is grpc.StatusCode.UNAUTHENTICATED and not is_fresh
            if isinstance(fault, admin.NotTrusted) or not (code in passing or renewed):
                raise fault from error
            raise _Broken(str(fault)) from error


def documents(parts: Iterable[bytes]) -> Iterator[Document]:
    """Yield the objects in a text of one JSON object a line, which comes in parts that end anywhere.

    Raises:
        CommandError: a line is no JSON object, or too long.
    """
    rest = bytearray()
    for part in parts:
        rest += part
        *lines, last = rest.split(b"\n")
        rest = bytearray(last)
        if len(rest) > LINE_BYTES_MAX:
            raise CommandError(f"the coordinator sent a line of more than {LINE_BYTES_MAX} bytes")
        for line in lines:
            try:
                found = json.loads(line)
            except ValueError as error:
                raise CommandError(f"the coordinator's answer is not JSON: {error}") from None
            if not isinstance(found, dict):
                raise CommandError(f"the coordinator's answer is not an object: {bytes(line[:80])!r}")
            yield found
