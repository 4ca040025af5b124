"""What an aggregation rank learns from the coordinator before an update's bytes: their words may be random."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.server.files.run_store import RunStore
from atoll.server.ranks.rank import RemoteJudge


@pytest.mark.parametrize("has_words", [True, False])
def test_a_rank_inspects_no_values_of_masked_updates(tmp_path: Any, has_words: bool) -> None:
    store = RunStore(tmp_path, has_files_only=True)

    async def open_update(_: pb.UploadOpen) -> pb.OpenedUpdate:
        return pb.OpenedUpdate(has_words=has_words)

    rank: Any = SimpleNamespace(
        aggregation=SimpleNamespace(OpenUpdate=open_update),
        place=SimpleNamespace(rank=1),
        run=lambda _: SimpleNamespace(store=store),
    )
    manifest: Any = SimpleNamespace(run_id="digits-1")
    assert asyncio.run(RemoteJudge(rank, manifest, pb.UploadOpen()).before_bytes()) is None
    assert store.has_values is not has_words
