"""A Flower app as the settings of a run: its run config is that of each site, whatever the site's copy says."""

import shutil
import tomllib
from pathlib import Path

import pytest

from atoll.cli.files import load_run
from atoll.cli.flower_plan import run_of_app
from atoll.parallel.task.flower_app import with_app

APP = Path(__file__).parents[1] / "parallel" / "flower" / "apps" / "every_strategy"
MORE = """
names = ["a", "b"]
seed = 0x10000000000000000
limit = inf
data = "https://user:secret@example.org/data"
model.layers = 3
"""

pytestmark = pytest.mark.real


def test_the_run_config_of_the_coordinators_copy_travels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = shutil.copytree(APP, tmp_path / "app")
    with (app / "pyproject.toml").open("a") as file:
        file.write(MORE)
    options = tomllib.loads(run_of_app(with_app(str(app)), {}))["options"]
    assert options == {"strategy": "FedAvg", "rounds": 6, "wide": False, "out": "", "model.layers": 3}
    told = " ".join(capsys.readouterr().err.split())
    assert "of the run config each site has its own data, limit, names, seed: only plain values travel" in told
    given = load_run(str(app), ["task.model.layers=5", "task.rounds=2"]).given
    assert {key: value for key, value in given.items() if key.startswith("task.")} == {
        "task.strategy": "FedAvg",
        "task.rounds": 2,
        "task.wide": False,
        "task.out": "",
        "task.model.layers": 5,
    }


def test_the_result_of_a_long_run_has_the_metrics_of_the_training_of_each_round() -> None:
    file = load_run(str(APP), ["rounds=100000"])
    assert file.evaluation.keep_sites >= file.rounds
