"""The model of a mesh client begins each job as it was built."""

from pathlib import Path

import torch

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.engine.plan import Plan
from atoll.parallel.mesh_client.building import Here, build
from tests.parallel.mesh_client import tasks
from tests.parallel.mesh_client.clients import write_version


def test_a_job_finds_the_flags_of_parameters_as_they_were_built(tmp_path: Path) -> None:
    write_version(tmp_path)
    model = build(tasks.task, Here(Plan(), None, torch.device("cpu"), Ranks()), seed=0)
    (part,) = model.engine.parts
    for parameter in part.parameters():
        parameter.requires_grad_(False)
    model.load(tmp_path / "version")
    assert all(parameter.requires_grad for parameter in part.parameters())
