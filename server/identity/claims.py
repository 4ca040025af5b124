"""The claims in messages: the client, run, rank or role that each message names, for the guard to check."""

import json
import re
from typing import Any, NamedTuple

from atoll.protocol import atoll_pb2 as pb
from atoll.server.identity.rules import Touches

_UPDATE_HEAD = re.compile(
    rb'\{"base_digest":"[0-9a-f]{64}","base_version":[0-9]{1,20},"client_id":("[^"\\]{1,256}")'
    rb'(?:,"effective_steps":[^,]{1,40})?,"format":'
)
"""Prefix of the canonical bytes of an update's manifest; a parser finds the same client in it."""

SHOWN_MAX = 80
"""Length to which a name is truncated in messages [characters]."""


class Claim(NamedTuple):
    """Name in a message that must belong to the caller: a client, a rank, a run, or a role to grant."""

    touches: Touches
    name: str

    def __str__(self) -> str:
        return repr(self.name[:SHOWN_MAX])


def claim_of(message: Any) -> Claim | None:
    """Return the claim of one message; None if it names nothing, such as a chunk of an already opened upload."""
    match message:
        case pb.ClientMessage() if message.HasField("hello"):
            return Claim(Touches.OWN_NAME, message.hello.client_id)
        case pb.UploadRequest() if message.HasField("open"):
            return Claim(Touches.OWN_NAME, client_of(message.open.manifest))
        case pb.DownloadRequest() if message.HasField("open"):
            return Claim(Touches.OWN_RUNS, message.open.run_id)
        case pb.ManifestRequest():
            return Claim(Touches.OWN_RUNS, message.run_id)
        case pb.RankMessage() if message.HasField("hello"):
            return Claim(Touches.OWN_RANK, str(message.hello.rank))
        case pb.SubmittedUpdate() if message.HasField("opened"):
            return Claim(Touches.OWN_RANK, str(message.rank))
        case pb.UpdatesRequest():
            return Claim(Touches.OWN_RANK, str(message.rank))
        case pb.InviteRequest() | pb.RevokeRequest():
            return Claim(Touches.SITES, message.role)
    return None


def client_of(manifest: bytes) -> str:
    """Return the client that an update's manifest names, without parsing all of it; "" for other bytes."""
    head = _UPDATE_HEAD.match(manifest)
    return str(json.loads(head[1])) if head and head[1].isascii() else ""
