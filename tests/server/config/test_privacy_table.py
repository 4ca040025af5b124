"""What goes with `[privacy]`, row by row of the table in `docs/privacy.md`; a row without a case fails."""

import re
from pathlib import Path

import pytest

from atoll.protocol.settings import ConfigError
from atoll.server.config.run_changes import changed, with_noise
from tests.server.config.test_privacy import faults_of, run_with

PAGE = Path(__file__).parents[3] / "docs" / "privacy.md"

GOES: dict[str, list[list[str]]] = {
    "algorithms": [["aggregation.algorithm=fedavg"], ["local.prox_mu=0.1"]],
    "server steps": [["optimizer.name=fedadam", "optimizer.lr=0.01"], ["schedule.optimizer.lr.kind=cosine"]],
    "weights": [["aggregation.weighting=uniform"]],
    "rules": [["aggregation.rule=mean"]],
    "codecs": [["aggregation.codec=qsgd8"], ["aggregation.codec=topk", "aggregation.topk_fraction=0.1"]],
    "rounds": [["round.over_selection=1.3", "round.linger=5.0", "round.grace=3.0"], ["round.approval_wait=60.0"]],
    "late and partial work": [["round.late=discard"], ["round.partial_work=accept"], ["round.partial_work=refuse"]],
    "modes": [["round.mode=sync"]],
    "samplers": [["cohort.sampler=uniform"], ["cohort.sampler=stratified"], ["cohort.sampler=mine:Sampler"]],
    "evaluations": [["evaluation.server_every=2"]],
    "best and stop": [
        ["model.best=accuracy", "model.source=server"],
        ["stop.metric=accuracy", "stop.source=server", "stop.patience=3"],
    ],
    "metrics of single sites": [["evaluation.keep_sites=0"]],
    "programs": [["options.frozen=true", "local.layers=[1, 2]"]],
    "device of the sums": [["aggregation.device=cpu"]],
    "secure sums": [
        ["secure.clip_norm=1.0", "round.quorum=10"],
        ["secure.clip_norm=1.0", "round.quorum=10", "privacy.noise_by=clients"],
    ],
}
REFUSED: dict[str, list[tuple[str, list[str], str, str]]] = {
    "algorithms": [
        ('aggregation.algorithm: got "fednova"', ["aggregation.algorithm=fednova"], "values of single", '"fedavg"'),
        (
            'aggregation.algorithm: got "scaffold"',
            ["aggregation.algorithm=scaffold", "aggregation.num_clients=9"],
            "values of single",
            '"fedavg"',
        ),
    ],
    "weights": [
        ('aggregation.weighting: got "examples"', ["aggregation.weighting=examples"], "most of the sum", '"uniform"'),
    ],
    "rules": [
        *(
            (f'aggregation.rule: got "{name}"', [f"aggregation.rule={name}", *more], "sum of clipped updates", '"mean"')
            for name, more in (
                ("median", ()),
                ("trimmed_mean", ("aggregation.malicious=1",)),
                ("multi_krum", ("aggregation.malicious=1",)),
                ("geometric_median", ()),
                ("centered_clipping", ("aggregation.radius=1.0",)),
                ("mine:Rule", ()),
            )
        ),
        (
            'aggregation.rule: got "concatenate"',
            ["aggregation.rule=concatenate", "aggregation.weighting=examples"],
            "sum of clipped updates",
            '"mean"',
        ),
        ("aggregation.norm_bound: got 1.0", ["aggregation.norm_bound=1.0"], "clip_norm", "no norm_bound"),
        (
            "aggregation.mix_neighbours: got true",
            ["aggregation.mix_neighbours=true", "aggregation.rule=median", "aggregation.malicious=1"],
            "distance",
            "false",
        ),
        ("aggregation.partial: got true", ["aggregation.partial=true"], "leaves out", "false"),
    ],
    "late and partial work": [
        ('round.late: got "next_round"', ["round.late=next_round"], "charged", '"discard"'),
        ('round.partial_work: got "scaled"', ["round.partial_work=scaled"], "weights are equal", '"refuse"'),
    ],
    "modes": [
        (f'round.mode: got "{name}"', [f"round.mode={name}"], "its time depends on", '"sync"')
        for name in ("fedbuff", "fedasync")
    ],
    "samplers": [
        (f'cohort.sampler: got "{name}"', [f"cohort.sampler={name}", *more], "of each client", '"uniform", "strat')
        for name, more in (("weighted", ()), ("power_of_choice", ("cohort.candidates=10",)), ("oort", ()))
    ],
    "evaluations": [
        ("evaluation.clients_every: got 2", ["evaluation.clients_every=2"], "without noise", "server_every"),
    ],
    "best and stop": [
        ('model.source: got "clients"', ["model.best=loss", "model.source=clients"], "without noise", '"server"'),
        (
            'stop.source: got "clients"',
            ["stop.metric=loss", "stop.source=clients", "stop.patience=3"],
            "without noise",
            '"server"',
        ),
    ],
    "metrics of single sites": [
        ("evaluation.keep_sites: got 7", ["evaluation.keep_sites=7"], "single sites", "0"),
    ],
    "programs": [('program.main: got "m:f"', ["program.main=m:f"], "single replies", "run it natively")],
    "device of the sums": [('aggregation.device: got "cuda"', ["aggregation.device=cuda"], "CPU", '"cpu"')],
    "secure sums": [
        ("secure.metrics: got", ["secure.clip_norm=1.0", "secure.metrics.f1=2"], "without noise", "no metrics"),
        ("secure.clip_norm: got 2.0", ["secure.clip_norm=2.0"], "clips its update once", "1"),
    ],
}
BY_THE_TASK = {"adapters, frozen bases", "meshes, parts, aggregation ranks", "tensors", "statistics of the sites' data"}
"""Rows of which no setting decides: tests of layouts, meshes and requests have them."""


