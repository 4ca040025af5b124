"""The table `[secure]`: the rules that it gives a run, and every setting that does not go with it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cli.flower.counterparts import counterpart
from atoll.protocol.secure.session_size import MEMBERS_MAX, MEMBERS_MIN, SESSION_MAX_LEAST
from atoll.protocol.settings import ConfigError, effective, load_text
from atoll.server.config.run import RunConfig, RunFile
from atoll.server.config.run_changes import changed
from atoll.server.config.secure import faults_of_layout
from atoll.server.journal.codec import decode_rules, encode_rules
from atoll.server.rounds.secure_rules import SecureRules
from atoll.simulations.federation.config import SimulationFile
from atoll.tensors.layout import Tensor

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


@given(st.integers(0, 400), st.integers(1, 20), st.integers(SESSION_MAX_LEAST, MEMBERS_MAX))
def test_the_clients_of_a_round_are_divided_into_sessions_of_like_size(clients: int, sessions: int, most: int) -> None:
    sizes = SecureRules(clip_norm=1.0, sessions=sessions, session_max=most).sizes(clients)
    assert all(MEMBERS_MIN <= size <= most for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert bool(sizes) == (clients >= MEMBERS_MIN)
    assert sum(sizes) == (clients if clients >= MEMBERS_MIN else 0)
    enough = -(-clients // most)
    assert len(sizes) == min(max(sessions, enough), clients // MEMBERS_MIN)


@given(
    st.integers(MEMBERS_MIN, 150),
    st.sampled_from([1.0, 1.3, 2.0]),
    st.integers(1, 6),
    st.integers(SESSION_MAX_LEAST, MEMBERS_MAX),
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
    assert (config is not None) == (is_sound and cohort // MEMBERS_MIN >= sessions)


def test_only_deadlines_and_the_number_of_sessions_change_at_a_resume() -> None:
    config = run_with([])
    new = changed(config, ["secure.stage_timeout=90.0", "secure.attempts=4", "secure.sessions=2"], version=1)
    assert new.secure is not None
    assert (new.secure.stage_timeout, new.secure.attempts, new.secure.sessions) == (90.0, 4, 2)
    fixed = ["bits=64", "clip_norm=2.0", "examples_max=7", "threshold=5", "session_max=9", "metrics.accuracy=2"]
    for override in fixed:
        key = f"secure.{override.partition('=')[0].partition('.')[0]}"
        with pytest.raises(ConfigError, match=f"--set: {key}: fixed for the life of a run"):
            changed(config, [f"secure.{override}"], version=1)
    plain = load_text(RunFile, 'task = "m:t"\n[round]\ncohort_size = 9', name="run.toml").run
    with pytest.raises(ConfigError, match="--set: secure: fixed for the life of a run"):
        changed(plain, ["secure.clip_norm=1.0", "secure.examples_max=9"], version=1)
    with pytest.raises(ConfigError, match=r'round.late: got "next_round", and with \[secure\]'):
        changed(config, ["round.late=next_round"], version=1)


# ---------------------------------------------------------------- what does not go together

REFUSED: dict[str, tuple[list[str], str]] = {
    "a codec": (
        ["aggregation.codec=qsgd8"],
        'aggregation.codec: got "qsgd8", and with [secure] encoded updates do not add up under masks: allowed is '
        '"none"',
    ),
    "a codec with error feedback": (
        ["aggregation.codec=topk", "aggregation.topk_fraction=0.01"],
        'aggregation.codec: got "topk", and with [secure] encoded updates do not add up under masks: allowed is "none"',
    ),
    "a rule over whole updates": (
        ["aggregation.rule=multi_krum", "aggregation.malicious=1", "secure.sessions=3"],
        'aggregation.rule: got "multi_krum", and with [secure] only the sums of sessions are visible: '
        'allowed is "mean", and with secure.sessions >= 3 over the means of sessions "median" and "trimmed_mean"',
    ),
    "a custom rule": (
        ["aggregation.rule=mine:rule", "secure.sessions=3"],
        'aggregation.rule: got "mine:rule", and with [secure] only the sums of sessions are visible: '
        'allowed is "mean", and with secure.sessions >= 3 over the means of sessions "median" and "trimmed_mean"',
    ),
    "rows that are appended": (
        ["aggregation.rule=concatenate"],
        'aggregation.rule: got "concatenate", and with [secure] only the sums of sessions are visible: '
        'allowed is "mean", and with secure.sessions >= 3 over the means of sessions "median" and "trimmed_mean"',
    ),
    "a median of two": (
        ["aggregation.rule=median", "secure.sessions=2"],
        'aggregation.rule: got "median", and with [secure] it would have the 2 means of secure.sessions: allowed is '
        '"mean", and with secure.sessions >= 3 over the means of sessions "median" and "trimmed_mean"',
    ),
    "more malicious sessions than a trimmed mean withstands": (
        ["aggregation.rule=trimmed_mean", "aggregation.malicious=2", "secure.sessions=3"],
        "aggregation.malicious: got 2, and with [secure] a round has the means of 3 sessions, of which a trimmed mean "
        "with f=2 needs at least 5: allowed is fewer, or more secure.sessions",
    ),
    "a bound on norms at the coordinator": (
        ["aggregation.norm_bound=1.0"],
        "aggregation.norm_bound: got 1.0, and with [secure] the norm of one update is not visible: allowed is no "
        "norm_bound: secure.clip_norm bounds each update at its site",
    ),
    "the median norm as the bound": (
        ["aggregation.norm_bound=median"],
        'aggregation.norm_bound: got "median", and with [secure] the norm of one update is not visible: allowed is no '
        "norm_bound: secure.clip_norm bounds each update at its site",
    ),
    "neighbours": (
        ["aggregation.rule=median", "aggregation.malicious=1", "aggregation.mix_neighbours=true", "secure.sessions=3"],
        "aggregation.mix_neighbours: got true, and with [secure] the distance of two updates is not visible: allowed "
        "is false",
    ),
    "fednova": (
        ["aggregation.algorithm=fednova"],
        'aggregation.algorithm: got "fednova", and with [secure] its correction needs values of single updates, or '
        'tensors beside them: allowed is "fedavg"',
    ),
    "scaffold": (
        ["aggregation.algorithm=scaffold", "aggregation.num_clients=9"],
        'aggregation.algorithm: got "scaffold", and with [secure] its correction needs values of single updates, or '
        'tensors beside them: allowed is "fedavg"',
    ),
    "updates that leave tensors out": (
        ["aggregation.partial=true"],
        "aggregation.partial: got true, and with [secure] the members of a session add the same tensors: allowed is "
        "false",
    ),
    "sums on a GPU": (
        ["aggregation.device=cuda"],
        'aggregation.device: got "cuda", and with [secure] the words of a sum are added by the CPU: allowed is "cpu"',
    ),
    "a weight without a scale": (
        ["aggregation.weighting=uniform"],
        'secure.examples_max: got 100, and with [secure] weighting "uniform" counts all the same: allowed is no '
        'examples_max, or aggregation.weighting = "examples"',
    ),
    "fedbuff": (
        ["round.mode=fedbuff", "round.cohort_size=2"],
        'round.mode: got "fedbuff", and with [secure] the members of a session add their updates together: allowed is '
        '"sync"',
    ),
    "fedasync": (
        ["round.mode=fedasync", "round.cohort_size=2"],
        'round.mode: got "fedasync", and with [secure] the members of a session add their updates together: allowed is '
        '"sync"',
    ),
    "late updates": (
        ["round.late=next_round"],
        'round.late: got "next_round", and with [secure] an update is masked for the session of its round: allowed is '
        '"discard"',
    ),
    "scaled work": (
        ["round.partial_work=scaled"],
        'round.partial_work: got "scaled", and with [secure] the work of one update is not visible: allowed is '
        '"accept"',
    ),
    "refused work": (
        ["round.partial_work=refuse"],
        'round.partial_work: got "refuse", and with [secure] the work of one update is not visible: allowed is '
        '"accept"',
    ),
    "a largest share": (
        ["round.max_share=0.5"],
        "round.max_share: got 0.5, and with [secure] the weight of one update is not visible: allowed is 1: "
        "secure.examples_max bounds the weight of each update",
    ),
    "a largest number of examples": (
        ["round.max_examples=500"],
        "round.max_examples: got 500, and with [secure] the examples of one update are not visible: allowed is "
        "1000000000, the default: secure.examples_max bounds the weight of each update",
    ),
    "a largest number of units": (
        ["round.max_units=1"],
        "round.max_units: got 1, and with [secure] the examples of one update are not visible: allowed is 1000000, the "
        "default: secure.examples_max bounds the weight of each update",
    ),
    "sizes of single clients": (
        ["cohort.sampler=weighted"],
        'cohort.sampler: got "weighted", and with [secure] it needs the size of each client\'s data: allowed is '
        '"uniform", "stratified", or a custom one',
    ),
    "losses of single clients": (
        ["cohort.sampler=power_of_choice", "cohort.candidates=9"],
        'cohort.sampler: got "power_of_choice", and with [secure] it needs the loss of each client: allowed is '
        '"uniform", "stratified", or a custom one',
    ),
    "utilities of single clients": (
        ["cohort.sampler=oort"],
        'cohort.sampler: got "oort", and with [secure] it needs the loss of each client: allowed is '
        '"uniform", "stratified", or a custom one',
    ),
    "evaluations by two clients": (
        ["evaluation.clients_every=2", "evaluation.clients_max=2"],
        "evaluation.clients_max: got 2, and with [secure] the clients' metrics are added in sessions of at least 3: "
        "allowed is 0, for all clients, or at least 3",
    ),
    "metrics of sites": (
        ["evaluation.keep_sites=7"],
        "evaluation.keep_sites: got 7, and with [secure] there are no metrics of single sites: allowed is 0",
    ),
    "the best version by clients": (
        ["model.best=auroc", "model.source=clients", "evaluation.clients_every=1", "secure.metrics.accuracy=2"],
        'model.best: got "auroc", and with [secure] the clients add only the metrics that the terms name: allowed is a '
        'metric of secure.metrics (accuracy, loss), or source = "server"',
    ),
    "an early stop by clients": (
        ["stop.metric=auroc", "stop.source=clients", "stop.patience=3", "evaluation.clients_every=1"],
        'stop.metric: got "auroc", and with [secure] the clients add only the metrics that the terms name: allowed is '
        'a metric of secure.metrics (loss), or source = "server"',
    ),
    "a run of messages": (
        ["program.main=m:main"],
        'program.main: got "m:main", and with [secure] the program reads the reply of each site: allowed is a run of '
        "rounds, for a Flower app program.native = true: run it natively",
    ),
    "a hosted Flower app": (
        ["program.main=app/pyproject.toml:app"],
        'program.main: got "app/pyproject.toml:app", and with [secure] the program reads the reply of each site: '
        "allowed is a run of rounds, for a Flower app program.native = true: run it natively",
    ),
    "two members": (
        ["round.cohort_size=2"],
        "round.cohort_size: got 2, and with [secure] a session has at least 3 members: allowed is >= 3",
    ),
    "a quorum that no session has": (
        ["round.quorum=2"],
        "round.quorum: got 2, and with [secure] a session has at least 3 members, so no round could end with fewer: "
        "allowed is 3 to 9",
    ),
    "more sessions than members make": (
        ["secure.sessions=4"],
        "secure.sessions: got 4, and with [secure] 9 updates make 3 sessions of 3 members or more: allowed is 1 to 3, "
        "or a round.cohort_size of at least 12",
    ),
    "a threshold of less than half": (
        ["secure.threshold=4"],
        "secure.threshold: got 4, and with [secure] in a session of 9 members two groups of that size could open two "
        'sums: allowed is 5 to 9, or "two_thirds"',
    ),
    "a threshold above all": (
        ["secure.threshold=10"],
        "secure.threshold: got 10, and with [secure] a session of 9 members has no such number: allowed is 5 to 9, or "
        '"two_thirds"',
    ),
    "a threshold for one size of session": (
        ["secure.sessions=2", "round.over_selection=2.0", "secure.threshold=5"],
        "secure.threshold: got 5, and with [secure] a session of 4 to 9 members has no such number: allowed is "
        '"two_thirds"',
    ),
    "texts that no terms hold": (
        [f"local.note={'x' * 17_000}"],
        "secure: the values of [local], [task] and [schedule.local] are 17096 characters of JSON, and the terms of a "
        "sum have at most 16384 of them: allowed are shorter values",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_secure_sums_is_refused_with_the_way_out(name: str) -> None:
    overrides, sentence = REFUSED[name]
    assert faults_of(overrides) == (sentence,)
    with pytest.raises(ConfigError) as caught:  # a resume that changes to it is refused for the same reason, if any
        changed(run_with([]), overrides, version=1)
    assert sentence in {fault.partition(": ")[2] for fault in caught.value.faults}


def test_a_run_that_weighs_by_examples_needs_their_scale() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(RunFile, 'task = "m:t"', ["round.cohort_size=9", "secure.clip_norm=1.0"], name="")
    assert caught.value.faults == (
        'secure.examples_max: missing, and aggregation.weighting is "examples": allowed is the number of examples with '
        'the full weight, at least 1, or aggregation.weighting = "uniform"',
    )


def test_all_that_does_not_go_together_is_named_at_once() -> None:
    names = ["a codec", "late updates", "a largest share", "metrics of sites", "a run of messages", "two members"]
    expected = {REFUSED[name][1] for name in names}
    found = faults_of([override for name in names for override in REFUSED[name][0]])
    assert {*found} == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("secure.bits=16", "secure.bits: got 16; allowed: 32 | 64"),
        ("secure.clip_norm=0", "secure.clip_norm: got 0; allowed: number > 0"),
        ("secure.clip_norm=nan", "secure.clip_norm: got nan; allowed: number > 0, finite"),
        ("secure.clip_norm=inf", "secure.clip_norm: got inf; allowed: number > 0, finite"),
        ("secure.examples_max=0", "secure.examples_max: got 0; allowed: integer >= 1, <= 1099511627776"),
        ("secure.threshold=1", 'secure.threshold: got 1; allowed: "two_thirds" | integer >= 2, <= 64'),
        ("secure.threshold=half", "secure.threshold: got 'half'; allowed: \"two_thirds\" | integer >= 2, <= 64"),
        ("secure.session_max=4", "secure.session_max: got 4; allowed: integer >= 5, <= 64"),
        ("secure.session_max=65", "secure.session_max: got 65; allowed: integer >= 5, <= 64"),
        ("secure.sessions=0", "secure.sessions: got 0; allowed: integer >= 1, <= 1000000"),
        ("secure.attempts=101", "secure.attempts: got 101; allowed: integer >= 1, <= 100"),
        ("secure.stage_timeout=0", "secure.stage_timeout: got 0; allowed: number > 0, <= 31622400"),
        ("secure=7", "secure: got 7; allowed: table"),
        ("secure.metrics.f1=0", "secure.metrics.f1: got 0; allowed: integer >= 1, <= 10000"),
    ],
)
def test_values_out_of_range_are_refused(wrong: str, sentence: str) -> None:
    given = [override for override in NINE if not override.startswith(wrong.partition("=")[0])]
    with pytest.raises(ConfigError) as caught:
        load_text(RunFile, 'task = "m:t"', [*given, wrong], name="run.toml")
    assert caught.value.faults == (f"--set: {sentence}",)


def test_an_unknown_key_of_the_table_is_refused_with_its_keys() -> None:
    (fault,) = faults_of(["secure.clipnorm=1.0"])
    assert fault.startswith("secure.clipnorm: unknown key (did you mean clip_norm? known: bits, clip_norm, ")
    with pytest.raises(ConfigError, match=r"secure\.clip_norm: missing; allowed: number > 0"):
        load_text(RunFile, 'task = "m:t"', ["secure.bits=64"], name="run.toml")


def test_three_members_are_allowed_and_said_to_have_no_slack() -> None:
    assert run_with(["round.cohort_size=3"]).notices == [
        "secure.threshold: 3 of the 3 members of a session open its sum, so one member that drops out ends its "
        "session: a larger round.cohort_size leaves slack"
    ]
    assert run_with(["round.cohort_size=4"]).notices == []
    assert run_with(["secure.threshold=9"]).notices[0].startswith("secure.threshold: 9 of the 9 members")


def test_what_goes_with_secure_sums_is_accepted() -> None:
    for overrides in (
        ["optimizer.name=fedadam", "local.proximal=0.1", "round.linger=3.0", "round.grace=2.0", "round.quorum=0.5"],
        ["round.over_selection=1.3", "cohort.sampler=stratified", "evaluation.keep_sites=0", "model.best=loss"],
        ["aggregation.rule=median", "secure.sessions=3", "stop.metric=loss", "stop.patience=2"],
        ["aggregation.rule=trimmed_mean", "aggregation.malicious=1", "secure.sessions=3"],
        ["schedule.local.lr={kind='cosine'}", "local.lr=0.1", "local.keep='head'", "model.start=run:digits@3"],
        ["cohort.sampler=mine:sampler", "optimizer.name=mine:optimizer"],
        ["evaluation.clients_every=1", "evaluation.clients_max=3", "model.best=loss", "model.source=clients"],
        ["evaluation.clients_every=1", "stop.metric=f1", "stop.source=clients", "stop.target=1", "secure.metrics.f1=3"],
    ):
        assert run_with(overrides).secure is not None


def test_the_native_run_of_a_flower_app_keeps_no_metrics_of_sites_whatever_its_plan_says() -> None:
    app = "app/pyproject.toml:app"
    config = run_with([f"task={app}", "program.native=true", "evaluation.keep_sites=100000"])
    assert config.rules.keep_sites == 0


def test_the_example_of_the_page_is_a_run_s() -> None:
    page = (Path(__file__).parents[3] / "docs" / "secure.md").read_text("utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    config = load_text(RunFile, f'task = "m:t"\n{text}', name="").run
    assert config.rules.secure is not None
    assert config.notices == []


def test_a_model_with_tensors_beside_it_is_refused() -> None:
    weight = Tensor("weight", "F32", (3, 2))
    assert [*faults_of_layout((weight,))] == []
    beside = [Tensor(f"algorithm/momentum.{number}", "F32", (2,)) for number in range(4)]
    assert [*faults_of_layout((weight, *beside))] == [
        "task: its algorithm sends 4 tensors beside the model (algorithm/momentum.0, algorithm/momentum.1, "
        "algorithm/momentum.2, ...), and with [secure] only the model's add up: allowed is an algorithm without shared "
        "tensors"
    ]
    assert len([*faults_of_layout((weight, Tensor("control/weight", "F32", (3, 2))))]) == 1


def test_a_simulation_takes_secure_sums_and_has_the_faults_of_a_deployed_run() -> None:
    assert load_text(SimulationFile, 'task = "m:t"', NINE, name="run.toml").simulation.secure == "fast"
    with pytest.raises(ConfigError) as caught:
        load_text(SimulationFile, 'task = "m:t"', [*NINE, "round.late=next_round"], name="run.toml")
    assert caught.value.faults == (f"run.toml: {REFUSED['late updates'][1]}",)


def test_no_flower_app_is_made_of_a_secure_run() -> None:
    with pytest.raises(ConfigError) as caught:
        counterpart(run_with([]))
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["secure.clip_norm", "secure.examples_max"]


STATISTICS = """
[secure.statistics]
splits = ["train", "test"]
labels = {target = 4}
features = {pressure = [50, 250], age = [0, 40.5, 60, 120]}
"""


def test_the_statistics_before_a_run_are_a_layout_of_sorted_names_and_floats() -> None:
    secure = run_with([], STATISTICS).secure
    assert secure is not None
    assert secure.statistics is not None
    question = secure.statistics.question(3)
    said = question.in_words()
    assert said.startswith("train and test: examples, labels of target (4), age within 0 to 120 (3 bins), pressure ")
    assert question.seed == 3
    config = run_with([], STATISTICS)
    assert load_text(RunConfig, effective(config), name="") == config


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("features.age=[1]", "secure.statistics.features.age: got [1.0]: allowed are 2 to 1001 edges"),
        ("features.age=[0,1e12]", "secure.statistics.features.age: got an edge 1e+12, and the sum of squares could"),
        ("labels.target=1001", "secure.statistics.labels.target"),
        ("quantiles=[0.5]", "got quantiles, which would tell a number of a single site or example: allowed are labels"),
        ("max=1", "got max, which would tell a number of a single site"),
        ("per_site=true", "got per_site, which would tell a number of a single site"),
        ('sites=["a","b"]', 'secure.statistics.sites: got "a, b", and with [secure] a sum has at least 3 members'),
        ("columns=1", "unknown key"),
    ],
)
def test_statistics_that_sites_cannot_add_are_refused(wrong: str, sentence: str) -> None:
    faults = faults_of([f"secure.statistics.{wrong}"], STATISTICS)
    assert any(sentence in fault for fault in faults), faults
