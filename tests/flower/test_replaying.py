"""Each native strategy gives what Flower's own aggregation gives of the same replies, also of arrays without axes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it once it is in constraints.txt")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity

from tests.flower.flowers_tests import NONE, absolute, main
from tests.flower.replaying import NATIVE, differing, natively

OPTIONS = {
    "FedAvgM": {"server_learning_rate": 0.5, "server_momentum": 0.9},
    "FedTrimmedAvg": {"beta": 0.25},
    "FedProx": {"proximal_mu": 0.1},
    "Krum": {"num_malicious_nodes": 1},
    "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 3},
    "Bulyan": {"num_malicious_nodes": 1},
}
NODES = 7
TEST = """
import numpy as np
from flwr.app import ArrayRecord
from .fedmedian import FedMedian
from .replies_test import reply

def test_a_median_of_arrays_without_axes():
    replies = [reply(ArrayRecord([np.array(value)]), 1) for value in (0.5, 1.0, 100.0)]
    arrays, _ = FedMedian().aggregate_train(1, replies)
    assert arrays.to_numpy_ndarrays()[0] == 1.0
"""
REPLIES = """
from types import SimpleNamespace
from flwr.app import MetricRecord, RecordDict

def reply(arrays, num_examples):
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": num_examples})})
    return SimpleNamespace(content=content, has_error=lambda: False, has_content=lambda: True)
"""


@pytest.fixture(autouse=True)
def app():
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    yield
    sys.modules.pop("replayed_app", None)


def record_of(arrays):
    return ArrayRecord({name: Array(values) for name, values in arrays.items()})


def message(arrays, weight):
    content = RecordDict({"arrays": record_of(arrays), "metrics": MetricRecord({"num-examples": weight})})
    sent = Message(RecordDict(), dst_node_id=2, message_type="train")
    sent.metadata.__dict__["_src_node_id"] = 1
    return Message(content, reply_to=sent)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("name", NATIVE)
def test_the_same_replies_give_the_model_of_flowers_own_aggregation(name, rounds, tmp_path):
    draw = np.random.default_rng(3)
    shapes = {"matrix": (3, 4), "vector": (5,), "number": (), "one": (1, 1)}

    def drawn():
        return {key: np.asarray(draw.normal(size=shape), np.float32) for key, shape in shapes.items()}

    began = drawn()
    replies = [(drawn(), weight) for weight in (5, 1, 2.5, 9, 3, 0.25, 4)]
    strategy = getattr(flower, name)(**OPTIONS.get(name, {}))
    arrays = record_of(began)
    for number in range(1, rounds + 1):
        if isinstance(strategy, flower.FedAdagrad | flower.FedAdam | flower.FedYogi):  # as `configure_train` keeps them
            strategy.current_arrays = {key: array.numpy() for key, array in arrays.items()}
        elif hasattr(strategy, "current_arrays") and number == 1:
            strategy.current_arrays = arrays
        arrays, _ = strategy.aggregate_train(number, [message(*reply) for reply in replies])
    found = natively(getattr(flower, name)(**OPTIONS.get(name, {})), began, replies, rounds, tmp_path / "run")
    assert not differing(found, {key: array.numpy() for key, array in arrays.items()})


def test_another_model_is_found():
    assert differing({"w": np.array([1.0, 2.0])}, {"w": np.array([1.0, 2.00001])})
    assert not differing({"w": np.float32([1.0, 2.0])}, {"w": np.array([1.0, 2.0])})


def test_without_a_checkout_the_target_says_what_it_wants(capsys, tmp_path):
    assert main([""]) == 0
    assert capsys.readouterr().out.strip() == NONE
    assert main([str(tmp_path)]) == 2


def test_relative_imports_name_the_installed_package():
    text = "from .krum import Krum\nfrom .replies_test import reply\nfrom ..grid import Grid\nfrom . import Result\n"
    assert absolute(text, {"replies_test"}).splitlines() == [
        "from flwr.serverapp.strategy.krum import Krum",
        "from replies_test import reply",
        "from flwr.serverapp.grid import Grid",
        "from flwr.serverapp.strategy import Result",
    ]


@pytest.mark.real
def test_tests_of_a_checkout_run_with_each_aggregation_played_again(tmp_path):
    place = tmp_path / "framework" / "py" / "flwr" / "serverapp" / "strategy"
    place.mkdir(parents=True)
    (place / "fedmedian_test.py").write_text(TEST)
    (place / "replies_test.py").write_text(REPLIES)
    (place / "fednext_test.py").write_text("from .fednext import FedNext\n")
    command = [sys.executable, "-m", "tests.flower.flowers_tests", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: fednext_test: No module named 'flwr.serverapp.strategy.fednext'" in done.stdout
    assert "1  native, FedMedian: within 1e-06" in done.stdout
    assert sorted(file.name for file in place.iterdir()) == ["fedmedian_test.py", "fednext_test.py", "replies_test.py"]
