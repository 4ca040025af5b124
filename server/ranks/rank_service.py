"""The gRPC service that an aggregation rank offers to clients."""

import logging
from collections.abc import AsyncIterator

import grpc

from atoll.ground.durable import DiskFull, told_outside
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import ClientId, Digest, RunId
from atoll.protocol.wire.bulk_messages import DownloadMessage, UploadMessage
from atoll.server.audit.calls import caller_of
from atoll.server.errors import StoreCorrupted
from atoll.server.ranks.fetch import NoSuchVersion, NotFetched
from atoll.server.ranks.rank import CoordinatorAway, Rank
from atoll.server.transfers.downloads import BadRequest, NotHeld, send_version
from atoll.server.transfers.timeouts import Silent, opening
from atoll.server.transport.interceptor import Context

logger = logging.getLogger(__name__)


class AggregatorService:
    """Data plane of a rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    async def Download(
        self, requests: AsyncIterator[pb.DownloadRequest], context: Context
    ) -> AsyncIterator[DownloadMessage]:
        """Send pieces of a version that this rank owns."""
        opened = (await opening(requests, context, "DownloadOpen")).open
        try:
            version = await self._rank.version(RunId(opened.run_id), Digest(opened.digest))
            client_id = ClientId(caller_of(context).name)
            signs = self._rank.uploads.arrivals.signs_of(requests, client_id)
            async for reply in send_version(version, opened, signs):
                self._rank.sent_bytes += len(reply.data)
                yield reply
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (FileNotFoundError, NotHeld, NoSuchVersion) as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except (NotFetched, StoreCorrupted) as error:
            if not isinstance(error.__cause__, DiskFull):  # logged once, as long as it lasts
                logger.error("a version cannot be sent: %s", error)
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except Silent as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))

    async def Upload(self, requests: AsyncIterator[UploadMessage], context: Context) -> AsyncIterator[pb.UploadReply]:
        """Receive an update of one of this rank's clients, from its manifest to the verdict."""
        opened = (await opening(requests, context, "UploadOpen")).open
        try:
            async for reply in self._rank.uploads.receive(opened, requests):
                yield reply
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Silent as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except CoordinatorAway as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except OSError as error:
            if type(error) is not DiskFull:  # logged once, as long as it lasts
                logger.error("an upload cannot be stored: %s", error)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"cannot be stored now: {told_outside(error)}")
