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


STARTS = """
import os
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    with open(os.environ["STARTS"], "a") as file:
        file.write("main\\n")
    list(grid.get_node_ids())
"""


@pytest.mark.parametrize("is_named", [True, False])
def test_a_main_that_is_said_to_run_hosted_is_not_called_to_find_out(
    is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = shutil.copytree(APP, tmp_path / "app")
    (app / "starts.py").write_text(STARTS)
    project = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(project.replace("every_strategy_app:server", "starts:app"))
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    file = load_run(str(app), [f"program.main={with_app(str(app))}"] if is_named else [])
    assert file.program.main == with_app(str(app))
    assert (tmp_path / "starts").exists() != is_named
