"""Code of an app around `strategy.start`: hosted it does what it does at home, natively it does or is told."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it")

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg, Result

from atoll.flower.app import read_app
from atoll.flower.bench import MainBench
from atoll.flower.hosted.fitting import only_fitting
from atoll.flower.hosted.grid import as_program
from atoll.flower.native.strategies import native
from atoll.flower.server_host import NotNative, ServerHost, server_app_of
from atoll.flower.task import FlowerTask
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from atoll.task.apps import with_app
from atoll.task.errors import TaskBroken
from atoll.task.programs.grid import Grid
from atoll.training.worker.bench import Received
from tests.flower.flowers_own import result_of
from tests.messages.strategies.hosted_here import LinkHere

APP = with_app(str(Path(__file__).parent / "apps" / "own_code"))
SITES = ("node-0", "node-1")
REASONS = {
    "a_method_of_its_own": "configure_train of FedAvg is replaced by the app",
    "a_class_that_is_changed": "aggregate_evaluate of FedAvg is replaced by the app",
    "no_timeout": "timeout is None: natively a round has a deadline",
}
"""The reason for which an app has no native run, found before it runs."""
TOLD = {
    "asks_after": "main() uses the grid itself",
    "two_folds": "main() starts a second strategy",
    "two_by_a_method": "main() starts a second strategy",
    "two_by_a_function": "main() starts a second strategy",
    "two_by_a_function_of_its_own": "main() starts a second strategy",
    "two_elsewhere": "main() starts a second strategy",
    "asks_elsewhere": "main() uses the grid itself",
    "asks_between": "main() uses the grid itself",
    "a_rate_that_falls": "evaluate_fn changes train_config['lr']",
    "an_object_that_measures": "evaluate_fn changes FedAvg.fraction_evaluate",
    "a_method_that_measures": "evaluate_fn changes FedAvg.fraction_evaluate",
    "a_rate_that_an_object_lets_fall": "evaluate_fn changes train_config['lr']",
    "a_rate_of_the_module_that_falls": "evaluate_fn changes train_config['lr']",
}
"""What an app is told when it does, natively, what needs Flower's loop."""
STOPS = ("a_stop_by_an_exception", "a_stop_that_is_suppressed", "an_exit_as_a_stop")
OF_THE_GRID = ("asks_first", "asks_first_and_goes_on", "a_signal_handler")
NATIVE = ("plain", "one_elsewhere", "one_by_a_function_of_its_own", "ends_in_order")


@pytest.fixture
def app(monkeypatch):
    app = read_app(APP)
    with only_fitting():  # replaces the method below once in a process
        monkeypatch.setattr(FedAvg, "aggregate_evaluate", FedAvg.aggregate_evaluate)  # a case changes it
    app.load(app.serverapp)
    yield app
    sys.path.remove(str(app.folder))
    del sys.modules["own_code_app"]


def of(app, case):
    return replace(app, serverapp=f"own_code_app:{case}")


def plan_of(app, case):
    return native(of(app, case), ServerHost(of(app, case), app.config).started(), len(SITES))


@pytest.mark.parametrize("case", REASONS)
def test_what_a_native_run_would_leave_out_is_found_before_it_begins(app, case):
    assert REASONS[case] in plan_of(app, case).reasons


@pytest.mark.parametrize("case", NATIVE)
def test_branches_functions_and_names_of_their_own_keep_an_app_native(app, case):
    assert plan_of(app, case).reasons == ()


@pytest.mark.parametrize("case", OF_THE_GRID)
def test_a_use_of_the_grid_is_found_whatever_the_app_catches(app, case):
    with pytest.raises(NotNative, match=r"main\(\) (uses the grid itself|sets a signal handler)"):
        ServerHost(of(app, case), app.config).started()


@pytest.mark.parametrize("case", TOLD)
def test_what_needs_flowers_loop_after_the_start_is_told_whatever_the_app_catches(app, case):
    host = ServerHost(of(app, case), app.config)
    first = host.started().arrays
    message = re.escape(f"{TOLD[case]} after the start of its strategy; without program.native (--native) it runs")

    def run():
        for version in range(3):
            host.evaluate(version, first)
        host.finish(Result(ArrayRecord()))

    with pytest.raises(NotNative, match=message):
        run()


