"""The gRPC services for clients and operators: they translate, delegate and answer, without any rule of a round."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from atoll.ground.durable import DiskFull, told_outside
from atoll.ground.printable import count_of, printable
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.disclosure import Disclosure
from atoll.protocol.identity.names import Role
from atoll.protocol.secure.wire import kind_of, name_of
from atoll.protocol.settings import ConfigError, load_text
from atoll.protocol.vocabulary import ClientId, FailureReason, LossReason, RoundId, RunId, Version
from atoll.protocol.wire.bulk_messages import DownloadMessage, UploadMessage
from atoll.protocol.wire.channel import PROTOCOL
from atoll.server.audit.actions import Action
from atoll.server.audit.calls import caller_of
from atoll.server.config.run import RunFile
from atoll.server.errors import OperatorError, UnknownRun
from atoll.server.following.follow_process import Followers
from atoll.server.hosting.control_streams import CLIENT_ENDED, Connection
from atoll.server.hosting.coordinator import Coordinator
from atoll.server.hosting.messages import NAME_MAX, sums_of
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.identity.enrolments import Enrolments
from atoll.server.identity.membership_services import MembersAdmin
from atoll.server.members.member import Profile
from atoll.server.names.conflicts import Claimant
from atoll.server.rounds.evaluations import NOT_IN_SUM
from atoll.server.rounds.events import ClientEvaluated, ClientFailed
from atoll.server.rounds.relevance import is_asked
from atoll.server.services.reading_service import ReadingAdmin
from atoll.server.transfers.downloads import BadRequest, NotHeld, send_version
from atoll.server.transfers.timeouts import Silent, first_of, opening
from atoll.server.transport.interceptor import Context
from atoll.server.transport.limits import MESSAGES_BURST, MESSAGES_PER_S
from atoll.server.transport.peer import address_of, peer_of
from atoll.server.transport.token_bucket import Bucket
from atoll.server.views.view_process import Viewer
from atoll.task.metrics import METRICS_MAX, SUMS_MAX, only_finite, why_refused
from atoll.tensors.codecs.names import known_codecs

logger = logging.getLogger(__name__)

HELLO_BYTES_MAX = 256 * 1024
TASKS_MAX = 100
SOFTWARE_MAX = 80
WORKING_ON_MAX = 1000
DETAIL_MAX = 2000

STATISTICS_S_MAX = 86_400.0
"""Longest time for the answers to one request for statistics [s]."""

TAKERS = (Role.OWNER, Role.OPERATOR)
"""Roles whose downloads are exports of a model; a client trains on it, and an aggregation rank keeps a part of it."""


class CoordinatorService:
    """gRPC service for clients: control stream, downloads, uploads."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Session(
        self, requests: AsyncIterator[pb.ClientMessage], context: Context
    ) -> AsyncIterator[pb.ServerMessage]:
        """Serve the control stream of one client, from Hello to its end."""
        try:
            first = await first_of(requests)
        except Silent as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        if first is None:
            return
        if (fault := _fault_of_hello(first)) is not None:
            await context.abort(*fault)
        connection, peer = _connection(first.hello, address_of(context.peer())), peer_of(context)
        connection.note_clock(first.hello.clock, time.time())
        connection.certificate_until = peer.expires_at if peer is not None else None
        connection.handler = asyncio.current_task()
        if not self._coordinator.attendance.has_room_for(connection.client_id):
            most = self._coordinator.config.max_connections
            what = f"{count_of(most, 'client is', 'clients are')} connected (max_connections): try again later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        if refusal := self._coordinator.clock_refusal(connection):  # before it joins runs, whose rounds it would fail
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        if refusal := self._coordinator.attendance.refusal_of(connection):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, refusal)
        self._coordinator.attendance.join(connection, first.hello)
        del first  # a Hello can be large, and the connection lasts
        reader = self._coordinator.spawn(self._read(requests, connection))
        try:
            while (message := await connection.outbox.get()) is not None:
                yield self._signed(message, connection.client_id)
            await context.abort(grpc.StatusCode.ABORTED, connection.why)
        finally:
            reader.cancel()
            self._coordinator.attendance.leave(connection)

    def _signed(self, message: pb.ServerMessage, client_id: ClientId) -> pb.ServerMessage:
        checkpoint, signer = self._coordinator.audit.checkpoint, self._coordinator.signer
        kind = message.WhichOneof("message")
        if checkpoint is not None and kind in ("welcome", "invite"):  # sites store it, to detect a truncated log
            getattr(message, kind).audit_checkpoint = str(checkpoint)
        return message if signer is None else signer.sign(message, client_id)

    async def _read(self, requests: AsyncIterator[pb.ClientMessage], connection: Connection) -> None:
        attendance, client_id = self._coordinator.attendance, connection.client_id
        messages, clock = Bucket(MESSAGES_PER_S, MESSAGES_BURST), asyncio.get_running_loop().time
        try:
            async for message in requests:
                if not messages.take(clock()):
                    connection.close(f"more than {MESSAGES_PER_S:g} messages a second ({MESSAGES_BURST} at once)")
                    return
                if connection.is_closing:
                    return  # a newer stream of this client has replaced this one
                attendance.heard(client_id)
                await self._take(message, connection)
        except (grpc.aio.AioRpcError, grpc.aio.AbortError) as error:
            logger.debug("the stream of %s broke: %s", client_id, error)
        except Exception:
            logger.exception("a message of %s could not be handled", client_id, extra={"site": client_id})
        connection.close(CLIENT_ENDED)

    async def _take(self, message: pb.ClientMessage, connection: Connection) -> None:
        attendance, client_id = self._coordinator.attendance, connection.client_id
        match message.WhichOneof("message"):
            case "failed":
                self._failed(client_id, message.failed)
            case "evaluated":
                self._evaluated(client_id, message.evaluated)
            case "give_statistics":
                await self._coordinator.statistics.answered(client_id, message.give_statistics)
            case _ if kind_of(message):
                self._answered(client_id, message)
            case "ready":
                attendance.introduce_again(connection)
            case "goodbye":
                named, _, detail = printable(message.goodbye.why[:DETAIL_MAX]).partition(": ")
                failure = FailureReason(named) if named in set(FailureReason) else None
                attendance.lost([client_id], LossReason.LEFT, failure, detail)
            case "heartbeat":
                connection.note_clock(message.heartbeat.clock, time.time())
                if why := self._coordinator.clock_refusal(connection):  # its clock was set meanwhile: tell the agent
                    self._coordinator.attendance.hub.dismiss(client_id, why)
            case _:
                pass

    def _failed(self, client_id: ClientId, failed: pb.Failed) -> None:
        run = self._coordinator.runs.get(RunId(failed.run_id))
        if run is None or failed.reason not in set(FailureReason):
            what = (client_id, failed.reason[:NAME_MAX], failed.run_id[:NAME_MAX])
            logger.warning("%s reported a failure %r of run %r: ignored", *what, extra={"site": client_id})
            return
        if not run.is_news(client_id, RoundId(failed.round_id)):
            return
        reason, detail = FailureReason(failed.reason), printable(failed.detail[:DETAIL_MAX])
        run.post(ClientFailed(client_id, RoundId(failed.round_id), reason, detail, failed.waits))

    def _answered(self, client_id: ClientId, message: pb.ClientMessage) -> None:
        if name_of(message).purpose == "statistics":
            self._coordinator.statistics.answered_in_sum(client_id, message)
            return
        run = self._coordinator.runs.get(name_of(message).run)
        if isinstance(run, RunDriver) and (event := run.sums.event_of(client_id, message)) is not None:
            run.post(event)

    def _evaluated(self, client_id: ClientId, evaluated: pb.Evaluated) -> None:
        run = self._coordinator.runs.get(RunId(evaluated.run_id))
        if not isinstance(run, RunDriver) or not is_asked(run.machine, client_id, Version(evaluated.version)):
            return
        sums, detail = None, printable(evaluated.error[:DETAIL_MAX])
        if not detail and (sums := sums_of(evaluated.statistics)) is None:
            detail = f"more than {METRICS_MAX} metrics or {SUMS_MAX} sums, or an unprintable or long name of one"
        elif sums is not None:
            sums = only_finite(sums)
            detail = why_refused(sums)
        if sums is not None and run.machine.rules.secure is not None:  # never written: it would be of a single site
            sums, detail = None, NOT_IN_SUM
        named = evaluated.reason if sums is None else ""
        reason = FailureReason(named) if named in set(FailureReason) else None
        terms = Disclosure.read(evaluated.metrics, evaluated.min_sites)
        run.post(ClientEvaluated(client_id, Version(evaluated.version), sums, detail, reason, terms))

    async def GetManifest(self, request: pb.ManifestRequest, context: Context) -> pb.ManifestReply:
        """Return the manifest of a version that is on disk."""
        run = self._coordinator.runs.get(RunId(request.run_id))
        version = run.versions.by_digest(request.digest) if run else None
        if version is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, _no_version(request.run_id, request.digest))
        assert version is not None
        return pb.ManifestReply(manifest=version.manifest_bytes, version=version.version)

    async def Download(
        self, requests: AsyncIterator[pb.DownloadRequest], context: Context
    ) -> AsyncIterator[DownloadMessage]:
        """Send pieces of a version within the credit that the client grants."""
        first = await opening(requests, context, "DownloadOpen")
        run = self._coordinator.runs.get(RunId(first.open.run_id))
        version = run.versions.by_digest(first.open.digest) if run else None
        if version is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, _no_version(first.open.run_id, first.open.digest))
        assert version is not None
        caller = caller_of(context)
        if caller.role in TAKERS:
            what = f"{first.open.run_id} version {version.version}"
            self._coordinator.audit.record(Action.MODEL_EXPORT, what, digests={"model": version.digest}, caller=caller)
        else:
            requests = self._coordinator.arrivals.signs_of(requests, ClientId(caller.name))
        try:
            async for reply in send_version(version, first.open, requests):
                self._coordinator.sent_bytes += len(reply.data)
                yield reply
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (FileNotFoundError, NotHeld):
            await context.abort(grpc.StatusCode.NOT_FOUND, _no_version(first.open.run_id, first.open.digest))
        except Silent as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))

    async def Upload(self, requests: AsyncIterator[UploadMessage], context: Context) -> AsyncIterator[pb.UploadReply]:
        """Receive an update, from its manifest to the verdict."""
        first = await opening(requests, context, "UploadOpen")
        if self._coordinator.ranks is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "updates go to the aggregation ranks")
        try:
            async for reply in self._coordinator.uploads.receive(first.open, requests):
                yield reply
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Silent as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except OSError as error:
            if type(error) is not DiskFull:  # the run waits for space, as its log says
                logger.error("an upload cannot be stored: %s", error)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"cannot be stored now: {told_outside(error)}")


