"""A round over real gRPC whose journal is a real PostgreSQL server, which crashes in the middle of it."""

import asyncio
import logging

import grpc
import numpy as np
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.server.views.history import History
from atoll.tensors.safetensors_file import read
from tests.cli.invoking import shown
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_disk import Errors
from tests.wire.test_round import committed, live, report


@live
async def test_server_that_restarts_in_mid_round_keeps_everybody_waiting_and_loses_nothing(
    tmp_path, postgres_server, schema_url
):
    errors = Errors()
    logging.getLogger("atoll.server.journal.postgres").addHandler(errors)
    try:
        async with running(tmp_path / "state", coordinator__database=schema_url, rounds=2) as it:
            async with it.client("a") as a, it.client("b") as b:
                _, first = await report(a, 1.0, num_examples=30)
                assert first.accepted
                invite = await b.next("invite")
                manifest, data = await b.train(invite, value=5.0)
                postgres_server.crash()
                try:
                    upload = asyncio.ensure_future(b.upload(manifest, data))
                    while not errors.messages:
                        await asyncio.sleep(0.01)
                    assert "the journal waits for its database" in errors.messages[0]
                    assert not upload.done(), "an update must not be acknowledged before it is in the journal"
                    await nothing_is_changed_meanwhile(it)
                finally:
                    postgres_server.start()
                assert (await upload).accepted
                await committed(it, 1)
    finally:
        logging.getLogger("atoll.server.journal.postgres").removeHandler(errors)
    async with running(tmp_path / "state") as it:  # the directory knows where its journal is
        async with it.client("a") as a, it.client("b") as b:
            _, verdicts = zip(*await asyncio.gather(report(a), report(b)), strict=True)
            assert all(verdict.accepted for verdict in verdicts)
            await committed(it, 2)
        model = read(it.run.reducer.version(1).path)
        np.testing.assert_array_equal(model["w"], np.full(4, (30 * 1 + 10 * 5) / 40, np.float32))
    assert [record.phase for record in History(tmp_path / "state").rounds("tiny-1")] == ["committed"] * 2
    for source in (["--state", str(tmp_path / "state")], ["--database", schema_url, "--state", "/nowhere"]):
        assert shown("round", "show", "1", *source)["phase"] == "committed"
        assert [found["client"] for found in shown("client", "list", *source)] == ["a", "b"]


async def nothing_is_changed_meanwhile(it):
    """Operators are told at once, rather than when they have given up."""
    async with it.admin() as admin:
        for ask, request in (
            (admin.PauseRun, pb.PauseRunRequest(run_id="tiny-1")),
            (admin.StartRun, pb.StartRunRequest(config_toml='task = "m:t"')),
            (admin.StopRun, pb.StopRunRequest(run_id="tiny-1")),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="nothing was done, as the journal waits for its") as refused:
                await ask(request, timeout=BOUND_S)
            assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
