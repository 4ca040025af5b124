"""Boosted trees of XGBoost on the tumours of four clinics: each clinic adds trees to a common ensemble in each round.

    atoll simulate examples/tumours_xgboost.toml
    atoll coordinator examples/tumours_xgboost.toml

The model is an ensemble as arrays: the nodes of all trees, one after the other, and the number of nodes of each tree.
An update has the clinic's new trees, and rule "concatenate" appends them: bagging, as Flower's FedXgbBagging has it.

The newest ensemble in plain XGBoost's own form:

    atoll model export --out model.safetensors
    python examples/tumours_xgboost.py model.safetensors trees.json

Source:
    Chen, Guestrin, "XGBoost: A Scalable Tree Boosting System", KDD 2016.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from safetensors.numpy import load_file
from tumours import CLINICS, FEATURES, METRICS, measured, records

from atoll import Instructions, Trained

Arrays = dict[str, np.ndarray[Any, Any]]
Json = dict[str, Any]

PARAMETERS = {
    "objective": "binary:logistic",
    "base_score": 0.5,  # otherwise each clinic would begin with the share of its own malignant tumours
    "max_depth": 4,
    "eta": 0.3,
    "tree_method": "hist",
    "nthread": 1,  # the same bits everywhere
}

TREES = {"trees": np.int32}
"""The number of nodes of each tree."""

NODES = {
    **dict.fromkeys(("left_children", "right_children", "parents", "split_indices"), np.int32),
    **dict.fromkeys(("split_conditions", "base_weights", "loss_changes", "sum_hessian"), np.float32),
    "default_left": np.uint8,
}
"""The fields of a node in XGBoost's own JSON. All features are numbers, so no tree has categories."""


class TumourTrees:
    """An ensemble that grows by `trees` trees of each clinic in each round."""

    sites = tuple(CLINICS)
    metrics = METRICS

    def initial(self, seed: int) -> Arrays:
        """Return an ensemble without trees."""
        return {name: np.zeros(0, dtype) for name, dtype in {**TREES, **NODES}.items()}

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        """Boost the common ensemble on one clinic's records, and return the new trees alone."""
        features, labels = records("train", instructions.site)
        settings = {"trees": 1, **instructions.local, "seed": instructions.seed % 2**31}
        wanted = int(settings.pop("trees"))
        if fixed := sorted({"objective", "base_score", "booster"} & settings.keys()):
            raise ValueError(
                f"local.{fixed[0]} is part of the model: change it in PARAMETERS, for all rounds and clinics"
            )
        booster, data = booster_of(parameters, settings), xgboost.DMatrix(features, labels, nthread=1)
        before, done = booster.num_boosted_rounds(), 0
        while done < wanted and not (done and instructions.deadline.passed()):
            booster.update(data, before + done)
            done += 1
        statistics = measured(booster.predict(data), labels)
        return Trained(arrays_of(booster[before : before + done]), len(labels), statistics, work=done / wanted)

    def evaluate(self, parameters: Arrays, *, split: str, site: str | None) -> dict[str, tuple[float, ...]]:
        """Return the sums of the metrics on a clinic's records, or on the server's."""
        features, labels = records(split, site)
        return measured(booster_of(parameters).predict(xgboost.DMatrix(features, nthread=1)), labels)

    def num_examples(self, site: str) -> int:
        """Return the number of a clinic's training records."""
        return len(records("train", site)[1])


# ------------------------------------------------------------ trees <-> arrays


def arrays_of(booster: xgboost.Booster) -> Arrays:
    """Return the trees of a booster as arrays."""
    trees = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
    nodes = {name: np.concatenate([np.array(tree[name], dtype) for tree in trees]) for name, dtype in NODES.items()}
    return {"trees": np.array([len(tree["parents"]) for tree in trees], np.int32), **nodes}


def booster_of(arrays: Arrays, settings: Mapping[str, Any] | None = None) -> xgboost.Booster:
    """Return a booster with the trees of arrays; `settings` over `PARAMETERS` are for further trees."""
    empty = xgboost.train(PARAMETERS, xgboost.DMatrix(np.zeros((1, FEATURES)), nthread=1), num_boost_round=0)
    document = json.loads(empty.save_raw("json"))
    trees = trees_of(arrays)
    model = document["learner"]["gradient_booster"]["model"]
    model["gbtree_model_param"]["num_trees"] = str(len(trees))
    model |= {"trees": trees, "tree_info": [0] * len(trees), "iteration_indptr": list(range(len(trees) + 1))}
    booster = xgboost.Booster({**PARAMETERS, **(settings or {})})
    booster.load_model(bytearray(json.dumps(document).encode()))
    return booster


def trees_of(arrays: Arrays) -> list[Json]:
    """Return the trees of arrays in XGBoost's own JSON."""
    sizes, nodes = arrays["trees"], len(arrays["parents"])
    if len(sizes) and (sizes.min() < 1 or sizes.sum() != nodes):
        raise ValueError(f"the ensemble has {nodes} nodes, and its trees have {sizes.sum()}")
    parts = {name: np.split(arrays[name], np.cumsum(sizes)[:-1]) for name in NODES}
    return [tree_of(number, {name: parts[name][number] for name in NODES}) for number in range(len(sizes))]


def tree_of(number: int, nodes: Arrays) -> Json:
    """Return one tree in XGBoost's own JSON."""
    size = len(nodes["parents"])
    counts = {"num_deleted": 0, "num_feature": FEATURES, "num_nodes": size, "size_leaf_vector": 1}
    return {
        "id": number,
        "tree_param": {name: str(count) for name, count in counts.items()},
        "split_type": [0] * size,
        **{name: [] for name in ("categories", "categories_nodes", "categories_segments", "categories_sizes")},
        **{name: values.tolist() for name, values in nodes.items()},
    }


task = TumourTrees()

if __name__ == "__main__":
    booster_of(load_file(sys.argv[1])).save_model(Path(sys.argv[2]))
