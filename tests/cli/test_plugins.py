"""`atoll plugins`, and the names of packages in the settings of a run for a coordinator on another machine."""

from pathlib import Path

import pytest

from atoll.operations.load import load_run
from atoll.protocol.settings import ConfigError
from tests.cli.invoking import TINY, invoke, refused, said, shown
from tests.plugins.packages import RULE, install

NAMED = ("aggregation.rule=loudest",)


def test_the_list_names_each_extension_and_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown("plugins") == []
    assert "no installed package declares an extension" in invoke("plugins").stderr
    points = {"atoll.rules": {"loudest": "acme_rules_of_the_list:loudest", "quiet": "acme_rules_of_the_list:quiet"}}
    install(tmp_path, "acme-rules", modules={"acme_rules_of_the_list": RULE}, points=points)
    monkeypatch.syspath_prepend(tmp_path)
    assert shown("plugins")[0] == {
        "kind": "rule",
        "name": "loudest",
        "package": "acme-rules",
        "version": "1.2",
        "object": "acme_rules_of_the_list:loudest",
        "fault": "",
    }
    wrong = "acme_rules_of_the_list:quiet of the package acme-rules 1.2 is of the type int; allowed: an object with a"
    assert shown("plugins")[1]["fault"].startswith(wrong)
    assert f"cannot be used: rule quiet of acme-rules 1.2: {wrong}" in said("plugins")
    given = ("--set", "aggregation.rule=quiet", "--set", "round.cohort_size=2", "--out", tmp_path / "out")
    (fault,) = refused("simulate", f"{TINY}:task", *given)
    assert fault.startswith(f"aggregation.rule: got 'quiet': {wrong}")


def test_a_name_for_a_coordinator_elsewhere_is_looked_up_there() -> None:
    assert load_run(f"{TINY}:task", NAMED, is_elsewhere=lambda file: True).aggregation.rule == "loudest"
    with pytest.raises(ConfigError, match=r"--set: aggregation\.rule: got 'loudest': allowed"):
        load_run(f"{TINY}:task", NAMED)
    with pytest.raises(ConfigError, match=r"rounds: got 0; .*\n.*got 'loudest'"):
        load_run(f"{TINY}:task", [*NAMED, "rounds=0"], is_elsewhere=lambda file: True)
