"""Whole simulated runs, with the state machines of deployed ones, against outcomes that are known independently."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from atoll.operations.load import load_user_task
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import Version
from atoll.server.files.run_store import RunStore
from atoll.server.files.versions import Versions
from atoll.simulations.federation.evaluations import Evaluations
from atoll.simulations.federation.run import opened
from atoll.simulations.federation.seal import unseal
from atoll.simulations.federation.site import Site
from atoll.task.array_task import Trained
from atoll.task.errors import TaskBroken
from tests.simulations.federation import line_task as lines_task
from tests.simulations.federation.simulating import lines, model, settings, simulate, without_real_time

ALL = ("round.cohort_size=4", "rounds=3")
SLOW = ("devices.examples_per_s=1", "devices.latency_s=0.0")
TIGHT = (
    *("devices.examples_per_s=1", "devices.up_bytes_per_s=100", "devices.latency_s=0.5"),
    *("round.deadline=16.0", "round.partial_work=accept", "round.cohort_size=4", "round.quorum=2"),
)
"""Settings under which a client with four steps does fewer, because of the duration of its uploads."""

UNEQUAL = (
    *("devices.examples_per_s={low=1,high=30}", "devices.latency_s={low=0.1,high=2.0}"),
    *("devices.down_bytes_per_s={low=10,high=60}", "round.deadline=600.0"),
)
"""Settings under which clients fetch and evaluate a version in other times."""


def test_full_participation_by_one_full_batch_is_gradient_descent_on_the_pooled_data(tmp_path):
    """FedSGD (McMahan et al. 2017): one step on each client's whole data, weighted by its size."""
    rounds = 20
    simulate(tmp_path, "round.cohort_size=4", f"rounds={rounds}", "local.batch_size=1000", "local.lr=0.5")
    start, end = model(tmp_path, 0), model(tmp_path, rounds)
    central = lines_task.model()
    central.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in start.items()})
    optimizer = torch.optim.SGD(central.parameters(), lr=0.5)
    inputs, targets = lines_task.pooled().tensors
    for _ in range(rounds):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(central(inputs), targets).backward()
        optimizer.step()
    for name, expected in central.state_dict().items():
        np.testing.assert_allclose(end[name], expected.numpy(), rtol=0, atol=1e-6)
        assert np.abs(end[name] - start[name]).max() > 1e-2  # they have moved


@pytest.mark.parametrize(
    "overrides",
    [
        ("round.cohort_size=2", "rounds=4"),
        ("round.cohort_size=2", "rounds=4", "devices.latency_s=0", "devices.examples_per_s=1e9"),
        ("round.cohort_size=2", "rounds=5", *UNEQUAL),
        ("round.cohort_size=2", "rounds=6", *UNEQUAL, "evaluation.deadline=12"),
        ("round.mode=fedasync", "round.concurrency=3", "rounds=9", *UNEQUAL, "evaluation.deadline=6000"),
        (
            "round.mode=fedbuff",
            "round.buffer_size=2",
            "round.concurrency=3",
            "rounds=9",
            *UNEQUAL,
            "evaluation.deadline=6000",
        ),
        ("round.cohort_size=2", "round.over_selection=2.0", "round.late=next_round", "rounds=6", *UNEQUAL),
    ],
    ids=["plain", "at once", "unequal", "too late", "fedasync", "fedbuff", "late"],
)
def test_an_evaluation_beside_the_session_is_as_one_within_it(tmp_path, monkeypatch, overrides):
    """Same times, bytes, answers, cohorts and models, although the session of an idle agent hears nothing of it."""
    factor, num_examples = (8 if "evaluation" in str(overrides) else 1), Evaluations.num_examples
    monkeypatch.setattr(Evaluations, "num_examples", lambda self, client: factor * num_examples(self, client))
    beside, evaluated = [], Site._evaluated_alone
    monkeypatch.setattr(Site, "_evaluated_alone", lambda site, asked: (beside.append(site), evaluated(site, asked)))
    result, found = simulate(tmp_path / "beside", *overrides, "evaluation.clients_every=1")
    assert beside
    monkeypatch.setattr(Site, "_evaluate_alone", Site._receive)
    expected, lines_within = simulate(tmp_path / "within", *overrides, "evaluation.clients_every=1")
    assert without_real_time(found) == without_real_time(lines_within)
    assert result["model_digest"] == expected["model_digest"]
    assert [result[name] for name in ("bytes_down", "bytes_up", "virtual_s")] == [
        expected[name] for name in ("bytes_down", "bytes_up", "virtual_s")
    ]


