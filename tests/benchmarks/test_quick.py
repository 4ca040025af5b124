"""Each benchmark, small, as its reader would start it. The whole ones: `make bench`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def measure(name, *arguments):
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["name"] == name
    return document


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_quick_crash_matrix_loses_nothing():
    """The whole matrix: `make bench NAME=crash_matrix`."""
    document = measure("crash_matrix", "--quick")
    if not document["ok"]:  # pytest shortens a long value, and the end of a log is what says why
        pytest.fail("\n".join(str(fault) for faults in document["ours"]["faults"].values() for fault in faults))
    assert document["ours"]["deaths"] >= 10


def values_of(document):
    return {bar["name"]: bar["value"] for bar in document["bars"]}


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_one_app_of_flowers_is_measured_natively_hosted_and_by_flower():
    """The whole: `make bench NAME=flower_app`."""
    document = measure("flower_app", "--quick")
    values = values_of(document)
    assert len(values) == 6
    assert min(values.values()) > 0
    assert values["2 clients x 0.02 MB, hosted: Flower's round over ours"] > 1
    sides = document["ours"]["2 clients x 0.02 MB"]
    assert all(40_000 < side["bytes_of_a_client_and_round"] < 100_000 for side in sides.values())


@pytest.mark.long
def test_a_few_empty_rounds_are_measured_beside_rounds_by_hand():
    """How many times their time ours takes is for an idle machine: `make bench NAME=round_latency`."""
    document = measure("round_latency", "--clients", "10", "--rounds", "3")
    [ours], [theirs] = document["ours"]["scales"], document["theirs"]["scales"]
    assert ours["rounds"] == 3
    assert theirs["commits_per_round"] >= 2 + 1 + 2  # to open and draw, of the updates, of the end
    values = values_of(document)
    assert len(values) == 2
    assert values["p50 times that of the tight loop, 10 clients"] > 0
    assert ours["p50_ms"] > 0 < theirs["p50_ms"]


@pytest.mark.long
def test_a_few_robust_means_are_measured_and_all_sides_agree():
    """The whole: `make bench NAME=robust`."""
    document = measure("robust", "--updates", "10", "--elements", "30000", "--pairs", "1")
    values = values_of(document)
    assert len(values) == 4
    assert min(values.values()) > 0
    assert set(document["theirs"]["seconds"]["median"]) == {"by hand", "in memory"}


def test_a_few_thousand_events_are_written_down():
    document = measure("audit_log", "--events", "2000", "--pairs", "1")
    assert document["bars"][1]["ok"], document["bars"]


@pytest.mark.long
def test_a_few_certificates_are_renewed_and_the_wrong_ones_refused():
    document = measure("rotation", "--quick")
    assert document["ok"], document["bars"]


@pytest.mark.long
def test_a_small_transfer_is_measured_beside_a_loop_by_hand():
    """What is fast enough is for an idle machine: `make bench NAME=data_plane`."""
    document = measure("data_plane", "--quick")
    assert [bar["bar"] for bar in document["bars"]] == [">= 0.85", ">= 0.8", "< 1000", "<= 1.1"]
    for side in (document["ours"]["8 MB"], document["theirs"]["8 MB"]):
        assert all(side[way]["mb_per_s"]["median"] > 0 and side[way]["count"] == 2 for way in ("down", "up"))
    assert document["ours"]["crowds"]["2"]["vm_hwm_mb"] > 20


@pytest.mark.long
@pytest.mark.slow
def test_a_few_attacks_cost_little_memory_and_lose_nothing():
    """What they cost in time is for an idle machine: `make bench NAME=hostile`."""
    document = measure("hostile", "--quick", "--kinds", "slow_upload", "huge_manifest", "half_open")
    assert all(bar["ok"] for bar in document["bars"][:3]), document["bars"]
    attacks = document["ours"]["attacks"]
    assert attacks["half_open"]["attacker"]["open"] >= 1000
    assert attacks["huge_manifest"]["attacker"]["refused"] >= 1
    assert attacks["slow_upload"]["attacker"]["streams"] >= 32


@pytest.mark.long
@pytest.mark.slow
def test_a_small_transfer_that_is_cut_resends_little():
    document = measure("resume_transfer", "--mib", "12", "--kinds", "cut")
    assert document["ok"], document["bars"]


@pytest.mark.long
@pytest.mark.slow
def test_ranks_of_a_small_model_exchange_the_least_and_make_the_same_bits():
    """How much more four take in than one is for an idle machine: `make bench NAME=ranks`."""
    document = measure("ranks", "--quick")
    assert all(bar["ok"] for bar in document["bars"][1:]), document["bars"]
    assert {summary["ranks"] for summary in document["ours"]["limited"]} == {1, 2, 4}


@pytest.mark.long
@pytest.mark.slow
def test_a_few_thousand_clients_are_killed_and_recovered_and_a_few_histories_judged():
    document = measure("scale", "--clients", "10000", "--histories", "25", "--pairs", "1")
    bars = {bar["name"]: bar["ok"] for bar in document["bars"]}
    assert bars["members after the recovery"]
    assert bars["versions after the recovery"]
    assert bars["bad histories"]
    assert document["ours"]["million"][0]["recovered_entries"] < 10000, "a snapshot was there"
    by_hand = document["theirs"]["million"][0]
    assert by_hand["recovered"] == {"members": 10000, "version": by_hand["recovered"]["version"]}
    assert by_hand["recovered"]["version"] >= 10
    assert all(value > 0 for name, value in values_of(document).items() if "tight loop" in name)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_few_simulated_rounds_are_measured_beside_the_tight_loop():
    """With the peers: `make peers && make bench NAME=simulation`."""
    document = measure("simulation", "--quick")
    found = document["ours"]["digits-mlp"]
    assert found["clients_per_s"]["atoll"]["median"] > 0
    assert min(found["accuracy"].values()) >= 0.3
    assert "left out" in document["theirs"]


@pytest.mark.long
def test_updates_in_parts_are_measured_beside_whole_ones():
    """How fast they are is for an idle machine: `make bench NAME=parts`."""
    values = values_of(measure("parts", "--quick"))
    assert values["largest manifest of a part [bytes]"] < 300_000
    assert values["405B on 64 ranks: memory while it is judged [MB]"] < 100
    assert {name for name in values if "of the whole's rate" in name} == {
        "8 MB in 4 parts, of the whole's rate",
        "8 MB in 8 parts, of the whole's rate",
    }


@pytest.mark.long
def test_a_few_trees_are_those_of_xgboost_alone():
    """Beside Flower: `make peers`, then `make bench NAME=trees`."""
    document = measure("trees", "--quick")
    assert document["ok"]
    assert document["ours"]["trees"] == 20
    assert 0.9 < document["ours"]["auc"] <= 1


@pytest.mark.long
def test_the_seconds_of_commands_are_measured_beside_an_import_of_torch():
    """How many imports each takes is for an idle machine: `make bench NAME=startup`."""
    document = measure("startup", "--quick")
    assert len(document["bars"]) == 9
    assert len(document["ours"]) == 1 + 10
    assert all(times["wall_s"]["median"] > 0 < times["cpu_s"]["median"] for times in document["ours"].values())
    assert document["ours"]["run list"]["cpu_in_imports"] < document["ours"]["simulate"]["cpu_in_imports"]


@pytest.mark.long
def test_a_rank_that_builds_the_whole_model_fails_the_bar_of_memory():
    document = measure("large_client", "--layers", "2", "--ranks", "2", "--no-steps")
    assert [bar["name"] for bar in document["bars"]] == [
        "2 ranks: peak of any phase [M/r]",
        "2 ranks: a whole build fails that bar [M/r]",
    ]
    assert document["bars"][1]["ok"]


@pytest.mark.long
def test_two_models_are_trained_by_both_engines_and_auto_takes_one():
    """How near it is to the faster one is for more turns: `make bench NAME=batched`."""
    document = measure("batched", "--quick")
    values = values_of(document)
    assert set(values) == {f"{name}, 20 clients: auto, times the faster engine" for name in ("mlp", "gru")}
    assert min(values.values()) >= 1
    assert document["ours"]["gru, 20 clients"]["times"] > 1


@pytest.mark.long
def test_what_a_small_federation_takes_is_what_the_page_of_sizes_says():
    """The rows of the page: `python -m benchmarks.sizing`."""
    document = measure("sizing", "--quick")
    assert [bar for bar in document["bars"] if not bar["ok"]] == []
    [row] = document["ours"]["rows"]
    assert row["up_bytes_of_a_round"] > row["model_bytes"] < row["down_bytes_of_a_round"]
    assert 0 < row["site_disk_bytes"] < row["coordinator_disk_bytes"]
