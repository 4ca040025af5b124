import builtins
import gc
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.simulations.engines.engine import ClientFailed, Job
from atoll.simulations.engines.processes import over_ray
from atoll.simulations.engines.processes.over_ray import STARTS, OverRay, RayMissing
from atoll.simulations.engines.processes.processes import WorkerDied
from tests.cli.invoking import shown
from tests.simulations.engines.cases import SIZES, Case, all_trained, assert_same_bits, first_version, two_rounds

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray's own, when it starts and ends


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect what Ray left open, so that its warnings do not appear in the middle of another test."""
    yield
    gc.collect()


def picky(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if len(targets) == 7:
        raise RuntimeError("no batches of seven")
    return torch.nn.functional.cross_entropy(outputs, targets)


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.slow
def test_a_task_of_a_file_trains_in_actors_as_it_does_here(tmp_path: Path) -> None:
    """The example caches a function, which every pickler sends by its name alone."""
    models = []
    for engine in ("ray", "sequential"):
        result = shown(
            "simulate", "examples/digits.py:task", "--rounds", 2, "--engine", engine, "--out", tmp_path / engine
        )
        assert result["state"] == "finished"
        models.append([path.read_bytes() for path in sorted((tmp_path / engine / "models").rglob("*.safetensors"))])
    assert models[0]
    assert models[0] == models[1]


class Unwell:
    """A Ray whose first starts fail."""

    def __init__(self, failures: int) -> None:
        self.failures, self.starts, self.shutdowns = failures, list[dict[str, Any]](), 0

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.starts.append(options)
        if len(self.starts) <= self.failures:
            raise Exception("The current node timed out\nduring startup.")

    def shutdown(self) -> None:
        self.shutdowns += 1

    def cluster_resources(self) -> dict[str, float]:
        raise InterruptedError("it is up")


def test_a_ray_of_this_machine_is_started_again_when_it_did_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Case("mlp").training()
    for failures in range(STARTS):
        ray = Unwell(failures)
        monkeypatch.setattr(over_ray, "_ray", lambda ray=ray: ray)
        with pytest.raises(InterruptedError, match="it is up"):
            OverRay(training)
        assert (len(ray.starts), ray.shutdowns) == (failures + 1, failures)
    ray = Unwell(STARTS)
    monkeypatch.setattr(over_ray, "_ray", lambda: ray)
    with pytest.raises(WorkerDied, match=r"no Ray started on this machine in 3 attempts: The current node timed out"):
        OverRay(training)
    assert ray.shutdowns == STARTS


def test_an_address_where_no_ray_is_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Case("mlp").training()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for address, asked in ((f"127.0.0.1:{port}", 0), (f"[::1]:{port}", 0), ("127.0.0.1:70000", 0), ("auto", 1)):
        ray = Unwell(1)
        monkeypatch.setattr(over_ray, "_ray", lambda ray=ray: ray)
        with pytest.raises(
            RayMissing, match=rf"^simulation\.ray_address: no Ray answers on '{re.escape(address)}': .+$"
        ):
            OverRay(training, address=address)
        assert len(ray.starts) == asked


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
