"""The settings files of a run, a coordinator and an agent: what they accept and what they refuse."""

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from atoll.aggregation.optimizers import OPTIMIZERS
from atoll.aggregation.rules.coordinate import Median, TrimmedMean
from atoll.aggregation.rules.geometric import CenteredClipping, GeometricMedian, MultiKrum, NearestNeighbourMixing
from atoll.client.config import AgentConfig
from atoll.protocol.settings import ConfigError, describe, effective, load_text
from atoll.protocol.vocabulary import ClientId, Digest
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.config.kinds import CODECS, SERVER_OPTIMIZERS
from atoll.server.config.process import AggregatorConfig, CoordinatorConfig, HostFile
from atoll.server.config.run import CohortConfig, RunConfig, RunFile
from atoll.server.folding.method import Method
from atoll.server.members.oort_pacer import PACER_WINDOW
from atoll.server.rounds.events import Contribution
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import SAMPLERS, power_of_choice
from atoll.tensors.codecs.names import FAMILIES, parse_codec

EXAMPLE = """
name = "digits-1"
task = "examples/digits.py:task"
rounds = 20
pause = 0.5

[round]
cohort_size = 8
quorum = 0.5
deadline = "adaptive"

[cohort]
sampler = "stratified"

[local]
lr = 0.05
betas = [0.9, 0.999]
nesterov = true

[evaluation]
clients_every = 5

[coordinator]
listen = "[::1]:0"
lease = 12.0
"""


def test_one_file_holds_a_run_and_its_coordinator() -> None:
    file = load_text(RunFile, EXAMPLE, ["local.lr=0.1"], name="run.toml")
    assert file.round == StragglerPolicy(cohort_size=8, quorum=0.5, deadline="adaptive")
    assert file.local == {"lr": 0.1, "betas": [0.9, 0.999], "nesterov": True}
    assert file.coordinator == CoordinatorConfig(listen="[::1]:0", lease=12.0)
    assert type(file.run) is RunConfig
    assert file.run.model_dump() == file.model_dump(exclude={"coordinator", "notify"})
    assert load_text(RunFile, effective(file), name="") == file


def test_a_coordinator_without_a_run_reads_its_own_table_alone() -> None:
    host = load_text(HostFile, "[coordinator]\nstate = 'here'\n", name="coordinator.toml")
    assert host.coordinator.state == Path("here")
    assert HostFile().coordinator == CoordinatorConfig()
    assert CoordinatorConfig().state == Path("atoll-state")


