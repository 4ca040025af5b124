"""The rules and the samplers of installed packages, named in the settings of a run like built-in ones."""

from pathlib import Path

import numpy as np
import pytest

from atoll.plugins.kind import AS_RECORDED
from atoll.protocol.settings import ConfigError, effective, load_text
from atoll.server.config.aggregation import AggregationConfig
from atoll.server.config.extensions import CUSTOM_RULE, CUSTOM_SAMPLER
from atoll.server.config.kinds import COHORT_SAMPLERS, RULES
from atoll.server.config.run import RunConfig, RunFile
from atoll.server.config.run_changes import changed
from tests.plugins.packages import RULE, SAMPLER, install

RUN = "task = 'm:t'\naggregation.rule = 'loudest'\ncohort.sampler = 'last'\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"atoll.rules": {"loudest": "acme_rules:loudest"}, "atoll.samplers": {"last": "acme_rules:last"}}
    install(tmp_path, "acme-rules", modules={"acme_rules": RULE + SAMPLER}, points=points)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_a_run_is_built_with_the_rule_and_the_sampler_of_a_package() -> None:
    run = load_text(RunFile, RUN, name="run.toml").run
    rule = run.aggregation.build()
    assert rule is not None
    assert rule.reduce(np.array([[2.0], [1.0]], np.float32)) == 2.0
    assert not run.cohort.is_ours, "it runs on a thread, as a user's own"
    assert run.cohort.build().__name__ == "last"
    assert load_text(RunFile, effective(run), name="").run == run


def test_settings_of_a_package_that_is_gone_are_read_from_the_journal_alone() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(RunFile, RUN, name="run.toml")
    assert [fault.partition(": allowed")[0] for fault in refusal.value.faults] == [
        "run.toml: cohort.sampler: got 'last'",
        "run.toml: aggregation.rule: got 'loudest'",
    ]
    recorded = load_text(RunConfig, RUN, name="", context=AS_RECORDED)
    assert RunConfig.model_validate_json(recorded.model_dump_json(), context=AS_RECORDED) == recorded
    for build in (recorded.aggregation.build, recorded.cohort.build):
        with pytest.raises(ConfigError, match="has its name once the package is installed on this machine"):
            build()


def test_a_run_goes_on_with_another_sampler_where_its_package_is_gone() -> None:
    recorded = load_text(RunConfig, "task = 'm:t'\ncohort.sampler = 'last'\n", name="", context=AS_RECORDED)
    with pytest.raises(ConfigError, match="got 'last': allowed"):
        changed(recorded, ["rounds=20"], version=3)
    assert changed(recorded, ["cohort.sampler=uniform"], version=3).cohort.sampler == "uniform"


@pytest.mark.usefixtures("package")
def test_an_option_of_a_built_in_rule_is_none_of_a_package_s() -> None:
    with pytest.raises(ValueError, match=r"malicious is not an option of loudest .allowed: none"):
        AggregationConfig(rule="loudest", malicious=1)


def test_the_built_in_names_are_those_of_the_tables() -> None:
    assert set(CUSTOM_RULE.built_in) == set(RULES.variants)
    assert set(CUSTOM_SAMPLER.built_in) == set(COHORT_SAMPLERS.variants)
