import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.teaching.critical_batch import CriticalBatch, fit_critical_batch
from tests.later import later

optimize = later("scipy.optimize")

BATCHES = [8, 16, 32, 64, 128, 256, 512, 1024]


def test_at_the_critical_batch_both_costs_are_twice_their_least() -> None:
    law = CriticalBatch(min_steps=100.0, min_examples=100_000.0)
    assert law.batch == 1000.0
    assert (law.steps(1000), law.examples(1000)) == (200.0, 200_000.0)
    assert (law.steps(250), law.examples(250)) == (500.0, 125_000.0)  # 5 S_min and 1.25 E_min


@settings(deadline=None, max_examples=40)
@given(critical=st.floats(8, 1024), min_steps=st.floats(1, 1e5))
def test_a_law_is_found_in_what_follows_it(critical: float, min_steps: float) -> None:
    law = CriticalBatch(min_steps, critical * min_steps)
    found = fit_critical_batch({batch: law.steps(batch) for batch in BATCHES})
    assert found.batch == pytest.approx(critical, rel=1e-5)
    assert found.min_steps == pytest.approx(min_steps, rel=1e-5)
    for batch in BATCHES:
        product = (found.steps(batch) / found.min_steps - 1) * (found.examples(batch) / found.min_examples - 1)
        assert product == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_noisy_steps_give_what_scipy_s_least_squares_give(seed: int) -> None:
    rng, law = np.random.default_rng(seed), CriticalBatch(60.0, 60.0 * 90)
    steps = {batch: law.steps(batch) * float(np.exp(rng.normal(0, 0.1))) for batch in BATCHES}
    batches, logs = np.array(BATCHES), np.log(list(steps.values()))
    solved = optimize.least_squares(
        lambda x: logs - np.log(np.exp(x[0]) + np.exp(x[1]) / batches), x0=[3.0, 8.0], xtol=1e-12, ftol=1e-12
    )
    found = fit_critical_batch(steps)
    assert [found.min_steps, found.min_examples] == pytest.approx(np.exp(solved.x), rel=1e-4)
    assert 40 < found.batch < 200


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ({8: 100.0, 16: 50.0, 32: 25.0, 64: 12.5}, "above the largest batch"),
        ({8: 100.0, 16: 100.0, 32: 100.0}, "below the smallest batch"),
        ({8: 100.0, 16: 50.0}, "at least three batches"),
        ({8: 100.0, 16: 50.0, 32: 0.0}, "at least three batches with positive steps"),
    ],
)
def test_steps_without_a_bend_are_refused(steps: dict[int, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fit_critical_batch(steps)
