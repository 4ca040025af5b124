"""What an operator reads when a task's data cannot be read: what is missing, and where to correct it."""

import pytest

from atoll.client.work.data_away import said_of_data
from examples.datasets import folder

TASK = "/etc/atoll/task.py:task"


@pytest.mark.parametrize(
    "error",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: '{}/mnt/data/a.csv'",
        "examples.datasets.folder.NoData: {}/mnt/data/a.csv: there is no such file",
        "NotADirectoryError: [Errno 20] Not a directory: '{}/mnt/data/a.csv'",
    ],
)
def test_a_missing_path_is_named_with_the_nearest_folder_and_the_way_out(error, tmp_path):
    said = said_of_data(error.format(tmp_path), TASK)
    if "NotADirectory" in error:
        assert said is None  # a part of the path is a file: no mount puts that right
        return
    assert said.startswith(f"{tmp_path}/mnt/data/a.csv does not exist (the nearest folder that does: {tmp_path}). ")
    assert "If it is on a mount, a service manager starts the agent again by itself (exit code 75)" in said
    assert "if it is mistyped, correct it in /etc/atoll/task.py or in the setting or variable that it reads" in said


@pytest.mark.parametrize(
    "error",
    [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "socket.gaierror: [Errno -2] Name or service not known",
        "urllib.error.URLError: <urlopen error timed out>",
        "requests.exceptions.ConnectionError: no route",
        "OSError: [Errno 116] Stale file handle",
        "TimeoutError: timed out",
    ],
)
def test_a_server_that_is_away_is_waited_for(error):
    said = said_of_data(error, TASK)
    assert "exit code 75" in said
    assert "correct it in /etc/atoll/task.py" in said


def test_a_path_that_exists_is_not_called_missing(tmp_path):
    error = f"OSError: [Errno 5] Input/output error: '{tmp_path}'"
    assert said_of_data(error, TASK).startswith(f"{tmp_path} cannot be read now")


def test_a_relative_path_is_named_as_the_agent_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = said_of_data("FileNotFoundError: [Errno 2] No such file or directory: 'data/a.csv'", TASK)
    assert said.startswith(f"{tmp_path}/data/a.csv does not exist (the nearest folder that does: {tmp_path})")


def test_a_full_disk_takes_free_space_and_no_correction():
    assert said_of_data("OSError: [Errno 28] No space left on device: '/c'", TASK).startswith(
        "free some space; a service"
    )


@pytest.mark.parametrize("error", ["ValueError: x", "KeyError: 'OSError: '", "PermissionError: [Errno 13] no: '/x'"])
def test_a_mistake_does_not_pass_by_itself(error):
    assert said_of_data(error, TASK) is None


def test_a_variable_that_is_not_set_does_not_pass_by_itself(monkeypatch):
    monkeypatch.delenv(folder.VARIABLE, raising=False)
    with pytest.raises(folder.NoData) as raised:
        folder.data_folder("mnist")
    assert (
        said_of_data(f"{type(raised.value).__module__}.{type(raised.value).__qualname__}: {raised.value}", TASK) is None
    )
