"""SCAFFOLD in a real coordinator: the control variate is a tensor of every version, and outlives a restart."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import FailureReason, Phase
from atoll.server.errors import OperatorError
from atoll.tensors.layout import pieces_in_order
from atoll.tensors.safetensors_file import read
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live

TASK = str(Path(__file__).parents[1] / "federation" / "quadratics_task.py") + ":task"
TASKS = {"tasks": ("quadratics_task:task",)}
SCAFFOLD = {
    "task": TASK,
    "rounds": 9,
    "aggregation__algorithm": "scaffold",
    "aggregation__num_clients": 5,
    "optimizer__lr": 0.5,
}


async def send(client, invite, control, **claims):
    """Ones for the model, `control` for the variate."""
    manifest, data = await client.train(invite, **claims)
    parts = {}
    for piece in manifest.pieces:
        parts[piece.tensor], data = data[: piece.num_bytes], data[piece.num_bytes :]
    parts["control/x"] = np.array([control], np.float32).tobytes()
    pieces = tuple(replace(p, sha256=hashlib.sha256(parts[p.tensor]).hexdigest()) for p in manifest.pieces)
    verdict = await client.upload(replace(manifest, pieces=pieces), b"".join(parts[p.tensor] for p in pieces))
    assert verdict.accepted, verdict


def version(it, number):
    return read(it.run.reducer.store.version_path(number))


@live
async def test_variates_count_alike_over_all_clients_and_never_go_through_the_optimizer(tmp_path):
    async with running(tmp_path / "state", **SCAFFOLD) as it:
        assert version(it, 0)["control/x"].tolist() == [0.0]
        async with it.client("a", **TASKS) as a, it.client("b", **TASKS) as b:
            invites = await asyncio.gather(a.next("invite"), b.next("invite"))
            assert [(i.algorithm, i.counted_round) for i in invites] == [("scaffold", 0)] * 2
            await asyncio.gather(send(a, invites[0], 3.0, num_examples=1000), send(b, invites[1], 8.0, num_examples=1))
            await committed(it, 1)
    async with running(tmp_path / "state", **SCAFFOLD) as it:
        assert version(it, 1)["control/x"].tolist() == [np.float32((3 + 8) / 5)]
        assert version(it, 1)["x"].tolist() == [10.5]
        async with it.client("a", **TASKS) as a, it.client("b", **TASKS) as b:  # who may have been invited before
            assert [(await client.next("invite")).counted_round for client in (a, b)] == [1, 1]


@live
async def test_an_accepted_variate_of_an_abandoned_round_counts_for_nobody(tmp_path):
    async with running(tmp_path / "state", **SCAFFOLD) as it:
        async with it.client("a", **TASKS) as a, it.client("b", **TASKS) as b:
            invites = await asyncio.gather(a.next("invite"), b.next("invite"))
            await send(a, invites[0], 3.0)
            failed = pb.Failed(run_id=invites[1].run_id, round_id=1, reason=FailureReason.TRAINING_FAILED)
            await b.control.write(pb.ClientMessage(failed=failed))
            again = await asyncio.gather(a.next("invite"), b.next("invite"))
            assert it.run.machine.record_of(1).phase is Phase.ABANDONED
            assert [(i.round_id, i.counted_round) for i in again] == [(2, 0)] * 2
            await asyncio.gather(send(a, again[0], 4.0), send(b, again[1], -1.0))
            await committed(it, 1)
        assert version(it, 1)["control/x"].tolist() == [np.float32((4 - 1) / 5)]


@live
async def test_a_variate_that_is_encoded_is_refused_before_a_byte(tmp_path):
    async with running(tmp_path / "state", **SCAFFOLD, aggregation__codec="bf16") as it:
        async with it.client("a", **TASKS, codecs=["bf16"]) as a, it.client("b", **TASKS):
            manifest, _ = await a.train(await a.next("invite"))
            pieces = (
                replace(piece, codec="bf16", encoded_bytes=2) if piece.tensor == "control/x" else piece
                for piece in manifest.pieces
            )
            verdict = await a.upload(replace(manifest, pieces=pieces_in_order(pieces)), b"")
            assert (verdict.accepted, verdict.reason) == (False, "wrong_codec")
            assert verdict.detail == "'control/x' is encoded with bf16; allowed of control variates: plain values"


@live
async def test_local_settings_that_break_it_are_refused_before_the_run_begins(tmp_path):
    wrong = {"local__momentum": 0.5, "local__clip_norm": 1.0}
    with pytest.raises(OperatorError, match=r"local\.momentum must be 0\.0 .*local\.clip_norm must be None"):
        async with running(tmp_path / "state", **SCAFFOLD, **wrong):
            raise AssertionError("it began")