@pytest.mark.parametrize(("inline_max", "committed"), [(None, 0), (0, 1)])
def test_a_small_update_has_begun_when_it_is_there(tmp_path, monkeypatch, inline_max, committed):
    """An agent sends it inline with its manifest: the coordinator learns of it after the deadline, without grace."""
    if inline_max is not None:
        monkeypatch.setattr("atoll.simulations.federation.site.INLINE_BYTES_MAX", inline_max)
    slow = ("devices.up_bytes_per_s=1", "devices.latency_s=0.5", "round.deadline=20", "round.grace=1000")
    _, (first, *_) = simulate(tmp_path, *slow, "round.cohort_size=4", "round.quorum=2", "rounds=1", "round.retry=0")
    assert (first["version"] is not None) == bool(committed), first


@pytest.mark.parametrize(
    ("every", "data", "is_refused"),
    [(1, TensorDataset(torch.zeros(0, 2)), True), (0, TensorDataset(torch.zeros(0, 2)), False), (1, None, False)],
)
def test_a_server_without_test_examples_is_refused_at_the_start(tmp_path, every, data, is_refused):
    file = settings(*ALL, f"evaluation.server_every={every}")
    task = replace(load_user_task(file.task), test_data=lambda: data)
    what = "server_every: got 1, and the task's test_data has no examples; allowed: 0"
    told = pytest.raises(ConfigError, match=what) if is_refused else nullcontext()
    with told, opened(file, task, tmp_path, on_round=print, is_fresh=True) as federation:
        assert federation.run()["state"] == "finished"


def test_the_same_seed_gives_the_same_rounds_and_another_seed_others(tmp_path):
    few = ("round.cohort_size=2", "rounds=4", "devices.stragglers=0.5", "devices.examples_per_s=10")
    first, told = simulate(tmp_path / "1", *few)
    second, again = simulate(tmp_path / "2", *few)
    other, others = simulate(tmp_path / "3", *few, "seed=1")
    assert first["model_digest"] == second["model_digest"] != other["model_digest"]
    assert without_real_time(told) == without_real_time(again) != without_real_time(others)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        ("evaluation.clients_every=1", "round.over_selection=1.5"),
        ("aggregation.codec=topk", "aggregation.topk_fraction=0.25"),
        TIGHT,
    ],
)
def test_an_interrupted_run_goes_on_to_the_outcome_of_an_undisturbed_one(tmp_path, method):
    few = ("round.cohort_size=2", "rounds=6", *method)
    whole, told = simulate(tmp_path / "whole", *few)
    from atoll.operations.load import load_user_task
    from atoll.simulations.federation.run import opened

    folder, file = tmp_path / "parts", settings(*few)
    for stop_after in (2, 4):
        with opened(file, load_user_task(file.task), folder, on_round=lambda line: None, is_fresh=False) as federation:
            federation._on_round = lambda line, it=federation, last=stop_after: (
                it.interrupt() if line["round"] == last else None
            )
            result = federation.run()
        assert result["state"] == "interrupted"
        assert result["version"] < 6
        assert result["rounds"] == stop_after  # the round that was open has not ended
    rest, found = simulate(folder, *few)
    assert rest["model_digest"] == whole["model_digest"]
    assert without_real_time(found) == without_real_time(told)


