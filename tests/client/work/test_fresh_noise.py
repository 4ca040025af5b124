"""The noise of private steps when a round is asked for again: by the real gate, stores, jobs and training of a site.

    attack    the coordinator takes an update, a row of the site is edited, and the round is asked for once more
    kill      the process dies between two steps, and the next one does the round again

With one noise in both trainings the difference of two updates of one step would be the difference of two gradients.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.client.disk.spool import Entry
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.disk.stores import Stores
from atoll.client.policy.gate import Gate
from atoll.client.session.events import Invitation, Trained
from atoll.client.work.jobs import Jobs
from atoll.client.work.runner import Training, TrainOrder
from atoll.protocol.vocabulary import Digest, RoundId, RunId, Version
from atoll.task.deadline import Deadline
from atoll.tensors.safetensors_file import read, write
from atoll.training.private.sampler import PoissonSampler
from atoll.training.worker.bench import Received
from atoll.training.worker.model_bench import ModelBench
from tests.client.fake_coordinator import Version as Model
from tests.client.policy.test_gate import written

pytestmark = pytest.mark.slow

ROWS, STEPS = 8, 4
TERMS = {
    "privacy.unit": "example",
    "privacy.sample_rate": 1.0,  # so that the attack has no luck in it: every row is in every sample
    "privacy.noise_multiplier": 50.0,
    "privacy.clip_norm": 1.0,
    "privacy.epsilon": 8.0,
    "privacy.delta": 1e-3,
}
POLICY = """\
tasks = ["*"]
runs = ["*"]
[[privacy.data]]
name = "rows"
tasks = ["*"]
epsilon_max = 8.0
delta = 1e-3
unit = "example"
"""


def task_of(value: float) -> Task:
    """A task whose last row has the given value."""
    rows = torch.arange(1.0, ROWS + 1)[:, None] / ROWS
    rows[-1] = value
    return Task(
        model=lambda: nn.Linear(1, 1, bias=False),
        data=lambda site, split: TensorDataset(rows, torch.zeros(ROWS, 1)),
        sites=["a"],
        loss=nn.functional.mse_loss,
        local=Local(max_steps=1, batch_size=4, lr=1.0),
    )


class InThisProcess:
    """A runner that trains in this process, with the request of `WorkerRunner`.

    Args:
        value: of the last row of the site.
    """

    def __init__(self, value: float) -> None:
        self.task = task_of(value)

    async def train(self, order: TrainOrder) -> Training:
        bench = ModelBench(self.task, {"site": "a", "local": dict(order.local)})
        request = {"seed": order.seed, "model_seed": order.model_seed, "round_id": order.round_id}
        request |= {"version": order.version, "local": dict(order.local), "noise": order.noise.hex()}
        outcome = bench.train(Received(dict(read(order.model))), request, Deadline.never())
        pieces = write(order.out, outcome.trained.update)
        return Training(
            pieces=tuple(pieces), num_examples=ROWS, work=1.0, statistics={}, seconds=0.0, has_own=False, steps=1
        )


class Site:
    """A site with a budget in a folder, of which one process after the other is alive."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "policy.toml"
        self.path.write_text(POLICY)
        self.start = {"weight": np.full((1, 1), 0.5, np.float32)}
        self.version = Model(self.start)

    def invitation(self, **local: Any) -> Invitation:
        table = json.dumps({"max_steps": 1} | TERMS | local)
        run, digest = RunId("run-1"), Digest(self.version.digest)
        return Invitation(run, RoundId(1), "t", Version(0), digest, 60.0, local=table, algorithm="fedavg", seed=7)

    @contextmanager
    def process(self) -> Any:
        state = StateDirectory(self.folder / "state")
        gate = Gate(self.path, state.path, coordinator="north:7070", noise="n")
        try:
            yield gate, Stores.open(state, spool_max_bytes=1 << 30)
        finally:
            gate.close()
            state.close()

    def trained(self, gate: Gate, stores: Stores, invitation: Invitation, value: float = 1.0) -> Entry:
        """Train for a round as the agent does, from the policy's admission to the finished update in the spool."""
        assert gate.admit(invitation, self.version.manifest).is_allowed
        write(stores.models.path(invitation.model_digest), self.start, durable=False)
        runner: Any = InThisProcess(value)
        nothing: Any = None
        jobs = Jobs("a", stores, runner, nothing, save_seen=lambda: None)
        done = asyncio.run(jobs.train(invitation, 60.0))
        assert isinstance(done, Trained), done
        return stores.spool[done.key]

    def sent(self, gate: Gate, stores: Stores, entry: Entry) -> float:
        """Let an update leave and be answered; return what the coordinator has of it."""
        assert gate.ask_upload(entry).is_allowed
        found = update_in(entry)
        stores.spool.discard(("round", RunId("run-1"), RoundId(1)))
        return found

    @property
    def charges(self) -> int:
        return len([line for line in written(self.folder / "state") if line["action"] == "privacy.charge"])