def test_heartbeats_are_a_third_of_the_lease_unless_they_are_set() -> None:
    assert CoordinatorConfig(lease=12.0).heartbeat_interval == 4
    assert CoordinatorConfig(lease=12.0, heartbeat=1.0).heartbeat_interval == 1


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("name=Digits", "name: got 'Digits': allowed: 1 to 64 of the characters a-z"),
        ("name=''", "name: got ''"),
        ("task=digits", "task: got 'digits': allowed: module:attribute"),
        ("rounds=0", "rounds: got 0; allowed: integer >= 1"),
        ("seed=-1", "seed: got -1; allowed: integer >= 0"),
        ("pause=inf", "pause: got inf; allowed: number >= 0"),
        ("round.cohort_sise=3", "round.cohort_sise: unknown key (did you mean cohort_size?"),
        (
            "cohort.sampler=unifrom",
            'cohort.sampler: got \'unifrom\': allowed: "uniform" | "weighted" | "stratified" | "power_of_choice" |',
        ),
        ("local.lr=nan", "local.lr: got nan; allowed: "),
        ("local.lr={a = 1}", "local.lr: got {'a': 1}; allowed: "),
        ("local.day=1979-05-27", "local.day: got datetime.date(1979, 5, 27); allowed: "),
        ("evaluation.deadline=0", "evaluation.deadline: got 0; allowed: number > 0"),
        ("coordinator.listen=0.0.0.0", "coordinator.listen: got '0.0.0.0': allowed: host:port"),
        ("coordinator.keep_versions=0", "coordinator.keep_versions: got 0"),
    ],
)
def test_a_wrong_value_in_a_run_s_file_is_refused(override: str, fault: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(RunFile, EXAMPLE, [override], name="run.toml")
    assert len(refusal.value.faults) == 1
    assert str(refusal.value).startswith(f"--set: {fault}")


def test_a_run_names_its_task_and_a_heartbeat_is_shorter_than_the_lease() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(RunFile, "[coordinator]\nlease = 5\nheartbeat = 5\n", name="run.toml")
    assert refusal.value.faults == (
        "run.toml: task: missing; allowed: string",
        "run.toml: coordinator: heartbeat 5.0 is not less than lease (5.0)",
    )


def test_scaffold_is_told_everything_that_its_rounds_do_not_allow_at_once() -> None:
    scaffold = ["aggregation.algorithm=scaffold", "aggregation.num_clients=6"]
    with pytest.raises(ConfigError) as refusal:
        load_text(RunFile, EXAMPLE, [*scaffold, "round.late=next_round"], name="run.toml")
    assert refusal.value.faults == (
        "run.toml: round: cohort_size 8 is more than aggregation.num_clients (6)",
        "run.toml: round: late 'next_round' cannot be combined with scaffold, whose control variates must count whole "
        'and at once: only "discard" does',
    )
    with pytest.raises(
        ConfigError, match="mode 'fedbuff' cannot be combined with scaffold, whose control variates must"
    ):
        load_text(RunFile, "task = 'm:t'", [*scaffold, "round.mode=fedbuff"], name="run.toml")
    method = Method.of(AggregationConfig(algorithm="scaffold", num_clients=6), OptimizerConfig())
    assert (method.algorithm, method.num_clients) == ("scaffold", 6)


def test_uniform_weights_ignore_the_examples_and_keep_the_discounts() -> None:
    shares = [Contribution(ClientId(c), Digest(c), n, scale) for c, n, scale in (("a", 900, 1.0), ("b", 1, 0.5))]
    uniform = Method.of(AggregationConfig(weighting="uniform"), OptimizerConfig())
    assert uniform.weights(shares) == (2, 1)
    assert uniform.weights([replace(share, scale=1.0) for share in shares]) == (1, 1)
    assert Method.of(AggregationConfig(), OptimizerConfig()).weights([shares[0]]) == (900,)


def test_a_user_s_own_sampler_is_a_reference() -> None:
    file = load_text(RunFile, EXAMPLE, ["cohort.sampler=mine.py:draw"], name="run.toml")
    assert file.cohort.sampler == "mine.py:draw"


@pytest.mark.parametrize(
    ("settings", "faults"),
    [
        (
            {"listen": "127.0.0.1:17070", "enrol": "127.0.0.1:17070", "admin": "localhost:17070"},
            [
                "listen 127.0.0.1:17070 and admin localhost:17070",
                "listen 127.0.0.1:17070 and enrol 127.0.0.1:17070",
                "admin localhost:17070 and enrol 127.0.0.1:17070",
            ],
        ),
        (
            {"admin": "127.0.0.1:7071"},
            ["admin 127.0.0.1:7071 and enrol (the port after listen) 127.0.0.1:7071"],
        ),
        (
            {"listen": "0.0.0.0:7070", "public": "fl.example.org", "admin": "127.0.0.1:7070"},
            ["listen 0.0.0.0:7070 and admin 127.0.0.1:7070"],
        ),
        (
            {"health": "127.0.0.1:7071", "metrics": "127.0.0.1:7070"},
            [
                "listen 127.0.0.1:7070 and metrics 127.0.0.1:7070",
                "health 127.0.0.1:7071 and enrol (the port after listen) 127.0.0.1:7071",
            ],
        ),
    ],
)
def test_ports_that_clash_are_refused(settings: dict[str, str], faults: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(HostFile, "", [f"coordinator.{name}={value}" for name, value in settings.items()], name="")
    assert list(refusal.value.faults) == [
        f"coordinator: {it} are the same port: give each a different one" for it in faults
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "enrol": "127.0.0.1:0"},
        {"listen": "127.0.0.1:7070", "admin": "127.0.0.2:7070"},
        {"listen": "127.0.0.1:7070", "admin": "127.0.0.1:7071", "insecure": True},
        {"listen": "127.0.0.1:65535", "enrol": "127.0.0.1:7071"},
        {"listen": "127.0.0.1:65535", "insecure": True},
    ],
)
def test_ports_that_differ_or_are_not_taken_are_allowed(settings: dict[str, Any]) -> None:
    assert CoordinatorConfig(**settings).listen == settings["listen"]


@pytest.mark.parametrize("public", ["fl.example.org:7070", "https://fl.example.org", "a b"])
def test_the_public_name_has_no_port_and_its_refusal_asks_for_none(public: str) -> None:
    with pytest.raises(ValueError, match="allowed: a name, an IPv4 or an IPv6 address; without a port"):
        CoordinatorConfig(public=public)


def test_the_last_port_has_no_next_one_for_members() -> None:
    with pytest.raises(ValueError, match=r"listen 127.0.0.1:65535 has no next port.*: name one in `enrol`"):
        CoordinatorConfig(listen="127.0.0.1:65535")