def test_a_run_is_not_gone_on_with_when_clients_or_its_settings_are_gone(tmp_path):
    few = ("round.cohort_size=3", "rounds=9")
    simulate(tmp_path, *few)
    file = settings(*few)
    task = load_user_task(file.task)
    with pytest.raises(ConfigError, match="the run there has clients that the task lacks: d; choose another --out"):
        go_on(tmp_path, file, replace(task, sites=("a", "b", "c")))
    unseal(tmp_path)
    (tmp_path / "run.toml").write_text("task = ")
    with pytest.raises(ConfigError, match=r"run\.toml: is damaged: .*; restore it, or choose another --out"):
        go_on(tmp_path, file, task)


def test_a_run_that_is_older_than_a_setting_goes_on_with_its_default(tmp_path):
    few = ("round.cohort_size=3", "rounds=2")
    simulate(tmp_path, *few)
    written = (tmp_path / "run.toml").read_text()
    assert "retry = 3\n" in written
    unseal(tmp_path)
    (tmp_path / "run.toml").write_text(written.replace("retry = 3\n", ""))
    assert simulate(tmp_path, *few)[0]["state"] == "finished"
    unseal(tmp_path)
    (tmp_path / "run.toml").write_text(written.replace("retry = 3\n", ""))
    with pytest.raises(ConfigError, match=r"round\.retry: '3' there, '5' here"):
        simulate(tmp_path, *few, "round.retry=5")
    (tmp_path / "run.toml").write_text("newer = 3\n" + written)
    with pytest.raises(ConfigError, match="newer: '3' there, None here"):
        simulate(tmp_path, *few)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        ("evaluation.clients_every=3",),
        ("optimizer.name=fedadam", "devices.stragglers=0.5"),
        TIGHT,
        ("aggregation.algorithm=scaffold", "aggregation.num_clients=4"),
        ("optimizer.name=diloco", "local.optimizer=adamw", "local.lr=0.01", "local.keep_optimizer=true"),
        ("aggregation.codec=topk", "aggregation.topk_fraction=0.25"),
        ("attack.kind=free_rider", "attack.malicious=1"),
        ("cohort.sampler=oort",),
    ],
    ids=lambda method: method[0],
)
def test_a_finished_run_with_more_rounds_ends_as_one_begun_with_them(tmp_path, method):
    few = ("round.cohort_size=2", *method)
    whole, told = simulate(tmp_path / "whole", *few, "rounds=6")
    begun, _ = simulate(tmp_path / "parts", *few, "rounds=3")
    assert (begun["state"], begun["version"]) == ("finished", 3)
    rest, found = simulate(tmp_path / "parts", *few, "rounds=6")
    assert rest["model_digest"] == whole["model_digest"]
    assert (rest["state"], rest["rounds"], rest["cause"]) == ("finished", 6, "6 rounds are committed")
    assert without_real_time(found) == without_real_time(told)
    fault = "the run there cannot have 5 rounds: 6 rounds are committed already; allowed: more than 6"
    with pytest.raises(ConfigError, match=fault):
        simulate(tmp_path / "parts", *few, "rounds=5")


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("round.mode=fedbuff", "it began with 3, and an asynchronous run refuses updates"),
        (
            "round.over_selection=1.5",
            "work that clients had in progress at the end of its last rounds is lost: [a-d]",
        ),
        (
            "round.late=next_round",
            "it ended after 3 and refused late updates that round 4 would have taken",
        ),
        ("evaluation.server_every=2", r"measured that version as its last one \(evaluation.server_every is 2\)"),
        ("evaluation.clients_every=2", r"measured that version as its last one \(evaluation.clients_every is 2\)"),
    ],
)
def test_a_run_whose_last_round_was_another_than_a_middle_one_is_given_no_more(tmp_path, setting, fault):
    few = (
        setting,
        *(("round.buffer_size=2", "round.concurrency=3") if "mode" in setting else ("round.cohort_size=2",)),
    )
    ended, _ = simulate(tmp_path, *few, "rounds=3")
    with pytest.raises(ConfigError, match=f"the run there cannot have 6 rounds: .*{fault}.*; choose another --out"):
        simulate(tmp_path, *few, "rounds=6")
    assert simulate(tmp_path, *few, "rounds=3")[0]["model_digest"] == ended["model_digest"]