class AdminService(ReadingAdmin, MembersAdmin):
    """Service for the commands of owners, operators and auditors."""

    def __init__(self, coordinator: Coordinator, enrolments: Enrolments | None = None) -> None:
        path, database = coordinator.state.path, coordinator.config.database
        ReadingAdmin.__init__(self, path, Viewer(path, database), Followers(path, database))
        MembersAdmin.__init__(self, enrolments, coordinator.config.aggregators, coordinator.state.database)
        if enrolments is not None:
            enrolments.audit = coordinator.audit
        self._coordinator = coordinator

    async def StartRun(self, request: pb.StartRunRequest, context: Context) -> pb.RunReply:
        """Host one more run; it starts when `max_runs` allows."""
        await self.check_database(context)
        try:
            config = load_text(RunFile, request.config_toml, list(request.overrides), name="the run")
            run_id = await self._coordinator.add_run(config.run)
        except (ConfigError, OperatorError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OSError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"cannot be stored now: {error}")
        message = self._coordinator.namesake_of(run_id)
        return pb.RunReply(run_id=run_id, state=self._coordinator.state_of(run_id), message=message)

    async def CollectStatistics(
        self, request: pb.CollectStatisticsRequest, context: Context
    ) -> pb.CollectStatisticsReply:
        """Ask the connected sites of a planned run's task for statistics; answer when all have answered."""
        try:
            config = load_text(RunFile, request.config_toml, list(request.overrides), name="the run")
            if not 0 < request.deadline_s <= STATISTICS_S_MAX:
                raise OperatorError(
                    f"deadline {request.deadline_s:g} s; allowed: above 0, at most {STATISTICS_S_MAX:g}"
                )
            number = await self._coordinator.statistics.collect(config.run, request.deadline_s)
        except ConfigError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OperatorError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except OSError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"cannot be stored now: {error}")
        return pb.CollectStatisticsReply(number=number)

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.RunReply:
        """End a run; a round being aggregated is committed first."""
        reason = printable(request.reason[:DETAIL_MAX]) or "stopped by the operator"
        return await self._change(context, request.run_id, lambda c, run: c.stop_run(run, reason))

    async def PauseRun(self, request: pb.PauseRunRequest, context: Context) -> pb.RunReply:
        """Pause a run, so that no new round starts."""
        reason = printable(request.reason[:DETAIL_MAX]) or "paused by the operator"
        return await self._change(context, request.run_id, lambda c, run: c.pause_run(run, reason))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Context) -> pb.RunReply:
        """Resume a paused run, or reopen an ended one, with changed settings if the request has any."""
        return await self._change(context, request.run_id, lambda c, run: c.resume_run(run, [*request.overrides]))

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Context) -> pb.RunReply:
        """Delete a run that has ended; only by its id, because this is irreversible."""
        return await self._change(context, request.run_id, lambda c, _: c.delete_run(RunId(request.run_id)))

    async def ListRanks(self, request: pb.ListRanksRequest, context: Context) -> pb.ListRanksReply:
        """List the aggregation ranks, and the bytes that each has received."""
        coordinator = self._coordinator
        rows = coordinator.ranks.rows() if coordinator.ranks is not None else []
        return pb.ListRanksReply(ranks=rows, received_bytes=coordinator.uploads.received_bytes)

    async def _change(
        self, context: Context, run_id: str, change: Callable[[Coordinator, RunId], Awaitable[str]]
    ) -> pb.RunReply:
        await self.check_database(context)
        try:
            found = self._coordinator.named(run_id)
            message = await change(self._coordinator, found)
        except UnknownRun as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except OperatorError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        state = self._coordinator.state_of(found) if found in self._coordinator.runs else "deleted"
        return pb.RunReply(run_id=found, state=state, message=message)


