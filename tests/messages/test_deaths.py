"""Deaths at every answer of a server program (kill -9), and of its simulated coordinator at every entry and effect."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from atoll.cli.files import load_user_task
from atoll.parallel.task.flower_app import with_app
from atoll.protocol.settings import load_text, quoted
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.messages.run import setting_of
from tests.messages.dying import Death, DyingFederation

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it")
pytestmark = pytest.mark.real

APP = with_app(str(Path(__file__).with_name("apps") / "ten_rounds"))
FILE = load_text(
    SimulationFile,
    f"name = 'ten'\ntask = {quoted(APP)}\nprogram.main = {quoted(APP)}\nround.min_available = 3\n"
    "devices.latency_s = 0.01",
    [],
    name="",
)
KINDS = {
    *("RunStarted", "ProgramStarted", "ClientJoined", "NodesAsked", "ExchangeAsked", "UploadBegun", "UpdateReceived"),
    "ProgramEnded",
}
PLACES = ("before", "after", "effect", "answer")
SAMPLE = 4
"""Deaths of each place in a short run of the suite."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return lived(tmp_path_factory.mktemp("undisturbed"), None)


def lived(folder, death):
    """Return what is left of a run with a death: its result, its digests, its course."""
    here = os.getcwd()
    with DyingFederation(setting_of(FILE, load_user_task(APP)), folder).plan(death) as federation:
        result = federation.run()
        written = json.loads((folder / "program" / "result.json").read_text())
        found = {"cause": (result["state"], result["cause"]), "written": written, "digests": federation.digests()}
    assert os.getcwd() == here
    return found, federation.course


def same(folder, death, undisturbed):
    """Return what a death has changed; nothing, as it must be."""
    found, course = lived(folder, death)
    shutil.rmtree(folder)
    assert course.num_deaths == 1, f"{death} was not reached"
    return [f"{death}: {key}" for key, before in undisturbed[0].items() if found[key] != before]


def test_the_course_has_every_kind_of_entry(undisturbed):
    found, course = undisturbed
    assert found["cause"] == ("finished", "main() returned after 20 exchanges")
    assert set(course.kinds) == KINDS
    assert max(found["written"]["calls"].values()) > 4, "the state of a client grows"
    assert len({tuple(one.client_id for _, one, _, _ in sent) for sent in found["digests"]}) > 3, "nodes are drawn"


@pytest.mark.parametrize("where", ["after", "answer"])  # the others behind `long`, which has every place
def test_a_death_changes_no_digest(where, tmp_path, undisturbed):
    count = undisturbed[1].counts[where]
    for number in sorted(random.Random(where).sample(range(1, count + 1), SAMPLE)):
        assert not same(tmp_path / str(number), Death(where, number), undisturbed)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("where", PLACES)
def test_no_death_at_any_place_changes_a_digest(where, tmp_path, undisturbed):
    """Every entry before and after it is on disk, every effect, every answer to the program."""
    count = undisturbed[1].counts[where]
    assert count > 40
    wrong = [
        fault
        for number in range(1, count + 1)
        for fault in same(tmp_path / str(number), Death(where, number), undisturbed)
    ]
    assert not wrong