@pytest.mark.parametrize("key", ["local.lr", "optimizer.lr"])
def test_a_schedule_that_ends_with_the_run_keeps_its_number_of_rounds(tmp_path, key):
    few, rounds = ("round.cohort_size=2", f'schedule.{key}={{kind = "cosine", end = 0.5}}'), f"schedule.{key}.rounds=3"
    begun, _ = simulate(tmp_path / "parts", *few, "rounds=3")
    fault = rf"schedule\.{key} reached its end in round 3, and would now do so in round 6, so rounds 2 to 3 had other"
    with pytest.raises(ConfigError, match=f"the run there cannot have 6 rounds: {fault} values; --set {rounds}"):
        simulate(tmp_path / "parts", *few, "rounds=6")
    assert simulate(tmp_path / "parts", *few, "rounds=3")[0]["model_digest"] == begun["model_digest"]
    found, _ = simulate(tmp_path / "parts", *few, "rounds=6", rounds)
    assert found["model_digest"] == simulate(tmp_path / "whole", *few, "rounds=6", rounds)[0]["model_digest"]
    assert found["model_digest"] != simulate(tmp_path / "longer", *few, "rounds=6")[0]["model_digest"]
    simulate(tmp_path / "first", *few, "rounds=1")  # whose value is the start, however many follow
    found, _ = simulate(tmp_path / "first", *few, "rounds=2")
    assert found["model_digest"] == simulate(tmp_path / "second", *few, "rounds=2")[0]["model_digest"]


@pytest.mark.slow
def test_an_interrupted_run_may_end_after_another_number_of_rounds(tmp_path):
    few = ("round.cohort_size=2", "round.late=next_round", "evaluation.server_every=2")
    whole, told = simulate(tmp_path / "whole", *few, "rounds=5")
    for begun_for in (4, 9):
        folder, file = tmp_path / str(begun_for), settings(*few, f"rounds={begun_for}")
        with opened(file, load_user_task(file.task), folder, on_round=lambda line: None, is_fresh=False) as federation:
            federation._on_round = lambda line, it=federation: it.interrupt() if line["round"] == 3 else None
            federation.run()
        rest, found = simulate(folder, *few, "rounds=5")
        assert rest["model_digest"] == whole["model_digest"]
        assert without_real_time(found) == without_real_time(told)


def go_on(folder, file, task):
    with opened(file, task, folder, on_round=lambda line: None, is_fresh=False) as federation:
        return federation.run()


def test_virtual_time_is_what_the_slowest_wanted_client_needs(tmp_path):
    """The slowest of 7, 12, 20 and 5 examples at one a second takes 20 s, plus messages and transfers."""
    result, told = simulate(tmp_path, *ALL, *SLOW, "round.deadline=60.0")
    assert [line["why"] for line in told] == ["enough"] * 3
    assert told[0]["virtual_s"] == pytest.approx(20, abs=0.5)
    assert result["virtual_s"] == pytest.approx(60, abs=1.5)
    assert result["real_s"] < 30


def test_a_deadline_leaves_partial_work_of_clients_that_could_not_finish(tmp_path):
    """Three steps fit: 20 examples are 5 steps of 4 s, and 10 % of the 15 s are left for the upload."""
    _, told = simulate(
        tmp_path, *ALL, *SLOW, "round.deadline=15.0", "round.quorum=2", "round.partial_work=accept", "rounds=1"
    )
    [line] = told
    assert line["fates"] == dict.fromkeys("abcd", "reported")
    assert line["virtual_s"] == pytest.approx(12, abs=0.5)


def test_stragglers_miss_a_round_that_refuses_partial_work(tmp_path):
    _, told = simulate(
        tmp_path, *ALL, *SLOW, "round.deadline=15.0", "round.quorum=2", "round.partial_work=refuse", "rounds=1"
    )
    [line] = told
    assert line["fates"] == {"a": "reported", "b": "reported", "c": "refused", "d": "reported"}
    assert line["refusals"] == {"c": "partial_work: work 0.600 is less than 1 and partial_work is refuse"}