def _no_version(run_id: str, digest: str) -> str:
    return f"run {run_id[:NAME_MAX]!r} has no version {digest[:NAME_MAX]!r}"


def _fault_of_hello(message: pb.ClientMessage) -> tuple[grpc.StatusCode, str] | None:
    if message.WhichOneof("message") != "hello":
        return grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello"
    hello = message.hello
    if hello.protocol != PROTOCOL:
        detail = (
            f"protocol {hello.protocol} is not {PROTOCOL}: update the older side ({hello.software[:SOFTWARE_MAX]!r})"
        )
        return grpc.StatusCode.FAILED_PRECONDITION, detail
    if hello.ByteSize() > HELLO_BYTES_MAX:
        return grpc.StatusCode.INVALID_ARGUMENT, f"a Hello has at most {HELLO_BYTES_MAX} bytes"
    if not (1 <= len(hello.client_id) <= NAME_MAX and hello.client_id.isprintable()):
        return grpc.StatusCode.INVALID_ARGUMENT, f"client_id must have 1 to {NAME_MAX} printable characters"
    if not 1 <= len(hello.session) <= NAME_MAX or len(hello.label) > NAME_MAX:
        return grpc.StatusCode.INVALID_ARGUMENT, f"session and label have at most {NAME_MAX} characters"
    if max(len(hello.process), len(hello.folder)) > NAME_MAX:
        return grpc.StatusCode.INVALID_ARGUMENT, f"process and folder have at most {NAME_MAX} characters"
    if any(len(task) > NAME_MAX for task in hello.tasks):
        return grpc.StatusCode.INVALID_ARGUMENT, f"a task's name has at most {NAME_MAX} characters"
    if len(hello.tasks) > TASKS_MAX or len(hello.working_on) > WORKING_ON_MAX:
        return grpc.StatusCode.INVALID_ARGUMENT, f"at most {TASKS_MAX} tasks and {WORKING_ON_MAX} rounds"
    return None


def _connection(hello: pb.Hello, address: str) -> Connection:
    profile = Profile(min(hello.num_examples, 2**53), hello.label)
    codecs = known_codecs(hello.codecs)
    software = printable(hello.software[:SOFTWARE_MAX])
    name, tasks = ClientId(hello.client_id), frozenset(hello.tasks)
    claimant = Claimant(address, hello.process, hello.folder)
    can = hello.gives_statistics, hello.spreads_parts, hello.takes_messages, hello.takes_notices
    return Connection(
        name, hello.session, tasks, profile, codecs, software, claimant, *can, joins_sessions=hello.joins_sessions
    )
