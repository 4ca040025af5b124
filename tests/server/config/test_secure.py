"""The table `[secure]`: the rules that it gives a run, and every setting that does not go with it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.secure.session_size import MEMBERS_MAX, MEMBERS_MIN
from atoll.protocol.settings import ConfigError, effective, load_text
from atoll.server.config.run import RunConfig, RunFile
from atoll.server.config.run_changes import changed
from atoll.server.journal.codec import decode_rules, encode_rules
from atoll.server.rounds.secure_rules import SecureRules

NINE = ["round.cohort_size=9", "secure.clip_norm=1.0", "secure.examples_max=100"]


def run_with(overrides: Sequence[str], text: str = "") -> RunConfig:
    return load_text(RunFile, f'task = "m:t"\n{text}', [*NINE, *overrides], name="run.toml").run


def faults_of(overrides: Sequence[str], text: str = "") -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        run_with(overrides, text)
    return tuple(fault.removeprefix("run.toml: ").removeprefix("--set: ") for fault in caught.value.faults)


def test_a_run_has_the_rules_of_its_table() -> None:
    config = run_with(
        ["secure.bits=64", "secure.clip_norm=2.5", "secure.threshold=2", "secure.sessions=3", "secure.attempts=5"],
    )
    assert config.rules.secure == SecureRules(
        clip_norm=2.5, bits=64, examples_max=100, threshold="2", sessions=3, attempts=5
    )
    assert load_text(RunConfig, effective(config), name="") == config
    assert decode_rules(encode_rules(config.rules), where="") == config.rules


def test_a_run_without_the_table_has_the_rules_of_before() -> None:
    config = load_text(RunFile, 'task = "m:t"', name="run.toml").run
    assert config.rules.secure is None
    assert config.rules.keep_sites == 100
    before = encode_rules(config.rules).replace(',"secure":null', "")
    assert "secure" not in before
    assert decode_rules(before, where="an earlier journal") == config.rules


def test_secure_rules_keep_no_metrics_of_single_sites() -> None:
    assert run_with([]).rules.keep_sites == 0


@given(st.integers(0, 400), st.integers(1, 20), st.integers(MEMBERS_MIN, MEMBERS_MAX))
def test_the_clients_of_a_round_are_divided_into_sessions_of_like_size(clients: int, sessions: int, most: int) -> None:
    sizes = SecureRules(clip_norm=1.0, sessions=sessions, session_max=most).sizes(clients)
    left = clients - sum(sizes)
    assert all(MEMBERS_MIN <= size <= most for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert bool(sizes) == (clients >= MEMBERS_MIN)
    if most >= 5:
        assert left == 0 or clients < MEMBERS_MIN
    assert left < MEMBERS_MIN
    enough = -(-clients // most)
    assert len(sizes) == min(max(sessions, enough), clients // MEMBERS_MIN)


@given(
    st.integers(MEMBERS_MIN, 150),
    st.sampled_from([1.0, 1.3, 2.0]),
    st.integers(1, 6),
    st.integers(MEMBERS_MIN, MEMBERS_MAX),
    st.sampled_from(["two_thirds", *range(2, MEMBERS_MAX + 1)]),
)
def test_no_accepted_threshold_lets_two_groups_open_or_nobody(
    cohort: int, more: float, sessions: int, most: int, threshold: str | int
) -> None:
    given = [f"round.cohort_size={cohort}", f"round.over_selection={more}", f"secure.sessions={sessions}"]
    given += [f"secure.session_max={most}", f"secure.threshold={threshold}"]
    try:
        config = run_with(given)
    except ConfigError:
        config = None
    rules, invited = SecureRules(clip_norm=1.0, threshold=str(threshold), sessions=sessions, session_max=most), 0
    while invited * 1.0 < cohort * more - 1e-9:
        invited += 1
    sizes = [size for number in range(cohort, invited + 1) for size in rules.sizes(number)]
    is_sound = all(size >= (least := rules.threshold_of(size)) and 2 * least > size for size in sizes)
    fits = sum(rules.sizes(invited)) == invited and cohort // MEMBERS_MIN >= sessions
    assert (config is not None) == (is_sound and fits)


def test_only_deadlines_and_the_number_of_sessions_change_at_a_resume() -> None:
    config = run_with([])
    new = changed(config, ["secure.stage_timeout=90.0", "secure.attempts=4", "secure.sessions=2"], version=1)
    assert new.secure is not None
    assert (new.secure.stage_timeout, new.secure.attempts, new.secure.sessions) == (90.0, 4, 2)
    fixed = ["bits=64", "clip_norm=2.0", "examples_max=7", "threshold=5", "session_max=9"]
    for override in fixed:
        key = f"secure.{override.partition('=')[0]}"
        with pytest.raises(ConfigError, match=f"--set: {key}: fixed for the life of a run"):
            changed(config, [f"secure.{override}"], version=1)
    plain = load_text(RunFile, 'task = "m:t"\n[round]\ncohort_size = 9', name="run.toml").run
    with pytest.raises(ConfigError, match="--set: secure: fixed for the life of a run"):
        changed(plain, ["secure.clip_norm=1.0", "secure.examples_max=9"], version=1)
    with pytest.raises(ConfigError, match=r'round.late: got "next_round", and with \[secure\]'):
        changed(config, ["round.late=next_round"], version=1)