def test_an_insecure_process_takes_no_join_code() -> None:
    for kind, settings in ((AgentConfig, {"site": "a"}), (AggregatorConfig, {"rank": 0, "ranks": 1, "state": "r"})):
        given = [f"{name}={value}" for name, value in (settings | {"insecure": "true", "join": "code"}).items()]
        with pytest.raises(ConfigError) as refusal:
            load_text(kind, "", given, name="")
        (fault,) = refusal.value.faults
        assert fault.startswith("insecure and a join code: ")
        assert fault.endswith("the code would not be used: leave one out")


def test_an_agent_needs_nothing_but_its_site() -> None:
    agent = load_text(AgentConfig, "", ["site=north"], name="")
    assert (agent.site, agent.coordinator, agent.insecure, agent.device) == ("north", "", False, "auto")
    assert load_text(AgentConfig, effective(agent), name="") == agent


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("site=../north", "--set: site: got '../north': allowed: 1 to 64"),
        ("coordinator=example.org", "--set: coordinator: got 'example.org'"),
        ("device=tpu", '--set: device: got \'tpu\'; allowed: "auto" | "cpu" | "cuda"'),
        ("reconnect_min=20.0", "agent.toml: reconnect_min 20.0 is more than reconnect_max (15.0)"),
        ("spool_max_bytes=1", "--set: spool_max_bytes: got 1"),
    ],
)
def test_a_wrong_value_in_an_agent_s_file_is_refused(override: str, fault: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(AgentConfig, "site = 'north'\n", [override], name="agent.toml")
    assert str(refusal.value).startswith(fault)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_option_of_an_optimizer_reaches_it_and_no_other_is_taken(name: str) -> None:
    values = {"lr": 0.25, "momentum": 0.5, "nesterov": True, "beta1": 0.5, "beta2": 0.75, "tau": 0.125}
    assert type(OptimizerConfig(name=name).build()) is OPTIMIZERS[name]
    for option, value in values.items():
        if option in SERVER_OPTIMIZERS.options_of(name):
            assert getattr(OptimizerConfig(**{"name": name, option: value}).build(), option) == value
        else:
            with pytest.raises(ValueError, match=f"{option} is not an option of {name} .allowed: "):
                OptimizerConfig(**{"name": name, option: value})


RULE_SETTINGS = {
    "mean": {},
    "median": {},
    "trimmed_mean": {"malicious": 0.2},
    "multi_krum": {"malicious": 1, "num_selected": 2},
    "geometric_median": {"num_steps": 3},
    "centered_clipping": {"radius": 1.5},
}
RULE_CLASSES = {
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "multi_krum": MultiKrum,
    "geometric_median": GeometricMedian,
    "centered_clipping": CenteredClipping,
}


@pytest.mark.parametrize("rule", sorted(RULE_SETTINGS))
def test_every_rule_is_built_with_its_options(rule: str) -> None:
    built = AggregationConfig(rule=rule, **RULE_SETTINGS[rule]).build()
    assert built is None if rule == "mean" else isinstance(built, RULE_CLASSES[rule])
    for option, value in RULE_SETTINGS[rule].items():
        assert getattr(built, option) == value
    if rule != "mean":
        settings = {"malicious": 1} | RULE_SETTINGS[rule]
        mixed = AggregationConfig(rule=rule, mix_neighbours=True, **settings).build()
        assert isinstance(mixed, NearestNeighbourMixing)
        assert isinstance(mixed.rule, RULE_CLASSES[rule])


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"rule": "meen"}, 'allowed: "mean" | "median"'),
        ({"rule": "median", "malicious": 1}, "malicious is not an option of median .allowed: none"),
        ({"rule": "mean", "radius": 1.0}, "radius is not an option of mean"),
        ({"rule": "trimmed_mean"}, "trimmed_mean needs malicious"),
        ({"rule": "centered_clipping"}, "centered_clipping needs radius"),
        ({"rule": "median", "mix_neighbours": True}, "median with mix_neighbours needs malicious"),
        ({"mix_neighbours": True, "malicious": 1}, "rule is mean"),
        (
            {"algorithm": "fednova", "rule": "median"},
            "fednova needs the exact mean, and cannot be combined with rule 'median'",
        ),
        ({"algorithm": "fednova", "norm_bound": 1.0}, "cannot be combined with norm_bound"),
        ({"algorithm": "fedmoon"}, "algorithm"),
        (
            {"algorithm": "scaffold", "rule": "median"},
            "cannot be combined with rule 'median'; scaffold needs num_clients",
        ),
        ({"num_clients": 3}, "num_clients is not an option of fedavg"),
        ({"rule": "trimmed_mean", "malicious": 0.5}, "less than 0.5"),
        ({"rule": "trimmed_mean", "malicious": -1}, "greater than or equal to 0"),
        ({"norm_bound": "mean"}, "norm_bound"),
        ({"norm_bound": 0.0}, "norm_bound"),
        ({"codec": "zip"}, r"\"none\" .* \| \"topk\"; a codec of a package"),
        ({"codec": "topk"}, "codec topk needs topk_fraction"),
        ({"codec": "topk", "topk_fraction": 0.0}, "greater than or equal to 0.000001"),
        ({"codec": "topk", "topk_fraction": 1.5}, "less than or equal to 1"),
        ({"codec": "sign", "topk_fraction": 0.1}, "topk_fraction is not an option of codec sign"),
        ({"topk_fraction": 0.1}, "topk_fraction is not an option of codec none"),
    ],
)
def test_an_aggregation_that_makes_no_sense_is_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        AggregationConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, ""),
        ({"codec": "none"}, ""),
        *(({"codec": family}, family) for family in FAMILIES if family != "topk"),
        ({"codec": "topk", "topk_fraction": 0.01}, "topk:0.01"),
        ({"codec": "topk", "topk_fraction": 1 / 3}, "topk:0.333333"),
        ({"codec": "topk", "topk_fraction": 1.0}, "topk:1"),
        ({"codec": "topk", "topk_fraction": 1e-6}, "topk:0.000001"),
    ],
)
def test_every_codec_has_the_name_that_travels(settings: dict[str, Any], name: str) -> None:
    aggregation = AggregationConfig(**settings)
    assert aggregation.codec_name == name
    if name:
        assert parse_codec(name).name == name
    assert set(CODECS.variants) == {"none", *FAMILIES}


