from collections.abc import Iterable

import numpy as np
import pytest

from atoll.parallel.arrays import Arrays
from atoll.simulations.engines.batched import Batched
from tests.simulations.engines.cases import BATCHABLE, Case, all_trained, first_version, two_rounds


def flat(arrays: Arrays, names: Iterable[str]) -> np.ndarray:
    return np.concatenate([arrays[name].ravel() for name in names] or [np.zeros(0)])


@pytest.mark.parametrize("case", BATCHABLE, ids=lambda case: case.name)
def test_it_agrees_with_a_deployed_client(case: Case) -> None:
    training = case.training()
    engine = Batched(training, at_once=3)
    version = first_version(training)
    rounding = 5e-7 * np.linalg.norm(flat(version, version))  # of the weights themselves
    if case.algorithm == "scaffold":
        rounding /= training.local.lr  # a control variate is what they have moved over the rate
    for found, expected in two_rounds(case, lambda version, jobs: all_trained(engine.train(version, jobs)), training):
        for ours, theirs in ((found.update, expected.trained.update), (found.own, expected.own)):
            assert ours.keys() == theirs.keys()
            distance = np.linalg.norm(flat(ours, theirs) - flat(theirs, theirs))
            assert distance <= 1e-5 * np.linalg.norm(flat(theirs, theirs)) + rounding
        for name, sums in expected.trained.statistics.items():
            np.testing.assert_allclose(found.statistics[name], sums, rtol=1e-5)
        assert (found.num_examples, found.work) == (expected.trained.num_examples, expected.trained.work)
        assert found.report == expected.report
