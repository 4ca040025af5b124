"""The logs of a federation as programs read them: each line that is about a run, a round or a site names it."""

import json
import re

import pytest

from tests.federation.processes import federation

WORDS = {"run": r"\b(trouble-1)\b", "round": r"\bround (\d+)\b", "site": r"^(?:client )?([ab]) |: ([ab]) reported"}


@pytest.mark.real
def test_every_line_names_what_it_is_about(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_LOG", "json")
    with federation(tmp_path) as it:
        it.coordinator(rounds=2, round__cohort_size=2, round__quorum=2)
        for site in "ab":
            it.agent(site)
        assert it.wait_for_end() == 0
        logs = {name: it.log(name) for name in ("coordinator", "a", "b")}
    found = {
        name: [json.loads(line) for line in text.splitlines() if line.startswith("{")] for name, text in logs.items()
    }
    assert all(line["site"] == name for name in "ab" for line in found[name])
    for name, lines in found.items():
        assert sum("round" in line for line in lines) >= 6, name
        for line in lines:
            for field, pattern in WORDS.items():
                if (named := re.search(pattern, line["message"])) is not None:
                    value = next(group for group in named.groups() if group)
                    assert str(line.get(field)) == value, (name, line)
