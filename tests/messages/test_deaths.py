"""Deaths at every answer of a server program (kill -9), and of its simulated coordinator at every entry and effect."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from atoll.operations.load import load_user_task
from atoll.protocol.settings import load_text, quoted
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.messages.run import setting_of
from atoll.task.apps import with_app
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
STARTS_S = 60.0
IMPATIENT = load_text(
    SimulationFile,
    f"name = 'ten'\ntask = {quoted(APP)}\nprogram.main = {quoted(APP)}\nround.min_available = 3\n"
    f"devices.latency_s = 0.01\nround.deadline = {STARTS_S / 2}",
    [],
    name="",
)
"""A run whose messages have half the time that an agent takes to start."""

SAMPLE = 4
"""Deaths of each place in a short run of the suite."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return lived(tmp_path_factory.mktemp("undisturbed"), None)


def lived(folder, death, file=FILE, starts_s=0.0):
    """Return what is left of a run with a death: its result, its digests, its course."""
    here = os.getcwd()
    with DyingFederation(setting_of(file, load_user_task(APP)), folder).plan(death, starts_s) as federation:
        result = federation.run()
        written = json.loads((folder / "program" / "result.json").read_text())
        found = {"cause": (result["state"], result["cause"]), "written": written, "digests": federation.digests()}
    assert os.getcwd() == here
    return found, federation.course


def same(folder, death, undisturbed, **given):
    """Return what a death has changed; nothing, as it must be."""
    found, course = lived(folder, death, **given)
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


def deaths_in_exchanges(course):
    """Return a death after the entry that opens each exchange, and one after each first reply."""
    kinds = [kind for _, kind, _ in course.entries]
    asked = [place for place, kind in enumerate(kinds, start=1) if kind == "ExchangeAsked"]
    replied = [kinds.index("UpdateReceived", place) + 1 for place in asked]
    return [Death("after", number) for number in sorted({*asked, *replied})]


def test_a_death_changes_no_digest_where_agents_take_longer_to_start_than_a_message_may(tmp_path, undisturbed):
    """As where the agents died, too: their imports take longer than a lease and a timeout."""
    deaths = deaths_in_exchanges(undisturbed[1])
    assert len(deaths) == 40
    for death in random.Random(1).sample(deaths, SAMPLE):
        given = {"file": IMPATIENT, "starts_s": STARTS_S}
        assert not same(tmp_path / str(death.number), death, undisturbed, **given)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_death_in_any_exchange_changes_a_digest_where_agents_start_slowly(tmp_path, undisturbed):
    deaths, given = deaths_in_exchanges(undisturbed[1]), {"file": IMPATIENT, "starts_s": STARTS_S}
    assert not [fault for one in deaths for fault in same(tmp_path / str(one.number), one, undisturbed, **given)]


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
