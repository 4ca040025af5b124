"""The jobs of an agent that is stopped."""

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.client.session.events import EvaluationRequest, Invitation
from atoll.client.work.jobs import Jobs
from atoll.client.work.runner import RunnerFailed, Training
from atoll.protocol.vocabulary import FailureReason
from atoll.tensors.layout import Tensor
from atoll.tensors.safetensors_file import write
from atoll.tensors.secure.masked_layout import layout_digest
from atoll.tensors.secure.plan import Encoding
from tests.client.fake_coordinator import Instant


class StoppedAtOnce(Instant):
    """A runner whose training never ends, and whose job is cancelled as soon as the training has begun."""

    async def train(self, order: Any) -> Any:
        self.training = asyncio.current_task()
        self.job.cancel()
        self.go.clear()
        return await super().train(order)


class Same:
    """Fresh bytes that are always the same."""

    def made(self, *_: Any) -> bytes:
        return bytes(32)


def stores_in(folder: Path, **given: Any) -> Any:
    given = {"spool": None, "encoded": None, "residuals": None, "work": folder, "noise_secret": bytes(32)} | given
    given |= {"fresh": given.get("fresh", Same())}
    return SimpleNamespace(**given)


async def is_left_behind(folder: Path) -> bool:
    runner = StoppedAtOnce()
    state = SimpleNamespace(find=lambda *_: None)
    models = SimpleNamespace(path=lambda digest: folder / digest)
    stores = stores_in(folder, models=models, client_state=state)
    jobs = Jobs("north", stores, runner, None, save_seen=lambda: None)  # type: ignore[arg-type]
    invitation: Any = Invitation(run_id="run", round_id=1, task="t", base_version=0, model_digest="m", time_left=9.0)
    runner.job = asyncio.ensure_future(jobs.train(invitation, 9.0))
    with pytest.raises(asyncio.CancelledError):
        await runner.job
    for _ in range(3):
        await asyncio.sleep(0)
    return not runner.training.cancelled()


def test_a_job_that_is_stopped_as_it_begins_leaves_no_training_behind(tmp_path: Path) -> None:
    """Its error, when the worker is killed, would be in the agent's log with a traceback."""
    assert not asyncio.run(is_left_behind(tmp_path))