def quoted(overrides: list[str]) -> list[str]:
    """Return overrides with their words as TOML strings."""
    return [
        re.sub(r"=([A-Za-z_]\w*(:\w+)?)$", lambda m: f"={m[1]}" if m[1] in ("true", "false") else f'="{m[1]}"', each)
        for each in overrides
    ]


def rows_of_page() -> set[str]:
    """Return the first column of the page's table."""
    section = PAGE.read_text("utf-8").partition("### What goes with it\n")[2].partition("\n#")[0]
    lines = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return {*lines[2:]}


def test_each_row_of_the_page_has_a_case() -> None:
    assert rows_of_page() == GOES.keys() | REFUSED.keys() | BY_THE_TASK


@pytest.mark.parametrize(
    "overrides", [pytest.param(each, id=f"{row}: {each[0]}") for row, cases in GOES.items() for each in cases]
)
def test_what_goes_is_accepted(overrides: list[str]) -> None:
    config = run_with(quoted(overrides))
    assert config.privacy is not None
    assert config.rules.privacy is not None


@pytest.mark.parametrize(
    ("begins", "overrides", "why", "way_out"),
    [pytest.param(*case, id=f"{row}: {case[1][0]}") for row, cases in REFUSED.items() for case in cases],
)
def test_what_does_not_go_is_refused_with_value_reason_and_way_out(
    begins: str, overrides: list[str], why: str, way_out: str
) -> None:
    sure = ["round.quorum=10"] if overrides[0].startswith("secure") else []
    found = [fault for fault in faults_of([*quoted(overrides), *sure]) if fault.startswith(begins)]
    assert len(found) == 1, faults_of(quoted(overrides))
    reason, _, allowed = found[0].partition("allowed is ")
    assert why in reason
    assert way_out in allowed


def test_a_resumed_run_is_refused_the_same_all_at_once() -> None:
    config = with_noise(run_with([]))
    overrides = [
        "round.late=next_round",
        "cohort.sampler=oort",
        "evaluation.clients_every=1",
        "aggregation.rule=median",
    ]
    with pytest.raises(ConfigError) as caught:
        changed(config, ["rounds=40", *quoted(overrides)], version=3)
    said = "\n".join(caught.value.faults)
    for override in overrides:
        assert f"{override.partition('=')[0]}: got " in said, said


@pytest.mark.parametrize(("more", "least"), [([], 10), (["round.min_available=50"], 50)])
def test_a_delta_of_one_client_or_more_is_refused(more: list[str], least: int) -> None:
    [fault] = faults_of([*more, f"privacy.delta={1 / least}"])
    assert fault.startswith(f"privacy.delta: got {1 / least}, and with [privacy] 1 / {least} or more allows to publish")
    assert run_with([*more, f"privacy.delta={0.99 / least}"]).privacy is not None
