"""Reader of kustomizations, for a machine without kubectl: what the overlays of deploy/kubernetes use, and no more."""

import copy
from pathlib import Path

import yaml

KNOWN = {"apiVersion", "kind", "namespace", "resources", "patches", "configMapGenerator"}
CLUSTER_WIDE = {"Namespace"}


def render(folder: Path) -> list[dict]:
    """Return the resources of a kustomization.

    Names of generated maps have no digest here: kubectl adds one, and changes the references to it.
    """
    found = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(found) <= KNOWN, f"{folder}: {set(found) - KNOWN} is for kubectl alone"
    resources = []
    for name in found.get("resources", []):
        place = folder / name
        resources += render(place) if place.is_dir() else list(yaml.safe_load_all(place.read_text()))
    for generated in found.get("configMapGenerator", []):
        data = {name: (folder / name).read_text() for name in generated["files"]}
        resources.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generated["name"]}, "data": data}
        )
    for patch in found.get("patches", []):
        [target] = [
            each
            for each in resources
            if (each["kind"], each["metadata"]["name"]) == (patch["target"]["kind"], patch["target"]["name"])
        ]
        text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
        for step in yaml.safe_load(text):
            _add(target, step)
    if "namespace" in found:
        for each in resources:
            if each["kind"] not in CLUSTER_WIDE:
                each["metadata"]["namespace"] = found["namespace"]
    return resources


def _add(target: dict, step: dict) -> None:
    """Apply one `add` of a JSON patch (RFC 6902) to the end of an array or to an object."""
    assert step["op"] == "add", step
    *parents, last = step["path"].strip("/").split("/")
    place = target
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    if isinstance(place, list):
        assert last == "-", step
        place.append(copy.deepcopy(step["value"]))
    else:
        place[last] = copy.deepcopy(step["value"])
