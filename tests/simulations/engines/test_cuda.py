"""The engines on a GPU. `make test-cuda` runs this."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll.simulations.engines.batched.batched import Batched
from atoll.simulations.engines.engine import Engine, Job
from atoll.simulations.engines.processes.processes import Processes
from atoll.simulations.engines.sequential import Sequential
from tests.simulations.engines.cases import BATCHABLE, SIZES, Case, all_trained, first_version, picklable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-cuda")


def compare(engine: Engine, case: Case) -> None:
    """Compare an engine with the sequential one on the CPU."""
    training = case.training()
    version, jobs = first_version(training), [Job(site, seed) for seed, site in enumerate(SIZES)]
    try:
        found = all_trained(engine.train(version, jobs))
    finally:
        engine.close()
    for ours, theirs in zip(found, all_trained(Sequential(training).train(version, jobs)), strict=True):
        assert ours.row is not None
        assert theirs.row is not None
        assert np.linalg.norm(ours.row - theirs.row) <= 1e-3 * np.linalg.norm(theirs.row)
        np.testing.assert_allclose(ours.statistics["loss"], theirs.statistics["loss"], rtol=1e-4)


@pytest.mark.parametrize("case", BATCHABLE, ids=lambda case: case.name)
def test_sequential_on_a_gpu_agrees_with_the_cpu(case: Case) -> None:
    compare(Sequential(case.training(device="cuda")), case)


@pytest.mark.parametrize("case", BATCHABLE, ids=lambda case: case.name)
def test_batched_on_a_gpu_agrees_with_the_cpu(case: Case) -> None:
    compare(Batched(case.training(device="cuda"), at_once=3), case)


def test_processes_share_a_gpu() -> None:
    """The processes come from a fork server, to which the task is sent by pickle."""
    compare(Processes(replace(Case("mlp").training(device="cuda"), task=picklable()), workers=2), Case("mlp"))
