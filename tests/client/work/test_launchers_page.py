"""The launchers of docs/large-clients.md: settings that an agent takes, manifests that are YAML and name each other."""

import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from atoll.client.crew_config import CrewConfig
from atoll.parallel.launch.meeting import store_of
from atoll.parallel.world import World
from tests.waiting import BOUND_S

PAGE = (Path(__file__).parents[3] / "docs" / "large-clients.md").read_text("utf-8")

SPEC = {"runtimeRef", "trainer", "runtimePatches", "initializer", "suspend", "managedBy", "activeDeadlineSeconds"}
"""The fields of a TrainJob's spec: kubeflow_trainer_api 2.3.0, with which both manifests were validated."""


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_every_toml_is_a_crew():
    crews = [CrewConfig(**{**tomllib.loads(text)["crew"]}) for text in blocks("toml")]
    assert [(str(crew.parallel.mesh), crew.num_here, crew.nodes) for crew in crews] == [
        ("dp_shard=4,tp=2", 8, 1),
        ("dp_shard=16,tp=2", 8, 4),
    ]


def test_the_manifests_share_a_claim_a_path_and_the_folder_of_the_ranks():
    job, deployment = (yaml.safe_load(text) for text in blocks("yaml"))
    assert (job["kind"], deployment["kind"]) == ("TrainJob", "Deployment")
    assert set(job["spec"]) <= SPEC, "another field is pruned without a word"
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    overrides = replicated["template"]["spec"]["template"]["spec"]
    assert (replicated["name"], overrides["containers"][0]["name"]) == ("node", "node"), (
        "of the runtime torch-distributed"
    )
    pod = deployment["spec"]["template"]["spec"]
    claims = [spec["volumes"][0]["persistentVolumeClaim"]["claimName"] for spec in (overrides, pod)]
    assert claims[0] == claims[1]
    mounts = [spec["containers"][0]["volumeMounts"][0]["mountPath"] for spec in (overrides, pod)]
    assert mounts == ["/shared", "/shared"]
    trainer = job["spec"]["trainer"]
    launcher, _restarts, *rank, folder = trainer["command"]
    assert (launcher, rank) == ("torchrun", ["-m", "atoll.parallel.mesh_client"])
    assert Path(folder).is_relative_to(mounts[0])
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]


@pytest.mark.real
def test_the_function_for_ray_starts_a_rank_that_meets_the_others_in_a_store_of_its_own(monkeypatch):
    """Ray's own store is at MASTER_PORT, as torchrun's: a second one there fails with EADDRINUSE."""
    (block,) = [text for text in blocks("python") if "TorchTrainer" in text]
    calls, names = [], {}
    definition = block[block.index("def rank()") : block.index("run = RunConfig")]
    exec("import os, subprocess, sys\n" + definition, names)
    monkeypatch.setattr("subprocess.run", lambda command, **options: calls.append((command, options)))
    names["rank"]()
    ((command, options),) = calls
    assert command[1:] == ["-m", "atoll.parallel.mesh_client", "/shared/crew"]
    assert options["check"], "Ray starts all ranks again when one ends with another code than 0"
    of_ray = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(of_ray.port)}
    with ThreadPoolExecutor(2) as threads:
        environ = options["env"] | place
        begun = [threads.submit(store_of, World(rank, rank, 2), BOUND_S, environ) for rank in (1, 0)]
        one, two = (each.result() for each in begun)
    one.set("a", "b")
    assert two.get("a") == b"b"