def test_a_quorum_that_is_too_small_for_the_rule_is_refused() -> None:
    text = "task = 'm:t'\n[aggregation]\nrule = 'multi_krum'\nmalicious = 2\n[round]\ncohort_size = 10\nquorum = 6\n"
    with pytest.raises(
        ConfigError, match="may end with its quorum, and 6 updates are too few: multi-Krum with f=2 needs"
    ):
        load_text(RunFile, text, [], name="run.toml")
    assert load_text(RunFile, text, ["round.quorum=7"], name="run.toml").run.aggregation.rule == "multi_krum"


def test_a_rule_of_one_s_own_is_an_object_with_reduce(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Least:\n    def reduce(self, rows):\n        return rows.min(0)\nleast = Least()\nnone = 3\n"
    )
    assert AggregationConfig(rule=f"{path}:least").build().reduce(np.array([[2.0], [1.0]])) == 1.0
    for attribute, fault in (
        ("none", "is of the type int; allowed: an object"),
        ("Least", "is the class Least"),
        ("gone", "there is no gone"),
    ):
        with pytest.raises(ConfigError, match=fault):
            AggregationConfig(rule=f"{path}:{attribute}").build()


def test_a_rule_whose_code_is_gone_hinders_only_who_goes_on_with_the_run(tmp_path: Path) -> None:
    gone = AggregationConfig(rule=f"{tmp_path}/gone.py:rule")
    with pytest.raises(ConfigError):
        Method.of(gone, OptimizerConfig())
    over = Method.of(gone, OptimizerConfig(), is_over=True)
    with pytest.raises(ConfigError, match=r"gone\.py"):
        over.rule.reduce(np.zeros((1, 1), np.float32))


def test_a_missing_device_refuses_a_run_at_once() -> None:
    elsewhere = AggregationConfig(device="cuda:99")
    with pytest.raises(ConfigError, match=r"aggregation: device 'cuda:99' is not there: torch .* allowed here: cpu"):
        Method.of(elsewhere, OptimizerConfig())
    assert Method.of(elsewhere, OptimizerConfig(), is_over=True).device is None
    assert Method.of(elsewhere, OptimizerConfig(), sums_here=False).device is None, "of ranks on other machines"
    assert Method.of(AggregationConfig(), OptimizerConfig()).device is None
    with pytest.raises(ValueError, match="device cuda is for the rule mean, and rule is median: allowed is cpu"):
        AggregationConfig(rule="median", device="cuda")
    with pytest.raises(ValueError, match="device"):
        AggregationConfig(device="tpu")


