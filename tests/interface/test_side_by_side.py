"""Runs side by side: what differs in their settings, and their curves over rounds, bytes and time."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from atoll.interface.deployed import connect
from atoll.interface.errors import AtollError
from atoll.interface.side_by_side import POINTS_MAX, differing, side_by_side
from atoll.interface.simulated import SimulatedRun
from benchmarks.views import build


def run(folder: Path, accuracies: list[float], settings: str = "", **measured: Any) -> SimulatedRun:
    """Write a simulated run of one round for each accuracy, 100 bytes and 2 virtual seconds a round."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(f'name = "{folder.name}"\ntask = "t"\nrounds = 9\n{settings}')
    with (folder / "rounds.jsonl").open("w") as log:
        for number, accuracy in enumerate(accuracies, 1):
            numbers = dict.fromkeys(("bytes_up", "bytes_down"), 50 * number) | {
                "virtual_s": 2.0 * number,
                "real_s": 0.1,
            }
            server = {"accuracy": accuracy, "loss": 1.0} | measured
            line = {"round": number, "version": number, "state": "committed", "server": server, **numbers}
            log.write(json.dumps(line) + "\n")
    return SimulatedRun(folder)


def test_the_curves_are_those_of_the_rounds_over_each_axis(tmp_path: Path) -> None:
    runs = {"a": run(tmp_path / "a", [0.1, 0.9, 0.8], "seed = 1\n"), "b": run(tmp_path / "b", [0.5], "seed = 2\n")}
    found = side_by_side(runs)
    assert (found["metric"], found["metrics"]) == ("server/accuracy", ["server/accuracy", "server/loss"])
    assert found["curves"] == {"a": [(1, 0.1), (2, 0.9), (3, 0.8)], "b": [(1, 0.5)]}
    assert side_by_side(runs, over="bytes")["curves"]["a"] == [(100, 0.1), (200, 0.9), (300, 0.8)]
    assert side_by_side(runs, "loss", "seconds")["curves"]["a"] == [(2.0, 1.0), (4.0, 1.0), (6.0, 1.0)]
    first = found["runs"][0]
    assert (first["name"], first["final"], first["best"], first["bytes"], first["seconds"]) == ("a", 0.8, 0.9, 300, 6.0)
    assert found["settings"] == [{"setting": "seed", "values": [1, 2]}]
    assert side_by_side({"a": runs["a"]}, "loss")["runs"][0]["best"] == 1.0


def test_values_that_are_no_numbers_and_runs_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    runs = {
        "nan": run(tmp_path / "nan", [math.nan, math.inf, 0.5]),
        "none": run(tmp_path / "none", [math.nan]),
        "gone": SimulatedRun(tmp_path / "gone"),
    }
    assert side_by_side(runs)["metric"] == "server/loss", "the one that all have measured"
    found = side_by_side(runs, "accuracy")
    assert found["curves"] == {"nan": [(3, 0.5)]}
    assert [row["name"] for row in found["runs"]] == ["nan", "none"]
    assert found["left_out"]["none"] == "it has not measured server/accuracy"
    assert "has no rounds.jsonl" in found["left_out"]["gone"]
    assert side_by_side({"gone": runs["gone"]}) | {"left_out": {}} == {
        **{"metric": None, "metrics": [], "over": "round", "runs": [], "settings": [], "curves": {}, "left_out": {}}
    }
    with pytest.raises(AtollError, match="allowed: server/accuracy, server/loss"):
        side_by_side(runs, "odd")
    with pytest.raises(AtollError, match="over: got 'updates'; allowed: round, bytes, seconds"):
        side_by_side(runs, over="updates")


def test_a_long_curve_keeps_its_peak(tmp_path: Path) -> None:
    curve = side_by_side({"long": run(tmp_path / "long", [0.5] * 2_500 + [1.0] + [0.5] * 2_500)})["curves"]["long"]
    assert len(curve) <= POINTS_MAX
    assert (2_501, 1.0) in curve


def test_a_deployed_run_has_versions_received_bytes_and_real_seconds(tmp_path: Path) -> None:
    build(tmp_path / "state", 20, 12)
    deployed = connect(tmp_path / "state").run()
    runs = {"deployed": deployed, "simulated": run(tmp_path / "one", [0.5])}
    found = side_by_side(runs, over="bytes")
    rows = [*deployed.rounds]
    versions = [row for row in rows if row["version"] is not None]
    metrics = {
        f"{source}/{name}" for by in deployed.document["metrics"].values() for source in by for name in by[source]
    }
    assert metrics <= {*found["metrics"]}
    row = found["runs"][0]
    assert (row["bytes"], row["version"]) == (sum(each["num_bytes"] for each in rows), versions[-1]["version"])
    curve = side_by_side({"deployed": deployed}, over="bytes")["curves"]["deployed"]
    assert curve[-1][0] == sum(each["num_bytes"] for each in rows if each["round"] <= versions[-1]["round"])
    seconds = side_by_side({"deployed": deployed}, over="seconds")["curves"]["deployed"]
    assert seconds[-1][0] == pytest.approx(versions[-1]["ended_at"] - deployed.document["created_at"])


def test_settings_that_one_run_lacks_differ_and_its_name_does_not_count() -> None:
    found = differing({"a": {"name": "a", "lr": 0.1, "k": [1, 2]}, "b": {"name": "b", "lr": 0.1, "k": [1, 3], "x": 0}})
    assert found == [{"setting": "k", "values": [[1, 2], [1, 3]]}, {"setting": "x", "values": [None, 0]}]
    assert differing({"a": {"lr": 0.1}}) == []
    assert differing({"a": {"local": {}, "best": ""}, "b": {"best": None}, "c": {}}) == []
    assert differing({}) == []
