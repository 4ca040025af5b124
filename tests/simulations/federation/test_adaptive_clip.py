"""A clip norm that follows the updates, in a simulated run, also an interrupted one."""

import numpy as np

from atoll.operations.load import load_user_task
from atoll.simulations.federation.run import opened
from tests.simulations.federation.simulating import model, settings, simulate

SETTINGS = (
    *("rounds=12", "round.cohort_size=4", "aggregation.weighting=uniform", "evaluation.server_every=0"),
    *("privacy.epsilon=1e8", "privacy.delta=1e-5", "privacy.clip_norm=100", "privacy.noise_multiplier=0.001"),
    *("privacy.clip=adaptive", "privacy.clip_learning_rate=1.0", "privacy.clip_sigma=0.01"),
)


def norms(lines):
    return [line["clip_norm"] for line in lines]


def test_the_norm_comes_down_to_the_lengths_of_the_updates(tmp_path):
    _, lines = simulate(tmp_path / "run", *SETTINGS)
    found = norms(lines)
    assert found[0] == 100.0
    np.testing.assert_allclose(np.diff(np.log(found[:5])), -0.5, atol=0.05)  # all are shorter: exp(-(1 - 1/2))
    assert found[-1] < 5.0


def test_an_interrupted_run_continues_with_its_norm(tmp_path):
    _, whole = simulate(tmp_path / "whole", *SETTINGS)
    file = settings(*SETTINGS)
    task = load_user_task(file.task)

    def stop(line):
        if line["round"] == 5:
            federation.interrupt()

    with opened(file, task, tmp_path / "part", on_round=stop, is_fresh=False) as federation:
        federation.run()
    _, lines = simulate(tmp_path / "part", *SETTINGS)
    assert norms(lines) == norms(whole)
    for name, array in model(tmp_path / "whole", 12).items():
        assert np.array_equal(array, model(tmp_path / "part", 12)[name])