def update_in(entry: Entry) -> float:
    """The one number of an update in the spool."""
    return float(np.frombuffer(entry.path.read_bytes()[entry.data_start :][:4], np.float32)[0])


def gradient_of(value: float) -> float:
    """The clipped sum of the example gradients at weight 0.5, over the rows: d/dw (w x)^2 = 2 w x^2 = x^2."""
    rows = [*(number / ROWS for number in range(1, ROWS)), value]
    return sum(min(1.0, x * x) for x in rows) / ROWS


def test_a_round_that_is_asked_for_again_after_its_answer_has_other_noise_and_is_charged(tmp_path: Path) -> None:
    told = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        site, updates = Site(folder), []
        for value in (0.0, 1.0):  # the number of rows stays
            with site.process() as (gate, stores):
                updates.append(site.sent(gate, stores, site.trained(gate, stores, site.invitation(), value)))
        assert site.charges == 2
        told.append(abs((updates[0] - updates[1]) - (gradient_of(1.0) - gradient_of(0.0))))
        assert not [*(folder / "state" / "fresh").iterdir()], "bytes of updates that have left"
    # The deviation of a difference is 50 sqrt(2) / 8, so one of 10,000 is as small, and one pair of 100 million.
    assert max(told) > 1e-3, "the difference of both updates is the edited row"


def test_another_question_before_the_answer_has_other_noise_too(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.process() as (gate, stores):
        first = site.sent(gate, stores, site.trained(gate, stores, site.invitation()))
        others = [site.invitation(lr=1.0), site.invitation()]
        found = [first, *(site.sent(gate, stores, site.trained(gate, stores, other)) for other in others)]
    assert len({*found}) == site.charges == 3


def test_an_update_of_which_a_part_may_have_left_is_trained_again_with_other_noise(tmp_path: Path) -> None:
    """The entry in the spool is damaged while it is sent, so that the next process drops it."""
    site, found = Site(tmp_path), []
    for _ in range(2):
        with site.process() as (gate, stores):
            entry = site.trained(gate, stores, site.invitation())
            assert gate.ask_upload(entry).is_allowed
            found.append(update_in(entry))
            entry.path.write_bytes(entry.path.read_bytes()[:-9])
    assert found[0] != found[1]
    assert site.charges == 2


def test_a_training_that_is_killed_between_two_steps_has_the_same_bytes_and_one_charge(tmp_path: Path) -> None:
    killed, whole = Site(tmp_path), []
    died = subprocess.run([sys.executable, "-m", __name__, tmp_path], check=False, timeout=300)
    assert died.returncode == -signal.SIGKILL
    bytes_of = {path.name: path.read_bytes() for path in (tmp_path / "state" / "fresh").iterdir()}
    assert len(bytes_of) == 1, "they are durable before the first step"
    for _ in range(2):  # nothing of the first of them leaves either
        with killed.process() as (gate, stores):
            entry = killed.trained(gate, stores, killed.invitation(epochs=STEPS, max_steps=STEPS))
            whole.append(update_in(entry))
            assert {path.name: path.read_bytes() for path in (tmp_path / "state" / "fresh").iterdir()} == bytes_of
            entry.path.unlink()
    assert whole[0] == whole[1]
    assert killed.charges == 1


def _die_in_step(step: int) -> None:
    """End this process by SIGKILL before the given step of a training, counted from 0."""
    drawn = PoissonSampler.indices

    def indices(self: PoissonSampler, asked: int) -> Any:
        if asked == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return drawn(self, asked)

    PoissonSampler.indices = indices  # type: ignore[method-assign]


if __name__ == "__main__":
    site = Site(Path(sys.argv[1]))
    _die_in_step(2)
    with site.process() as (gate, stores):
        site.trained(gate, stores, site.invitation(epochs=STEPS, max_steps=STEPS))
