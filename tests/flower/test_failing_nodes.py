"""Errors of a ClientApp in a simulated native run: it goes on without that node, as real agents do, and says why."""

import json
import sys

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it once it is in constraints.txt")

import numpy as np

from atoll.flower.app import read_app
from atoll.flower.native.strategies import native
from atoll.flower.server_host import ServerHost
from atoll.flower.task import FlowerTask
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from atoll.task.apps import with_app

PROJECT = """
[project]
name = "failing"
version = "1.0.0"
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "failing_app:server"
clientapp = "failing_app:client"
[tool.flwr.app.config]
evaluates = true
"""
APP = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

server, client, results = ServerApp(), ClientApp(), []

@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=1.0 if context.run_config["evaluates"] else 0.0)
    results.append(strategy.start(grid, ArrayRecord({"w": Array(np.zeros(2, np.float32))}), num_rounds=3))

@client.train()
def train(message, context):
    place = 1 + context.node_config["partition-id"]
    if place == 1 and message.content["config"]["server-round"] == 2:
        raise RuntimeError("no data today")
    moved = ArrayRecord({"w": Array(message.content["arrays"]["w"].numpy() + place)})
    return Message(RecordDict({"a": moved, "m": MetricRecord({"num-examples": place})}), reply_to=message)

@client.evaluate()
def evaluate(message, context):
    raise ValueError("no test set")
"""


@pytest.mark.parametrize("evaluates", [True, False])
def test_an_error_of_a_node_leaves_it_out_and_is_told(tmp_path, capsys, evaluates):
    """The mean moves by 5/3 with both nodes, of 1 and 2 examples, and by 2 with the second alone."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "failing_app.py").write_text(APP)
    reference = with_app(str(tmp_path))
    app, given = read_app(reference), {"evaluates": evaluates}
    try:
        plan = native(app, ServerHost(app, app.run_config(given)).started(), 2)
        file = SimulationFile.model_validate({"task": reference, "options": given, **plan.settings})
        with opened(file, FlowerTask(app, 2, given), tmp_path / "run", on_round=print, is_fresh=True) as federation:
            assert federation.run()["state"] == "finished"
        (result,) = sys.modules["failing_app"].results
    finally:
        sys.path.remove(str(app.folder))
        sys.modules.pop("failing_app", None)
    np.testing.assert_allclose(result.arrays["w"].numpy(), 5 / 3 + 2 + 5 / 3, rtol=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line.get("failures", {}) for line in lines] == [
        {},
        {"node-0": "training_failed: RuntimeError: no data today"},
        {},
    ]
    told = capsys.readouterr().err
    assert told.count("note: the evaluation of node-1 failed: ValueError: no test set\n") == (1 if evaluates else 0)
