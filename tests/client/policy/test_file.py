"""The policy file: one that is not valid allows nothing, and no default replaces it."""

from pathlib import Path

import pytest

from atoll.client.policy.config import default_policy
from atoll.client.policy.file import BYTES_MAX, PolicyFile
from atoll.protocol.settings import ConfigError

VALID = 'tasks = ["*"]\nruns = ["*"]\n'

BAD = {
    "": "tasks: missing",
    'tasks = ["*"]\n': "runs: missing",
    VALID + "max_bytes = 3\n": "max_bytes: unknown key (did you mean upload_max_bytes?",
    VALID + "upload_max_bytes = -1\n": "upload_max_bytes: got -1; allowed: integer >= 0",
    VALID + 'metrics_only = "yes"\n': "metrics_only: got 'yes'; allowed: true | false",
    VALID + 'approval = "never"\n': 'approval: got \'never\'; allowed: "none" | "each_run"',
    VALID + 'time_zone = "Mars/Olympus"\n': "time_zone: got 'Mars/Olympus': allowed: UTC, or an IANA name",
    VALID + 'time_zone = "../../etc/passwd"\n': "time_zone: got",
    VALID + '[hours]\ndays = ["monday"]\n': "hours.days",
    VALID + '[hours]\nbegin = "8:00"\n': "hours.begin: got '8:00': allowed: HH:MM",
    VALID + '[hours]\nend = "00:00"\n': "hours: begin 00:00 and end 00:00 leave no hours",
    VALID + "[hours]\nfrom = 3\n": "hours.from: unknown key",
    "tasks = [": "not TOML",
    "\udcff": "line 1 is not UTF-8; save the file as UTF-8",
    VALID + "#" * BYTES_MAX: "has more than",
}


def written(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8", "surrogateescape")
    return path


@pytest.mark.parametrize("text", BAD)
def test_what_is_not_valid_is_refused_with_its_fault(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PolicyFile(written(tmp_path / "policy.toml", text))
    assert BAD[text] in str(caught.value)
    assert str(tmp_path / "policy.toml") in str(caught.value)


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no "):
        PolicyFile(tmp_path / "policy.toml")
    with pytest.raises(ConfigError, match="is a directory: name a file"):
        PolicyFile(tmp_path)


def test_without_a_file_the_default_holds_for_ever() -> None:
    file = PolicyFile(None)
    assert file.policy == default_policy()
    assert not file.poll()
    assert not file.poll()


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_longer_valid_allows_nothing_until_it_is_again(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "policy.toml", VALID)
    file = PolicyFile(path)
    written(path, text)
    assert [file.poll(), file.poll(), file.policy] == [False, True, None]
    written(path, VALID + "rounds_per_day = 2\n")
    assert [file.poll(), file.policy] == [False, None]
    assert file.poll()
    assert file.policy is not None
    assert file.policy.rounds_per_day == 2
    path.unlink()
    assert [file.poll(), file.poll(), file.policy] == [False, True, None]


def test_a_file_that_is_being_written_is_not_taken_for_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "policy.toml", VALID + "metrics_only = true\n")
    file = PolicyFile(path)
    written(path, VALID)  # cut in the middle of being saved: valid, and it would allow more
    assert not file.poll()
    written(path, VALID + "metrics_only = true\n")
    assert [file.poll(), file.poll()] == [False, False]
    assert file.policy is not None
    assert file.policy.metrics_only
