"""The account of an asynchronous run's invitations: each one ends once, and each line says what it counts."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.simulations.federation.simulating import simulate

FATES = ("reported", "lost", "failed", "refused", "stragglers", "released")


def check(result, lines, *, max_staleness, exponent=0.5, alpha=1.0):
    account = result["invitations"]
    assert account["training"] == 0
    invited = sum(line["invited"] for line in lines)
    assert invited == account["invited"]
    assert invited == sum(line[fate] for line in lines for fate in FATES)
    too_old = [row for line in lines for row in line["too_old"]]
    assert len(too_old) == account["too_old"]
    invitations = set()
    for line in lines:
        committed = line["version"] is not None
        assert line["counted"] == (len(line["buffer"]) if committed else 0)
        base = line["version"] - 1 if committed else None
        for row in line["buffer"]:
            assert 0 <= row["staleness"] <= max_staleness
            assert row["weight"] == pytest.approx(alpha * (1 + row["staleness"]) ** -exponent)
            if base is not None:
                assert row["staleness"] == base - base_of(lines, row["round"])
                invitations.add((row["client"], row["round"]))
        for row in line["too_old"]:
            assert row["staleness"] > max_staleness
            assert (row["client"], row["round"]) not in invitations  # it has not counted before
    assert sum(line["counted"] for line in lines) == len(invitations)


def base_of(lines, round_id):
    """The version from which a round's clients were invited: the last one that was committed before it."""
    return max((line["version"] for line in lines[: round_id - 1] if line["version"] is not None), default=0)


FOUR = ("round.mode=fedasync", "round.concurrency=4", "rounds=30", "devices.examples_per_s=5")


@pytest.mark.slow
def test_fedasync_with_too_small_a_staleness_accounts_for_every_invitation(tmp_path):
    told = []
    result, lines = simulate(tmp_path, *FOUR, "round.max_staleness=1", on_round=told.append)
    check(result, lines, max_staleness=1, alpha=0.6)
    assert result["invitations"]["too_old"] > 0
    assert told == lines


@pytest.mark.slow
def test_an_interrupted_asynchronous_run_goes_on_with_its_account(tmp_path):
    from atoll.operations.load import load_user_task
    from atoll.simulations.federation.run import opened
    from tests.simulations.federation.simulating import lines as lines_of
    from tests.simulations.federation.simulating import settings

    few = (*FOUR, "round.max_staleness=1")
    file = settings(*few)
    with opened(file, load_user_task(file.task), tmp_path, on_round=lambda line: None, is_fresh=False) as federation:
        federation._on_round = lambda line: federation.interrupt() if line["round"] == 9 else None
        assert federation.run()["state"] == "interrupted"
    result, _ = simulate(tmp_path, *few)
    check(result, lines_of(tmp_path), max_staleness=1, alpha=0.6)


@pytest.mark.slow
@hypothesis_settings(max_examples=15)
@given(
    mode=st.sampled_from(["fedasync", "fedbuff"]),
    concurrency=st.integers(1, 4),
    size=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    deadline=st.sampled_from([2.0, 6.0, 600.0]),
    seed=st.integers(0, 99),
)
def test_every_history_accounts_for_its_invitations(mode, concurrency, size, max_staleness, deadline, seed):
    size = 1 if mode == "fedasync" else size
    with tempfile.TemporaryDirectory() as folder:
        result, lines = simulate(
            Path(folder),
            *(f"round.mode={mode}", f"round.concurrency={concurrency}", "rounds=6", f"seed={seed}"),
            *([] if mode == "fedasync" else [f"round.buffer_size={size}"]),
            *(f"round.max_staleness={max_staleness}", f"round.deadline={deadline}", "round.quorum=1"),
            *("devices.examples_per_s=2", "devices.stragglers=0.4", "round.fill_timeout=50.0", "round.retry=20"),
        )
        check(result, lines, max_staleness=max_staleness, alpha=0.6 if mode == "fedasync" else 1.0)
        assert math.isfinite(result["virtual_s"])
