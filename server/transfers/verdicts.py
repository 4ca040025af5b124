"""The verdict that refuses an update."""

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import RejectReason


def refused(reason: RejectReason, detail: str, *, resend: bool = False) -> pb.Verdict:
    """Make the verdict that refuses an update; `resend` asks the client to send the same update again."""
    return pb.Verdict(accepted=False, reason=reason, detail=detail[:2000], resend=resend)
