"""The gRPC handlers: they translate, hand over, and answer. No rule of a round lives here."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.channel import PROTOCOL
from atoll.protocol.settings import ConfigError, load_text
from atoll.protocol.vocabulary import ClientId, FailureReason, LossReason, RoundId, RunId, Version
from atoll.server.config import RunFile
from atoll.server.coordinator import Coordinator, OperatorError, UnknownRun
from atoll.server.downloads import BadRequest, send_version
from atoll.server.events import ClientEvaluated, ClientFailed, Profile
from atoll.server.hub import Connection
from atoll.server.messages import sums_of
from atoll.server.uploads import receive_update

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
NAME_MAX = 200
TASKS_MAX = 100
WORKING_ON_MAX = 1000
DETAIL_MAX = 2000
METRICS_MAX = 100


class CoordinatorService(rpc.CoordinatorServicer):
    """What clients call."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Session(
        self, requests: AsyncIterator[pb.ClientMessage], context: Context
    ) -> AsyncIterator[pb.ServerMessage]:
        """The control stream of one client, from Hello to its end."""
        first = await anext(requests, None)
        if first is None:
            return
        if (fault := _fault_of_hello(first)) is not None:
            await context.abort(*fault)
        connection = _connection(first.hello)
        if not self._coordinator.has_room_for(connection.client_id):
            most = self._coordinator.config.max_connections
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{most} clients are connected: try again later")
        self._coordinator.join(connection, first.hello)
        reader = self._coordinator.spawn(self._read(requests, connection))
        try:
            while (message := await connection.outbox.get()) is not None:
                yield message
            await context.abort(grpc.StatusCode.ABORTED, connection.why)
        finally:
            reader.cancel()
            self._coordinator.leave(connection)

    async def _read(self, requests: AsyncIterator[pb.ClientMessage], connection: Connection) -> None:
        coordinator, client_id = self._coordinator, connection.client_id
        try:
            async for message in requests:
                if connection.is_closing:
                    return  # a newer stream of this client has taken over
                coordinator.heard(client_id)
                match message.WhichOneof("message"):
                    case "failed":
                        self._failed(client_id, message.failed)
                    case "evaluated":
                        self._evaluated(client_id, message.evaluated)
                    case "goodbye":
                        coordinator.lost([client_id], LossReason.LEFT)
                    case _:
                        pass
        except grpc.aio.AioRpcError as error:
            logger.debug("the stream of %s broke: %s", client_id, error.details())
        connection.close("the client ended its stream")

    def _failed(self, client_id: ClientId, failed: pb.Failed) -> None:
        run = self._coordinator.runs.get(RunId(failed.run_id))
        if run is None or failed.reason not in set(FailureReason):
            logger.warning("%s reported a failure %r of run %r: ignored", client_id, failed.reason, failed.run_id)
            return
        reason, detail = FailureReason(failed.reason), failed.detail[:DETAIL_MAX]
        run.post(ClientFailed(client_id, RoundId(failed.round_id), reason, detail))

    def _evaluated(self, client_id: ClientId, evaluated: pb.Evaluated) -> None:
        run = self._coordinator.runs.get(RunId(evaluated.run_id))
        if run is None or len(evaluated.statistics) > METRICS_MAX:
            return
        sums = None if evaluated.error else sums_of(evaluated.statistics)
        run.post(ClientEvaluated(client_id, Version(evaluated.version), sums, evaluated.error[:DETAIL_MAX]))

    async def GetManifest(self, request: pb.ManifestRequest, context: Context) -> pb.ManifestReply:
        """The manifest of a version that is still kept."""
        run = self._coordinator.runs.get(RunId(request.run_id))
        version = run.reducer.by_digest(request.digest) if run else None
        if version is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"run {request.run_id!r} has no version {request.digest!r}")
        assert version is not None
        return pb.ManifestReply(manifest=version.manifest_bytes)

    async def Download(
        self, requests: AsyncIterator[pb.DownloadRequest], context: Context
    ) -> AsyncIterator[pb.DownloadReply]:
        """Pieces of a version, as fast as the client grants credit."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("request") != "open":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be DownloadOpen")
        assert first is not None
        run = self._coordinator.runs.get(RunId(first.open.run_id))
        version = run.reducer.by_digest(first.open.digest) if run else None
        if version is None:
            detail = f"run {first.open.run_id!r} has no version {first.open.digest!r}"
            await context.abort(grpc.StatusCode.NOT_FOUND, detail)
        assert version is not None
        try:
            async for reply in send_version(version, first.open, requests, self._coordinator.compute):
                yield reply
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def Upload(
        self, requests: AsyncIterator[pb.UploadRequest], context: Context
    ) -> AsyncIterator[pb.UploadReply]:
        """An update, from its manifest to the verdict."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("request") != "open":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be UploadOpen")
        assert first is not None
        try:
            async for reply in receive_update(self._coordinator, first.open, requests):
                yield reply
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OSError as error:
            logger.error("an upload cannot be stored: %s", error)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"cannot be stored now: {error.strerror or error}")


class AdminService(rpc.AdminServicer):
    """What the operator's own commands call, on loopback."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def StartRun(self, request: pb.StartRunRequest, context: Context) -> pb.RunReply:
        """Host one more run; it begins when those before it have ended."""
        try:
            config = load_text(RunFile, request.config_toml, list(request.overrides), name="the run")
            run_id = await self._coordinator.add_run(config.run)
        except (ConfigError, OperatorError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.RunReply(run_id=run_id, state=self._coordinator.state_of(run_id))

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.RunReply:
        """End a run; a round that already aggregates is committed first."""
        return await self._change(context, request.run_id, request.reason or "stopped by the operator")

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Context) -> pb.RunReply:
        """Reopen a stopped or failed run."""
        return await self._change(context, request.run_id, None)

    async def _change(self, context: Context, run_id: str, stop_reason: str | None) -> pb.RunReply:
        try:
            if stop_reason is None:
                await self._coordinator.resume_run(RunId(run_id))
            else:
                await self._coordinator.stop_run(RunId(run_id), stop_reason[:DETAIL_MAX])
        except UnknownRun as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except OperatorError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.RunReply(run_id=run_id, state=self._coordinator.state_of(RunId(run_id)))


def _fault_of_hello(message: pb.ClientMessage) -> tuple[grpc.StatusCode, str] | None:
    if message.WhichOneof("message") != "hello":
        return grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello"
    hello = message.hello
    if hello.protocol != PROTOCOL:
        detail = f"protocol {hello.protocol} is not {PROTOCOL}: update the older side ({hello.software[:80]!r})"
        return grpc.StatusCode.FAILED_PRECONDITION, detail
    if not (1 <= len(hello.client_id) <= NAME_MAX and hello.client_id.isprintable()):
        return grpc.StatusCode.INVALID_ARGUMENT, f"client_id must have 1 to {NAME_MAX} printable characters"
    if not 1 <= len(hello.session) <= NAME_MAX or len(hello.label) > NAME_MAX:
        return grpc.StatusCode.INVALID_ARGUMENT, f"session and label have at most {NAME_MAX} characters"
    if len(hello.tasks) > TASKS_MAX or len(hello.working_on) > WORKING_ON_MAX:
        return grpc.StatusCode.INVALID_ARGUMENT, f"at most {TASKS_MAX} tasks and {WORKING_ON_MAX} rounds"
    return None


def _connection(hello: pb.Hello) -> Connection:
    profile = Profile(min(hello.num_examples, 2**53), hello.label)
    return Connection(ClientId(hello.client_id), hello.session, frozenset(hello.tasks), profile)
