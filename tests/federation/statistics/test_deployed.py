"""Statistics of three sites with a CSV file each, by real processes, against numpy on the pooled rows."""

import csv
import json
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.federation.processes import ATOLL, federation
from tests.federation.statistics import csv_sites_task
from tests.federation.test_site_policy import decisions

TASK = str(Path(csv_sites_task.__file__)) + ":task"
FEATURES = csv_sites_task.FEATURES
ALL = 'tasks = ["*"]\nruns = ["*"]\n'
SHARES = {"north": [0.5, 0.3, 0.15, 0.05], "south": [0.6, 0.37, 0.03, 0.0], "east": [0.25, 0.25, 0.25, 0.25]}
SIZES = {"north": (437, 101), "south": (160, 7), "east": (48, 24)}
MISSING = {"north": (0.1, 0.0, 0.2), "south": (0.2, 0.0, 0.03), "east": (0.1, 0.5, 0.0)}
OPTION = ("--set", "task.scale=1.5")


@pytest.fixture
def rows(tmp_path):
    """Write the file of each site, and return its rows: features (n, 3) and outcomes (n,) by site and split."""
    found = {}
    for number, site in enumerate(SIZES):
        draws = np.random.default_rng(number)
        with (tmp_path / f"{site}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["split", *FEATURES, "outcome"])
            for split, size in zip(("train", "test"), SIZES[site], strict=True):
                features = draws.normal([50, 120, 1e9], [15, 20, 7], size=(size, 3))
                features[draws.random((size, 3)) < MISSING[site]] = np.nan
                outcomes = draws.choice(4, size, p=SHARES[site])
                cells = (
                    [*("" if np.isnan(x) else repr(float(x)) for x in row), y]
                    for row, y in zip(features, outcomes, strict=True)
                )
                table.writerows([split, *row] for row in cells)
                found[site, split] = features, outcomes
    return found


def pooled(rows, split, *sites):
    parts = [rows[site, split] for site in sites]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def check_feature(shown, column):
    """Hold the merged moments against exact arithmetic and numpy on the pooled column, NaN where a value is missing."""
    known = column[~np.isnan(column)]
    exact = [Fraction(float(value)) for value in known]
    mean = sum(exact) / len(exact)
    assert (shown["count"], shown["missing"], shown["infinite"]) == (len(known), len(column) - len(known), 0)
    assert shown["sum"] == float(sum(exact))
    assert shown["mean"] == float(mean)
    assert shown["variance"] == float(sum((value - mean) ** 2 for value in exact) / len(exact))
    assert shown["mean"] == pytest.approx(known.mean(), rel=1e-14)
    assert shown["variance"] == pytest.approx(known.var(), rel=1e-6), "numpy's own rounding, at 1e9"


def labels(outcomes, at_least=1):
    values, counts = np.unique(outcomes, return_counts=True)
    return {str(v): int(n) for v, n in zip(values, counts, strict=True) if n >= at_least}


def asked(it, *more):
    return json.loads(
        subprocess.check_output(
            [ATOLL, "run", "statistics", it.task, "--state", it.state, *OPTION, "--json", *more], text=True
        )
    )


def test_each_site_gives_what_its_policy_allows_and_the_sums_are_those_of_the_pooled_rows(tmp_path, rows):
    """North has no policy; south leaves small cells and extremes out and allows sums alone; east refuses at first."""
    (tmp_path / "south.toml").write_text(f'{ALL}statistics = "merged"\nstatistics_min_count = 10\n')
    (tmp_path / "east.toml").write_text(ALL)
    with federation(tmp_path, task=TASK) as it:
        start = (
            "--state",
            it.state,
            "--set",
            f"coordinator.listen={it.address}",
            "--set",
            "coordinator.enrol=127.0.0.1:0",
        )
        it.start("coordinator", "coordinator", *start)
        for site in SIZES:
            policy = {"policy": tmp_path / f"{site}.toml"} if site != "north" else {}
            it.agent(site, exit_when_done=False, threads=1, **policy, **{"task.folder": tmp_path})
        it.wait_for(lambda: all(f"{site} joined" in it.log("coordinator") for site in SIZES))
        check_under_policies(asked(it), rows)
        check_records(it)
        check_refusal(it)
        opened = f'{ALL}statistics = "per_site"\nstatistics_min_count = 1\nstatistics_extremes = true\n'
        for site in ("south", "east"):
            (tmp_path / f"{site}.toml").write_text(opened)
        everything = it.wait_for(lambda: found if len((found := asked(it))["sites"]) == 3 else None, every=0.5)
        check_against_the_simulation(it, everything, rows)
        assert asked_again(it, everything["number"]) == everything
        assert asked_again(it, 1)["answered"] == ["north", "south"], "older results stay"


def asked_again(it, number):
    return it.show("run", "statistics", "--show", number)


def check_under_policies(found, rows):
    assert (found["number"], found["task"], found["answered"]) == (1, "csv_sites_task:task", ["north", "south"])
    assert found["options"] == {"scale": 1.5}
    assert found["refused"] == {"east": "policy_refused: statistics: no statistics leave this site"}
    train = found["merged"]["train"]
    assert (train["examples"], train["sites"]) == (437 + 160, 2)
    features, _ = pooled(rows, "train", "north", "south")
    for name, column in (("age", features[:, 0]), ("pressure", features[:, 1])):
        check_feature(train["features"][name], column)
        assert train["features"][name]["sites"] == 2
        assert "min" not in train["features"][name], "south keeps its extremes"
    south = rows["south", "train"]
    few_missing = int(np.isnan(south[0][:, 2]).sum())
    assert 0 < few_missing < 10, "the case that is tested"
    assert found["left_out"]["south"]["train.features.income"] == "fewer than 10 missing values, and more than none"
    assert train["features"]["income"]["sites"] == 1
    check_feature(train["features"]["income"], rows["north", "train"][0][:, 2])
    check_small_cells(found, rows)


def check_small_cells(found, rows):
    """South has few of label 2 and takes label 1 along; of its test split it gives nothing."""
    of_south = labels(rows["south", "train"][1])
    assert 0 < of_south["2"] < 10, "the case that is tested"
    of_north = labels(rows["north", "train"][1])
    counts = found["merged"]["train"]["labels"]["target"]
    assert counts["withheld"] == 2
    assert counts["counts"] == of_north | {"0": of_north["0"] + of_south["0"]}
    assert found["left_out"]["south"]["test.examples"] == "fewer than 10 examples"
    assert (found["merged"]["test"]["examples"], found["merged"]["test"]["sites"]) == (101, 1)
    assert found["not_shown"]["south"] == "its policy allows only sums over several sites"
    assert "the rest of the total would be theirs" in found["not_shown"]["north"]
    assert "labels" not in found["sites"]["north"]["train"], "less it, the sum would be south's"


def check_records(it):
    log = "".join(path.read_text() for path in (it.state / "audit").glob("audit-*.jsonl"))
    assert "statistics 1 of csv_sites_task:task" in log
    words = {site: [line["action"] for line in decisions(it, site) if "statistics" in line["action"]] for site in SIZES}
    assert words == {"north": ["statistics.allowed"], "south": ["statistics.allowed"], "east": ["statistics.refused"]}
    text = subprocess.check_output([ATOLL, "run", "statistics", "--show", "0", "--state", it.state], text=True)
    assert "2 of 3 sites answered" in text
    assert "no answer of east: policy_refused: statistics: no statistics leave this site" in text
    secret = (it.state / "statistics" / "000001.json").read_text()
    assert '"south"' in secret, "it is named"
    assert ": 160" not in secret, "its own numbers are in no file"


def check_refusal(it):
    other = Path(csv_sites_task.__file__).parents[1] / "quadratics_task.py"
    command = [ATOLL, "run", "statistics", f"{other}:task", "--state", it.state]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "no connected agent allows the task 'quadratics_task:task' (3 agents connected" in ended.stderr


def check_against_the_simulation(it, found, rows):
    """Hold the result without any restriction against the pooled rows, and against one machine, bit for bit."""
    for split in ("train", "test"):
        part = found["merged"][split]
        features, outcomes = pooled(rows, split, *SIZES)
        assert part["labels"]["target"]["counts"] == labels(outcomes)
        for name, column in zip(FEATURES, features.T, strict=True):
            check_feature(part["features"][name], column)
            assert (part["features"][name]["min"], part["features"][name]["max"]) == (
                np.nanmin(column),
                np.nanmax(column),
            )
        assert part["own"]["oldest"]["value"] == np.nanmax(features[:, 0])
        known = features[~np.isnan(features[:, :2]).any(axis=1)]
        assert part["own"]["products"]["value"] == pytest.approx(1.5 * (known[:, 0] * known[:, 1]).sum(), rel=1e-12)
        assert part["own"]["age_groups"]["value"] == np.histogram(known[:, 0], csv_sites_task.EDGES)[0].tolist()
    folders = [part for site in SIZES for part in ("--set", f"sites.{site}.folder={it.folder}")]
    command = [ATOLL, "population", TASK, "--statistics", "--json", *OPTION, *folders]
    local = json.loads(subprocess.check_output(command, text=True))
    assert local["merged"] == found["merged"]
    assert local["sites"] == found["sites"]
