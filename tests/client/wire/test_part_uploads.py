"""The streams of one update: which verdict is the update's, and which streams it ends."""

import asyncio

import grpc
import pytest

from atoll.client.wire.part_uploads import STREAMS_MAX, verdict_on
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.wire.stream import StreamBroken

ACCEPTED, REFUSED = pb.Verdict(accepted=True), pb.Verdict(reason="not_finite")
RESEND = pb.Verdict(reason="digest_mismatch", resend=True)
CUT = StreamBroken(grpc.StatusCode.UNAVAILABLE, "cut")
WRONG = StreamBroken(grpc.StatusCode.INVALID_ARGUMENT, "a chunk does not continue")


class Streams:
    """Sends that end as they are told to, in order; None: the part is kept."""

    def __init__(self, *ends):
        self.ends, self.ended, self.open, self.most = ends, [], 0, 0

    def __iter__(self):
        return (lambda at=at: self._send(at) for at in range(len(self.ends)))

    async def _send(self, at):
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(0.001 * (at + 1))
            end = self.ends[at]
            if end == "hangs":
                await asyncio.Event().wait()
            if isinstance(end, Exception):
                raise end
            self.ended.append(at)
            return end
        finally:
            self.open -= 1


def outcome(*ends):
    streams = Streams(*ends)

    async def run():
        try:
            return await verdict_on(list(streams))
        finally:
            assert streams.open == 0, "every stream has ended"

    return asyncio.run(run()), streams


@pytest.mark.parametrize("verdict", [ACCEPTED, REFUSED])
def test_the_first_verdict_is_the_update_s_and_ends_the_other_streams(verdict):
    found, streams = outcome(None, verdict, "hangs", "hangs")
    assert found == verdict
    assert streams.ended == [0, 1]


def test_a_whole_update_has_one_stream():
    assert outcome(RESEND)[0] == RESEND
    assert outcome(ACCEPTED)[0] == ACCEPTED


def test_no_more_than_some_streams_are_open_at_a_time():
    found, streams = outcome(*[None] * 20, ACCEPTED)
    assert found == ACCEPTED
    assert streams.most == STREAMS_MAX


def test_a_damaged_part_lets_the_others_go_on():
    found, streams = outcome(RESEND, None, None)
    assert found == RESEND
    assert streams.ended == [0, 1, 2]


def test_a_cut_part_lets_the_others_go_on_and_the_upload_comes_again():
    with pytest.raises(StreamBroken, match="cut"):
        outcome(CUT, None, None)
    with pytest.raises(StreamBroken, match="cut"):
        outcome(RESEND, CUT, None)
    assert outcome(CUT, ACCEPTED)[0] == ACCEPTED


def test_a_stream_that_no_repetition_helps_ends_all_at_once():
    with pytest.raises(StreamBroken, match="does not continue"):
        outcome(WRONG, "hangs", "hangs")


def test_all_kept_without_a_verdict_comes_again():
    with pytest.raises(StreamBroken, match="there is no verdict yet") as cut:
        outcome(None, None)
    assert cut.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_spool_that_cannot_be_read_is_no_matter_of_the_network():
    with pytest.raises(FileNotFoundError):
        outcome(FileNotFoundError(2, "gone"), "hangs")