def test_a_reference_to_another_object_is_no_server_app(app):
    """It was planned as an app of the form before Flower 1.21, which has no main()."""
    other = replace(app, serverapp="own_code_app:server_app")
    message = r"own_code_app:server_app is a \w+: tool\.flwr\.app\.components\.serverapp must name a ServerApp"
    with pytest.raises(TaskBroken, match=message):
        ServerHost(other, app.config).started()
    with pytest.raises(TaskBroken, match=message):
        server_app_of(other)


def test_a_main_that_exits_is_a_fault_of_the_app_and_not_the_end_of_the_worker(app):
    with pytest.raises(TaskBroken, match=r"main\(\) ended with SystemExit: no data today"):
        ServerHost(of(app, "ends_the_process"), app.config).started()


def test_a_main_that_exits_in_order_has_ended(app):
    host = ServerHost(of(app, "ends_in_order"), app.config)
    host.started()
    host.finish(Result(ArrayRecord()))


def test_an_evaluation_after_the_end_of_main_is_a_fault_and_no_wait(app):
    host = ServerHost(of(app, "an_exit_as_a_stop"), app.config)
    first = host.started().arrays
    host.evaluate(2, first)
    with pytest.raises(TaskBroken, match=r"main\(\) has ended within its strategy\.start"):
        host.evaluate(3, first)


@pytest.mark.parametrize("case", [*REASONS, *TOLD, *STOPS, *OF_THE_GRID])
def test_hosted_it_does_what_it_does_at_home(app, case, tmp_path):
    results = sys.modules["own_code_app"].results
    result_of(of(app, case), len(SITES))
    theirs = [told(result) for result in results]
    results.clear()
    as_program(app.load(f"own_code_app:{case}"), app.config)(Grid(LinkHere(app, SITES, tmp_path, {})))
    assert [told(result) for result in results] == theirs


def test_a_measuring_that_returns_nothing_for_one_version_is_asked_for_the_next(app, tmp_path):
    """The coordinator asks a worker that names a reason no more."""
    bench = MainBench(of(app, "measures_every_second"), {"folder": tmp_path / "app"})
    arrays = Received(bench.initial(0))
    found = [bench.evaluate(arrays, {"split": "server", "version": version}) for version in (1, 2, 3)]
    assert found == [{}, {"r": (2.0, 1.0)}, {}]
    rounds = {"1": {}, "2": {}, "3": {}}
    bench.conclude(bench.initial(0), {"train": rounds, "clients": {}, "server": {"1": {}, "2": {"r": 2.0}, "3": {}}})
    (result,) = sys.modules["own_code_app"].results
    measured = {number: dict(record) for number, record in result.evaluate_metrics_serverapp.items()}
    assert repr(measured) == "{0: {'r': 0}, 2: {'r': 2}}"
    bench = MainBench(of(app, "asks_after"), {})
    bench.initial(0)
    assert bench.evaluate(arrays, {"split": "server", "version": 1}) == "the app has no evaluate_fn"


def test_a_main_that_changes_its_folder_stays_there(app, tmp_path):
    bench, before = MainBench(of(app, "goes_elsewhere"), {"folder": tmp_path / "app"}), Path.cwd()
    arrays = bench.initial(0)
    bench.evaluate(Received(arrays), {"split": "server", "version": 1})
    bench.conclude(arrays, {"train": {"1": {}}, "clients": {}, "server": {}})
    assert {path.name for path in (tmp_path / "app" / "outputs").iterdir()} == {"version-0", "version-1", "end"}
    assert Path.cwd() == before


def test_a_client_app_that_only_trains_is_simulated_without_evaluations(app, tmp_path):
    """As in Flower, whose strategy asks for evaluations by default and gets errors."""
    app = replace(of(app, "plain"), clientapp="own_code_app:only_trains")
    settings = {"task": APP, **plan_of(app, "plain").settings, "simulation": {"engine": "sequential"}}
    file = SimulationFile.model_validate(settings)
    with opened(file, FlowerTask(app, len(SITES)), tmp_path, on_round=print, is_fresh=True) as federation:
        assert federation.run()["state"] == "finished"
    (result,) = sys.modules["own_code_app"].results
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    assert not result.evaluate_metrics_clientapp
    assert repr(dict(result.evaluate_metrics_serverapp[3])) == "{'r': 3}", "an integer, as in Flower"


def told(result):
    kinds = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
    return result.arrays["w"].data, [
        {number: dict(record) for number, record in getattr(result, kind).items()} for kind in kinds
    ]
