"""The launchers of docs/large-clients.md: settings that an agent takes, manifests that are YAML and name each other."""

import re
import tomllib
from pathlib import Path

import yaml

from atoll.client.crew_config import CrewConfig

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
    assert (launcher, rank) == ("torchrun", ["-m", "atoll.parallel.crew"])
    assert Path(folder).is_relative_to(mounts[0])
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