class Noted(Instant):
    """A runner that notes the orders, and fails."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[Any] = []

    async def train(self, order: Any) -> Any:
        self.orders.append(order)
        raise RunnerFailed(FailureReason.TRAINING_FAILED, "noted")

    evaluate = message = train


def test_noise_has_the_key_of_its_work(tmp_path: Path) -> None:
    """The same after a kill, if steps are accounted; another for another round, model, run, site, work or state.

    Of two trainings with one noise and other settings the difference would have no noise.
    """

    def noise_of(secret: bytes = bytes(32), site: str = "north", what: str = "train", **changed: Any) -> bytes:
        runner, found = Noted(), SimpleNamespace(find=lambda *_: None)
        models = SimpleNamespace(path=lambda digest: tmp_path / digest)
        stores = stores_in(tmp_path, models=models, client_state=found, noise_secret=secret)
        jobs = Jobs(site, stores, runner, None, save_seen=lambda: None)  # type: ignore[arg-type]
        fields = {"run_id": "run", "task": "t", "model_digest": "m"}
        if what == "evaluate":
            known: Any = {**fields, "version": 1, "time_left": 9.0} | changed
            request: Any = EvaluationRequest(**known)
            asyncio.run(jobs.evaluate(request, 9.0))
        else:
            fields |= {"round_id": 1, "base_version": 0, "time_left": 9.0, "message": "" if what == "train" else what}
            request = Invitation(**fields | changed)  # type: ignore[arg-type]
            asyncio.run((jobs.train if what == "train" else jobs.answer)(request, 9.0))
        assert "noise=" not in repr(runner.orders[0]), "a key is not printed"
        return runner.orders[0].noise

    terms = '{"privacy.unit": "example"}'
    accounted = partial(noise_of, local=terms)
    assert accounted() == accounted()
    assert noise_of() != noise_of()
    others = [
        accounted(),
        *(accounted(round_id=2), accounted(model_digest="n"), accounted(run_id="other"), accounted(site="south")),
        *(noise_of(local=terms[:-1] + ', "lr": 0.5}'), accounted(seed=7), accounted(counted_round=1)),
        accounted(algorithm="scaffold"),
        *(
            accounted(what="query"),
            accounted(what="train.more"),
            accounted(what="evaluate"),
            accounted(bytes([1] * 32)),
        ),
    ]
    assert len({*others}) == len(others)


def of_a_sum(folder: Path, runner: Any, *, tensors: Any = None, site: str = "north", **changed: Any) -> Any:
    """Train for a secure sum; return what the job ends with."""
    write(folder / "m", {"w": np.zeros(4, np.float32)}, durable=False)
    write(folder / "n", {"w": np.ones(4, np.float32)}, durable=False)
    stores = stores_in(
        folder,
        models=SimpleNamespace(path=lambda digest: folder / digest),
        client_state=SimpleNamespace(find=lambda *_: None),
    )
    layout = layout_digest(tensors or (Tensor("w", "F32", (4,)),), ())
    terms = SimpleNamespace(
        **{"layout": layout, "metrics": (), "bits": 32, "clip_norm": 1.0, "examples_max": 100, "attempt": 1},
        **{"approved": b"", "ranges": "", "privacy": ""},
    )
    fields = {"run_id": "run", "task": "t", "model_digest": "m", "round_id": 1, "base_version": 0, "time_left": 9.0}
    jobs = Jobs(site, stores, runner, None, save_seen=lambda: None)  # type: ignore[arg-type]
    return asyncio.run(jobs.train(Invitation(**{**fields, "secure": terms, **changed}), 9.0))  # type: ignore[arg-type]


def test_the_rounding_of_a_mesh_has_the_key_of_its_update(tmp_path: Path) -> None:
    """Repeated after a kill it is no second rounding; every other update has other numbers, and so has the noise."""

    def order_of(**changed: Any) -> Any:
        of_a_sum(tmp_path, runner := Noted(), **changed)
        return runner.orders[0]

    first = order_of()
    assert first.encode.encoding == Encoding(bits=32, clip_norm=1.0, exponents=(0,), examples_max=100)
    assert order_of().encode.rounding == first.encode.rounding
    assert "rounding=" not in repr(first), "a key is not printed"
    changes: list[Any] = [{"round_id": 2}, {"run_id": "other"}, {"model_digest": "n"}, {"site": "south"}]
    keys = {first.encode.rounding, first.noise, *(order_of(**changed).encode.rounding for changed in changes)}
    assert len(keys) == 2 + len(changes)


def test_terms_of_other_tensors_cost_no_training(tmp_path: Path) -> None:
    failed = of_a_sum(tmp_path, runner := Noted(), tensors=(Tensor("w", "F32", (5,)),))
    assert (failed.reason, failed.detail) == ("session_refused", "the terms are of other tensors than the model's")
    failed = of_a_sum(tmp_path, runner, ranges=(0, 0))
    assert (failed.reason, failed.detail) == ("session_refused", "the terms' encoding: 2 ranges for 1 float tensor")
    assert runner.orders == []


def test_parts_that_ranks_have_not_encoded_are_refused(tmp_path: Path) -> None:
    class Older(Instant):
        """Ranks of another machine with another version of Atoll."""

        async def train(self, order: Any) -> Any:
            return Training(num_examples=1, work=1.0, statistics={}, seconds=0.1, pieces=(), parts=((),))

    failed = of_a_sum(tmp_path, Older())
    assert failed.reason == "session_refused"
    assert failed.detail.startswith("the ranks have not encoded their parts: they run another version of Atoll")
