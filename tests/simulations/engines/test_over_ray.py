import builtins
import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from atoll.simulations.engines.engine import ClientFailed, Job
from atoll.simulations.engines.over_ray import OverRay, RayMissing
from tests.simulations.engines.cases import SIZES, Case, all_trained, assert_same_bits, first_version, two_rounds

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray's own, when it starts and ends


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What Ray has left open is closed here, where it is known whose it is, and not in the middle of another test."""
    yield
    gc.collect()


def picky(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if len(targets) == 7:
        raise RuntimeError("no batches of seven")
    return torch.nn.functional.cross_entropy(outputs, targets)


@pytest.mark.slow
def test_actors_train_with_the_bits_of_deployed_clients() -> None:
    case = Case("mlp scaffold", local={"epochs": 2}, algorithm="scaffold", loss=picky)
    training = case.training()
    engine = OverRay(training, workers=2)
    try:
        pairs = two_rounds(case, lambda version, jobs: all_trained(engine.train(version, jobs)), training)
        for found, expected in pairs:
            assert_same_bits(found, expected)
        jobs = [Job(site, seed) for seed, site in enumerate(list(SIZES) * 8)]
        found = list(engine.train(first_version(training), jobs))
        assert [each.client_id for each in found] == [job.client_id for job in jobs]
        with pytest.raises(ClientFailed, match=r"client seven failed:\nTraceback[\s\S]*no batches of seven"):
            list(engine.train(first_version(training), [Job("a", 1), Job("seven", 1)]))
        assert all(np.isfinite(each.row).all() for each in all_trained(iter(found)) if each.row is not None)
    finally:
        engine.close()
        engine.close()


def test_without_ray_there_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *others: Any, **more: Any) -> Any:
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *others, **more)

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RayMissing, match=r"pip install 'atoll\[sim\]'"):
        OverRay(Case("mlp").training())
