"""The verdict on an update that is refused."""

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import RejectReason


def refused(reason: RejectReason, detail: str, *, resend: bool = False) -> pb.Verdict:
    """The verdict on an update that does not count."""
    return pb.Verdict(accepted=False, reason=reason, detail=detail[:2000], resend=resend)
