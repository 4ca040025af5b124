"""The noise of jobs in the benches of all kinds of tasks: by the key of a request, never by a public seed."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Algorithm, Local, Task, Trained
from atoll.ground.noise.generator import SecretGenerator
from atoll.task import noise
from atoll.task.context import Context
from atoll.task.deadline import Deadline
from atoll.task.noise import Noise, noise_of_job
from atoll.task.randomness import seed_everything, seed_from
from atoll.training.worker.bench import Received
from atoll.training.worker.benches import bench_of

KEY, OTHER = bytes(32).hex(), bytes([1] * 32).hex()
JOB = {"op": "train", "seed": 7, "round_id": 3, "version": 2}


def model():
    return nn.Linear(4, 1, bias=False)


def fit(net, data, local, deadline, context):
    with torch.no_grad():
        net.weight.add_(torch.from_numpy(context.secret_rng.normal(size=(1, 4))))
        net.weight.add_(context.secret_rng.fill_normal_(torch.empty(1, 4)))
    return 1.0


def loss(outputs, targets, context):
    return nn.functional.mse_loss(outputs, targets) + outputs.sum() * float(context.secret_rng.normal())


class Noisy(Algorithm):
    def gradients(self, client, gradients):
        return {name: g + client.context.secret_rng.fill_normal_(torch.empty_like(g)) for name, g in gradients.items()}


class Arrays:
    sites = ("north",)

    def initial(self, seed):
        return {"w": np.zeros(4, np.float32)}

    def train(self, parameters, instructions):
        return Trained({"w": instructions.context.secret_rng.normal(size=4).astype(np.float32)}, 5)


def data(site, split):
    return TensorDataset(torch.ones(8, 4), torch.zeros(8, 1)) if split == "train" else None


def task_of(**given):
    return Task(**{"model": model, "data": data, "loss": nn.functional.mse_loss, "sites": ["north"]} | given)


KINDS = {
    "fit": lambda: task_of(fit=fit),
    "loss": lambda: task_of(loss=loss, local=Local(lr=0.1)),
    "hooks": lambda: task_of(algorithm=Noisy(), local=Local(lr=0.1)),
    "arrays": Arrays,
}


@pytest.fixture(params=KINDS)
def trained(request):
    def trained(**given):
        bench = bench_of(KINDS[request.param](), {"site": "north", "noise": given.pop("load", "")})
        received = Received(bench.initial(0))
        update = bench.train(received, JOB | given, Deadline.never()).trained.update
        return np.concatenate([array.ravel() for array in update.values()])

    return trained


def test_repeated_work_draws_the_same_and_no_public_seed_gives_it(trained, capsys) -> None:
    with_key = trained(noise=KEY)
    assert np.array_equal(with_key, trained(noise=KEY)), "after a kill"
    assert np.abs(with_key - trained(noise=OTHER)).min() > 1e-6
    assert capsys.readouterr().err == ""
    for seed in (7, 0):
        assert np.abs(with_key - trained(seed=seed)).min() > 1e-6, "what anyone can draw who knows the seed"


def test_the_worker_of_a_coordinator_has_one_key_for_its_run(trained) -> None:
    assert np.array_equal(trained(load=KEY), trained(load=KEY))
    assert np.abs(trained(load=KEY) - trained(load=KEY, version=3)).min() > 1e-6
    assert np.abs(trained(load=KEY) - trained(load=OTHER)).min() > 1e-6


def test_public_noise_is_repeatable_and_said_once(capsys) -> None:
    noise.tell_public.cache_clear()
    contexts = [Context(seed=3, round=number, site="north") for number in (1, 1, 2)]
    first, again, other = (context.secret_rng.normal() for context in contexts)
    assert first == again != other
    assert capsys.readouterr().err == f"note: {noise.NOT_PRIVATE}\n"


def test_a_context_has_one_generator() -> None:
    """A second one would draw the same numbers, and the difference of two values would have no noise."""
    context = Context(noise=Noise(bytes(32)))
    assert context.secret_rng is context.secret_rng
    assert context.secret_rng.normal() != context.secret_rng.normal()
    assert "noise" not in repr(context), "a key is not printed"


def test_ranks_and_further_steps_have_noise_of_their_own() -> None:
    drawn = set()
    for purpose in ((), ("rank", 0), ("rank", 1), ("rank", 0, "step", 5)):
        narrowed = noise_of_job({"noise": KEY}, {})
        narrowed.narrow(*purpose)
        drawn.add(narrowed.generator().normal())
        assert narrowed.again().generator().normal() in drawn
    assert len(drawn) == 4


def test_generators_seeded_from_a_secret_take_more_than_32_bits_of_it() -> None:
    """Two keys whose numbers agree in the first 32 bits of each seed would otherwise seed alike: here, all states."""
    states = []
    for key in (bytes(32), bytes(32), bytes([1] * 32)):
        seed_everything(0)
        seed_from(SecretGenerator(key))
        states.append((random.random(), np.random.random(), float(torch.rand(()))))
        words = torch.get_rng_state()[24 : 24 + 8 * 624].numpy().view("<u8")
        assert len(set(words.tolist())) > 600
    assert states[0] == states[1]
    assert not set(states[0]) & set(states[2])