@pytest.mark.parametrize("model_type", [RunFile, AgentConfig])
def test_every_setting_has_a_type_and_a_documentation(model_type: type[BaseModel]) -> None:
    for setting in describe(model_type):
        assert len(setting.doc) > 20, setting
        assert setting.doc.endswith("."), setting
        assert setting.type, setting
        assert setting.default or setting.is_required or "absent:" in setting.doc, setting


def test_fedasync_has_one_step_and_every_table_that_says_otherwise_is_named() -> None:
    text = """
    task = "digits:task"
    [round]
    mode = "fedasync"
    [optimizer]
    name = "fedadam"
    [aggregation]
    rule = "median"
    """
    with pytest.raises(ConfigError) as caught:
        load_text(RunFile, text, name="run.toml")
    assert caught.value.faults == (
        "run.toml: optimizer: mode fedasync has only its alpha, which is round.alpha",
        "run.toml: aggregation: median is for several updates, mode fedasync applies one by one",
    )


def test_the_effective_settings_of_an_asynchronous_run_load_to_the_same() -> None:
    for mode in ("fedbuff", "fedasync"):
        file = load_text(RunFile, f'task = "digits:task"\n[round]\nmode = "{mode}"', name="run.toml")
        assert load_text(RunFile, effective(file), name="") == file
        assert file.round.max_staleness == 20


# ---------------------------------------------------------------- samplers


def cohort(text: str) -> CohortConfig:
    return load_text(
        RunFile, f"task = 'm:t'\n[round]\ncohort_size = 4\nover_selection = 1.3\n[cohort]\n{text}", name="f"
    ).cohort


def test_each_sampler_is_built_with_its_options() -> None:
    assert cohort("sampler = 'weighted'").build() is SAMPLERS["weighted"]
    choice = cohort("sampler = 'power_of_choice'\ncandidates = 12").build()
    assert isinstance(choice, partial)
    assert (choice.func, choice.keywords) == (power_of_choice, {"num_considered": 12})
    assert cohort("sampler = 'oort'").build() == Oort()
    options = dict(zip((field.name for field in fields(Oort)), (0.5, 1.0, 0.0, 3.0, 0.9, 0.1), strict=True))
    text = "\n".join(f"{name} = {value}" for name, value in options.items())
    assert cohort(f"sampler = 'oort'\n{text}").build() == Oort(**options)


def test_oort_s_defaults_are_those_that_the_documentation_tells() -> None:
    told = {s.key.removeprefix("cohort."): s.doc for s in describe(RunConfig) if s.key.startswith("cohort.")}
    for field in fields(Oort):
        assert told[field.name].endswith(f"absent: {field.default:g}.")
    assert told["pacer_window"].endswith(f"absent: {PACER_WINDOW}.")


def test_only_oort_has_a_pacer() -> None:
    windows = [
        RunConfig(task="m:t", cohort=CohortConfig(**options)).rules.pacer_window  # type: ignore[arg-type]
        for options in ({}, {"sampler": "oort"}, {"sampler": "oort", "pacer_window": 7})
    ]
    assert windows == [0, 20, 7]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("candidates = 9", "cohort: candidates is not an option of uniform (allowed: none)"),
        ("sampler = 'power_of_choice'", "cohort: power_of_choice needs candidates"),
        (
            "sampler = 'power_of_choice'\ncandidates = 5",
            "cohort: candidates 5 is less than the 6 that may be invited at on",
        ),
        (
            "sampler = 'power_of_choice'\ncandidates = 9\npenalty = 1.0",
            "cohort: penalty is not an option of power_of_choice",
        ),
        ("sampler = 'oort'\ncandidates = 9", "cohort: candidates is not an option of oort (allowed: exploration, expl"),
        ("sampler = 'oort'\npatience = 0.0", "cohort.patience: got 0.0; allowed: number > 0, <= 1"),
        ("sampler = 'mine.py:draw'\npenalty = 1.0", "cohort: penalty is not an option of mine.py:draw (allowed: none)"),
    ],
)
def test_an_option_of_another_sampler_is_a_fault(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        cohort(text)
    [line] = refusal.value.faults
    assert line.removeprefix("f: ").startswith(fault)


def test_an_asynchronous_run_may_fill_all_its_places_at_once() -> None:
    rounds, choice = "mode = 'fedbuff'\nconcurrency = 10", "sampler = 'power_of_choice'\ncandidates = 9"
    text = f"task = 'm:t'\n[round]\n{rounds}\n[cohort]\n{choice}"
    with pytest.raises(ConfigError, match="candidates 9 is less than the 10 that may be invited at once"):
        load_text(RunFile, text, name="f")
