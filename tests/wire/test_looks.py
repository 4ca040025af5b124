"""Pages of a list over the wire: what a caller gets, and the status of what is no page."""

import json

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from tests.wire.live_coordinator import running
from tests.wire.test_round import live


@live
async def test_a_caller_reads_a_list_page_by_page_and_is_told_what_is_no_page(tmp_path):
    async with running(tmp_path) as it, it.admin() as admin:

        async def look(**fields):
            request = pb.LookRequest(run_id=it.run.run_id, **fields)
            return json.loads(b"".join([part.json async for part in admin.Look(request)]))

        first = await look(view="rounds", count=1, last=True)
        assert [row["round"] for row in first["rows"]] == [1]
        assert first["next"] is None
        assert "next" not in await look(view="rounds"), "an older caller gets all rows"
        assert (await look(view="rounds", count=5, state="abandoned"))["rows"] == []
        for fields, fault in (
            ({"view": "rounds", "count": 0}, "count: got 0; allowed: 1 to 1,000"),
            ({"view": "rounds", "count": 1001}, "count: got 1001; allowed: 1 to 1,000"),
            ({"view": "rounds", "count": 5, "after": "x"}, "after: got 'x'; allowed: the number of a row"),
            ({"view": "rounds", "after": "1"}, "a cursor or a filter needs a count"),
            ({"view": "clients", "count": 5, "prefix": "x" * 257}, "prefix has 257 characters; allowed: at most 256"),
            ({"view": "run", "count": 5}, "the view 'run' is not read by pages"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await look(**fields)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert fault in refused.value.details()
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await look(view="round", number=99)
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND
        assert [row["round"] for row in (await look(view="rounds", count=9))["rows"]] == [1], "the reader lives on"
