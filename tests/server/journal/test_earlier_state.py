"""A run that an earlier Atoll began goes on here: its journal, its accepted update, its half upload, its model's bits.

`data/state-a0c3546.tar.gz` is the state directory of a coordinator of the commit a0c3546, made by its own code and
ended by SIGKILL. Round 1 is committed: the clients a and b sent 1 and 3, ten examples each. Round 2 is open: the update
of a (5, thirty examples) is accepted, and 10 bytes of the update of b (-1) are here. The server optimizer has momentum
0.5.
"""

import os
import tarfile
from pathlib import Path

import numpy as np

from atoll.protocol.vocabulary import Fate
from atoll.server.files import incoming
from atoll.tensors.safetensors_file import read
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live

ARCHIVE = Path(__file__).parent / "data" / "state-a0c3546.tar.gz"
TASK = "tests.wire.tasks.four_numbers_task:task"


def unpacked(folder: Path) -> Path:
    """Return the state directory, whose half upload is as young as if the coordinator had just been killed."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for path in (folder / "state").rglob("incoming/*"):
        os.utime(path)
    return folder / "state"


@live
async def test_a_run_of_an_earlier_commit_goes_on_to_the_same_model(tmp_path, monkeypatch):
    monkeypatch.setattr(incoming, "SMALL_BYTES", 0)
    state = unpacked(tmp_path)
    settings = {
        "task": TASK,
        "round__deadline": 31622400.0,
        "round__outage_max": 31622400.0,
        "round__partial_work": "accept",
        "optimizer__name": "fedavgm",
        "optimizer__momentum": 0.5,
    }
    async with running(state, **settings) as it:
        run = it.run.machine
        assert run.ledger.version == 1
        assert run.round.record.round_id == 2
        assert run.round.record.clients["a"].fate is Fate.REPORTED
        async with it.client("a", tasks=(TASK,)), it.client("b", tasks=(TASK,)) as b:
            manifest, data = await b.train(await b.next("invite"), value=-1.0)
            assert (await b.upload(manifest, data, chunk=5)).accepted
            assert b.resumed_at[0] == 10, "the bytes that were here are not sent again"
            await committed(it, 2)
        models = [read(it.run.reducer.version(version).path) for version in (1, 2)]
    start = np.float32(0.0)  # `Tiny.initial` with the run's seed 0
    first = np.float32((10 * 1 + 10 * 3) / 20)
    second = np.float32((30 * 5 + 10 * -1) / 40) + np.float32(0.5) * first
    np.testing.assert_array_equal(models[0]["w"], np.full(4, start + first))
    np.testing.assert_array_equal(models[1]["w"], np.full(4, start + first + second))
