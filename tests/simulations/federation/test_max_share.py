"""The cap on a site's share in a simulated run: in the mean of the updates, and in the metrics of evaluations."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import atoll
from tests.simulations.federation.test_fractional_weights import InArrays, of_factor


def rows(site: str, split: str) -> Any:
    """Return 8 rows of class 0 at the large site and 2 of class 1 at the small one, of both splits."""
    count, label = (8, 0) if site == "large" else (2, 1)
    return TensorDataset(torch.ones(count, 2), torch.full((count,), label))


METRIC = {"first": lambda outputs, targets: ((targets == 0).sum(), len(targets))}
TASK = replace(of_factor(1.0), data=rows, metrics=METRIC)


def run(task: Any, share: float, engine: str = "sequential", **settings: Any) -> Any:
    given = {"round.cohort_size": 2, "simulation.engine": engine, "round.max_share": share, **settings}
    return atoll.simulate(task, rounds=1, progress=False, set=given)


@pytest.mark.parametrize(("share", "large"), [(1.0, 0.8), (0.8, 0.8), (0.75, 0.75), (0.5, 0.5)])
def test_no_update_has_more_than_its_share_of_the_mean(share: float, large: float) -> None:
    """w = (w_large - w_small) / 2 with the shares of both; 0.75 of the total is 6 beside 2."""
    for task, engine in ((of_factor(1.0), "sequential"), (of_factor(1.0), "batched"), (InArrays(1), "sequential")):
        found = run(task, share, engine)
        assert found.model()["w"][0] == pytest.approx(large - 0.5, abs=1e-7)
        (line,) = found.report.rounds
        capped = {"weight": 2 * large / (1 - large), "clients": {"large": 8}}
        assert line.get("capped") == (capped if large < 0.8 else None)


def test_no_site_has_more_than_its_share_of_a_metric_that_decides() -> None:
    task, watched = TASK, {"evaluation.clients_every": 1, "evaluation.server_every": 0}
    (line,) = run(task, 0.5, **watched).report.rounds
    assert line["clients"]["first"] == 0.5  # of 8 of 8 and 0 of 2, as much each
    assert line["capped"]["metrics"] == {
        "large": "metric 'first': its weight 8 counts as 2 (max_share 0.5); "
        "metric 'loss': its weight 8 counts as 2 (max_share 0.5)"
    }
    assert "not_finite" not in line
    (line,) = run(task, 1.0, **watched).report.rounds
    assert line["clients"]["first"] == 0.8


def test_uniform_updates_are_capped_in_evaluations_alone() -> None:
    settings = {"aggregation.weighting": "uniform", "evaluation.clients_every": 1}
    found = run(TASK, 0.5, **settings)
    (line,) = found.report.rounds
    assert (line["clients"]["first"], found.model()["w"][0]) == (0.5, pytest.approx(0.0))
    assert [*line["capped"]] == ["metrics"]


def test_a_share_that_two_sites_cannot_keep_is_refused() -> None:
    with pytest.raises(atoll.AtollError, match=r"max_share 0\.4 needs at least 3 updates, .* the quorum is 2"):
        run(TASK, 0.4)