def test_updates_that_no_round_waits_for_are_not_computed(tmp_path):
    result, told = simulate(tmp_path, *SLOW, "round.cohort_size=2", "round.over_selection=2.0", "rounds=3")
    assert [line["invited"] for line in told] == [4, 4, 4]
    assert [line["reported"] for line in told] == [2, 2, 2]
    assert result["trainings"] == 6


def test_late_updates_count_in_the_next_round(tmp_path):
    _, told = simulate(
        tmp_path,
        *("round.cohort_size=2", "round.over_selection=2.0", "round.late=next_round", "round.max_staleness=3"),
        *(*SLOW, "rounds=3", "devices.latency_s=0.01"),
    )
    assert sum(line["late"] for line in told) > 0
    for line in told:
        for row in line.get("carried", []):  # of which version, how old, with which weight
            assert row["version"] == told[row["round"] - 1]["version"] - 1
            assert row["staleness"] == line["version"] - 1 - row["version"] >= 0
            assert row["weight"] == pytest.approx(lines_task.SIZES[row["client"]] / (1 + row["staleness"]) ** 0.5)
        assert len(line.get("carried", [])) == line["late"]


def test_a_run_records_the_steps_of_each_update(tmp_path):
    result, told = simulate(tmp_path, *ALL)
    steps = {site: -(-size // 4) for site, size in lines_task.SIZES.items()}  # one epoch in batches of four
    assert all(line["steps"] == steps and line["num_steps"] == sum(steps.values()) for line in told)
    assert result["num_steps"] == len(told) * sum(steps.values())


def test_an_attacked_run_names_the_malicious_clients_and_has_the_honest_ones_apart(tmp_path):
    attack = ("attack.kind=sign_flip", "attack.malicious=2", "evaluation.clients_every=1")
    result, told = simulate(tmp_path, *ALL, *attack)
    malicious = result["malicious"]
    assert len(malicious) == 2
    honest = [site for site in lines_task.SITES if site not in malicious]
    for line in told:
        assert line["malicious"] == malicious
        losses, sizes = line["train_values"], lines_task.SIZES
        mean = sum(losses[site]["loss"] * sizes[site] for site in honest) / sum(sizes[site] for site in honest)
        assert line["honest_train"]["loss"] == pytest.approx(mean)
        accuracies = [line["client_values"][site]["accuracy"] for site in honest]  # each on four examples
        assert line["honest_clients"]["accuracy"] == pytest.approx(sum(accuracies) / len(accuracies))
    plain, lines_ = simulate(tmp_path / "plain", *ALL)
    assert "malicious" not in plain
    assert not any("honest_train" in line for line in lines_)


class LeavesOut:
    """A task in arrays whose updates lack one of the two tensors."""

    sites = ("a", "b")

    def initial(self, seed):
        return {"u": np.zeros(2, np.float32), "v": np.zeros(2, np.float32)}

    def train(self, parameters, instructions):
        return Trained({"u": np.ones(2, np.float32)}, 3)


@pytest.mark.parametrize("setting", ["seed=0", "aggregation.codec=bf16", "aggregation.rule=median"])
def test_an_update_that_leaves_tensors_out_is_refused_by_name_unless_the_run_accepts_it(tmp_path, setting):
    few = ("round.cohort_size=2", "rounds=1", "simulation.engine=sequential")
    file = settings(*few, setting)
    with pytest.raises(TaskBroken, match=r"client a failed: the update leaves out v: aggregation\.partial = true"):
        go_on(tmp_path / "whole", file, LeavesOut())
    result = go_on(tmp_path / "partial", settings(*few, "aggregation.partial=true"), LeavesOut())
    assert result["state"] == "finished"


def test_an_asynchronous_run_commits_after_each_buffer_of_updates(tmp_path):
    result, told = simulate(
        tmp_path, *SLOW, "round.mode=fedbuff", "round.buffer_size=2", "round.concurrency=3", "rounds=5"
    )
    assert result["version"] == 5
    assert [line["counted"] for line in told] == [2] * 5
    assert all(line["train"]["loss"] > 0 for line in told)


def test_scaffold_keeps_the_mean_of_the_control_variates_in_the_model(tmp_path):
    """Karimireddy et al. 2020: c is the mean of all c_i at any time."""
    simulate(tmp_path, "aggregation.algorithm=scaffold", "aggregation.num_clients=4", "round.cohort_size=2", "rounds=6")
    from atoll.tensors import safetensors_file

    version = model(tmp_path, 6)
    newest = {}
    for path in sorted((tmp_path / "clients").iterdir(), key=lambda path: int(path.name.split(".")[2])):
        newest[path.name.split(".")[0]] = safetensors_file.read(path)
    for name in (name for name in version if name.startswith("control/")):
        mean = sum(own[name].astype(np.float64) for own in newest.values()) / 4
        np.testing.assert_allclose(version[name], mean, atol=1e-6)
        assert np.abs(version[name]).max() > 0


@pytest.mark.slow
def test_a_biased_codec_owes_what_it_left_out_and_learns_all_the_same(tmp_path):
    result, told = simulate(tmp_path, "aggregation.codec=topk", "aggregation.topk_fraction=0.25", *ALL, "rounds=12")
    assert result["bytes_up"] < 0.6 * result["bytes_up_plain"]
    assert told[-1]["server"]["loss"] < told[0]["server"]["loss"]
    assert list((tmp_path / "clients").glob("*.residual.*"))


def test_clients_measure_versions_on_their_own_data(tmp_path):
    _, told = simulate(tmp_path, *ALL, "evaluation.clients_every=2", "evaluation.server_every=1")
    assert [line["clients"] is not None for line in told] == [False, True, True]  # the last one always
    assert set(told[1]["client_values"]) == set("abcd")
    assert all(line["server"]["accuracy"] is not None for line in told)


def test_clients_that_sleep_are_not_asked(tmp_path):
    trace = tmp_path / "awake.csv"
    trace.write_text("client,from_s,to_s\na,0,1000000\nb,0,1000000\nc,0,5\nd,500000,1000000\n")
    hours = ("devices.availability=trace", f"devices.awake_trace={trace}", "coordinator.lease=2.0")
    _, told = simulate(tmp_path / "run", "round.cohort_size=2", "rounds=3", *SLOW, *hours)
    for line in told[1:]:
        assert set(line["fates"]) == {"a", "b"}


@pytest.mark.slow
def test_a_malicious_client_is_outvoted_by_the_median_and_not_by_the_mean(tmp_path):
    attack = (*ALL, "attack.kind=scaled_flip", "attack.malicious=1", "attack.factor=1000.0", "rounds=6")
    _, honest = simulate(tmp_path / "honest", *ALL, "rounds=6")
    _, mean = simulate(tmp_path / "mean", *attack)
    _, median = simulate(tmp_path / "median", *attack, "aggregation.rule=median")
    assert mean[-1]["server"]["loss"] > 10 * honest[-1]["server"]["loss"]
    assert median[-1]["server"]["loss"] < 2 * honest[-1]["server"]["loss"]


def test_lines_of_rounds_after_the_saved_one_are_written_again(tmp_path):
    simulate(tmp_path, *ALL)
    assert [line["round"] for line in lines(tmp_path)] == [1, 2, 3]
    result, told = simulate(tmp_path, *ALL)  # it has ended: nothing happens
    assert result["state"] == "finished"
    assert [line["round"] for line in told] == [1, 2, 3]


def test_what_is_remembered_of_a_version_is_what_its_files_say(tmp_path):
    file = settings("rounds=2")
    with opened(file, load_user_task(file.task), tmp_path, on_round=lambda line: None, is_fresh=False) as federation:
        federation.run()
        remembered = [federation.versions.version(Version(number)) for number in (0, 1, 2)]
    assert remembered == [Versions(RunStore(tmp_path / "models")).version(Version(number)) for number in (0, 1, 2)]
    assert all(version.small_data for version in remembered)
