"""A Flower app as the settings of a run: its run config is that of each site, whatever the site's copy says."""

import shutil
import tomllib
from pathlib import Path

import pytest

from atoll.operations.faults import CommandError
from atoll.operations.flower_plan import run_of_app
from atoll.operations.load import load_run
from atoll.operations.reporter import Reporter, reporting_to
from atoll.protocol.settings import ConfigError
from atoll.task.apps import with_app

APP = Path(__file__).parents[1] / "flower" / "apps" / "every_strategy"
MORE = """
names = ["a", "b"]
seed = 0x10000000000000000
limit = inf
data = "https://user:secret@example.org/data"
model.layers = 3
"""

pytestmark = pytest.mark.real


def test_the_run_config_of_the_coordinators_copy_travels(tmp_path: Path) -> None:
    app = shutil.copytree(APP, tmp_path / "app")
    with (app / "pyproject.toml").open("a") as file:
        file.write(MORE)
    notes: list[str] = []
    with reporting_to(Reporter(notes.append)):
        options = tomllib.loads(run_of_app(with_app(str(app)), {}))["options"]
    assert options == {"strategy": "FedAvg", "rounds": 6, "wide": False, "out": "", "model.layers": 3}
    assert notes == ["each site uses its own data, limit, names, seed of the run config; only plain values are sent"]
    given = load_run(str(app), ["task.model.layers=5", "task.rounds=2"]).given
    assert {key: value for key, value in given.items() if key.startswith("task.")} == {
        "task.strategy": "FedAvg",
        "task.rounds": 2,
        "task.wide": False,
        "task.out": "",
        "task.model.layers": 5,
    }


def test_the_result_of_a_long_run_has_the_metrics_of_the_training_of_each_round() -> None:
    file = load_run(str(APP), ["program.native=true", "rounds=100000"])
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


def test_main_is_called_to_find_out_only_for_a_native_run_which_it_may_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = shutil.copytree(APP, tmp_path / "app")
    (app / "starts.py").write_text(STARTS)
    project = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(project.replace("every_strategy_app:server", "starts:app"))
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    assert load_run(str(app)).program.main == with_app(str(app))
    assert not (tmp_path / "starts").exists()
    with pytest.raises(CommandError) as refused:
        load_run(str(app), ["program.native=true"])
    assert refused.value.faults == (
        "program.native: main() uses the grid itself",
        "without program.native (--native) the app runs hosted, unchanged: leave it out",
    )
    assert (tmp_path / "starts").read_text() == "main\n"


def test_the_file_of_a_run_says_whether_its_app_is_native(tmp_path: Path) -> None:
    written = tmp_path / "run.toml"
    written.write_text(f'task = "{with_app(str(APP))}"\nrounds = 2\n')
    with pytest.raises(
        ConfigError, match=r"a Flower app runs hosted: set program\.main to it, or program\.native = true"
    ):
        load_run(str(written))
    assert load_run(str(written), ["program.native=true"]).rounds == 2
    with pytest.raises(ConfigError) as refused:
        load_run("a:b", ["program.native=true", "program.main=a:main"])
    assert [fault.partition(",")[0] for fault in refused.value.faults] == [
        "program.native is for a run of rounds: leave it out",
        "program.native is for Flower apps",
    ]
