"""The places of a folder, and a coordinator that stays the one it was."""

import shutil
from pathlib import Path

import pytest

from atoll.interface.deployed import connect
from atoll.interface.errors import AtollError
from atoll.interface.places import places_here
from atoll.operations.place import HERE, asking, is_elsewhere, named_here
from atoll.protocol.identity.enrolling import Place

JOINED = "hub.example.org:7443"


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this person joined a coordinator elsewhere, in an empty folder."""
    identity = tmp_path / "identity"
    identity.mkdir()
    Place("hub.example.org:7070", JOINED, "00").store(identity)
    monkeypatch.setenv("ATOLL_IDENTITY", str(identity))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("joined")
def test_a_joined_coordinator_is_a_place_by_its_address(tmp_path: Path) -> None:
    assert places_here() == [JOINED]
    (tmp_path / "identity" / "place.json").write_text("{")
    with pytest.raises(AtollError, match="damaged"):
        places_here()
    (tmp_path / "atoll-state").mkdir()
    assert places_here() == ["atoll-state"]


@pytest.mark.usefixtures("joined")
def test_a_state_directory_that_goes_does_not_become_the_joined_coordinator(tmp_path: Path) -> None:
    """Another one would be paused, stopped, or lose a member."""
    state = tmp_path / "state"
    state.mkdir()
    federation = connect(state)
    shutil.rmtree(state)
    assert is_elsewhere(state), "a command asks the joined coordinator, and says so"
    with asking(HERE):
        assert (is_elsewhere(state), named_here()) == (False, None)
    for call in (
        lambda: federation.known_run("a-1").pause(),
        lambda: federation.revoke("north"),
        lambda: federation.runs,
    ):
        with pytest.raises(AtollError, match=str(state)):
            call()
