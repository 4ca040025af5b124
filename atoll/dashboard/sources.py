"""The places that a dashboard shows, and what it reads of them through the Python interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.dashboard.pages.runs import OfPlace
from atoll.interface.deployed import DeployedRun, Federation
from atoll.interface.errors import AtollError
from atoll.interface.places import Simulations, place, places_here
from atoll.interface.simulated import SimulatedRun

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """A place with its number and name.

    Args:
        number: its number among the places, from 1 on.
        label: its name, as the person has given it.
        place: the coordinator, or the folder of simulations.
    """

    number: int
    label: str
    place: Federation | Simulations

    def runs(self) -> Sequence[Document]:
        """Return the runs, as `atoll run list --json` has them, the newest last.

        Raises:
            AtollError: the place cannot be read.
        """
        if isinstance(self.place, Federation):
            return list(self.place.runs)
        return [_simulated(self.place, name) for name in self.place.names]

    def of_page(self) -> OfPlace:
        """Return the runs for the page of all runs, or why they cannot be read."""
        kind = "deployed" if isinstance(self.place, Federation) else "simulated"
        try:
            return OfPlace(self.number, self.label, kind, self.runs())
        except AtollError as error:
            return OfPlace(self.number, self.label, kind, fault=" ".join(error.faults))

    def federation(self) -> Federation:
        """Return the coordinator.

        Raises:
            AtollError: the place is a folder of simulations.
        """
        if isinstance(self.place, Federation):
            return self.place
        raise AtollError(f"{self.label} is a folder of simulations: a coordinator's runs alone have this page")

    def deployed(self, run: str) -> DeployedRun:
        """Return a run of the coordinator; errors as `federation`."""
        return self.federation().known_run(run)

    def simulated(self, run: str) -> SimulatedRun | None:
        """Return a simulated run; None: the place is a coordinator.

        Raises:
            AtollError: there is no such run.
        """
        return self.place.run(run) if isinstance(self.place, Simulations) else None


def _simulated(folder: Simulations, name: str) -> Document:
    try:
        found = {**folder.run(name).document, "run": name, "exchanges": None}
    except AtollError as error:
        found = dict.fromkeys(("task", "version", "rounds", "created_at", "ended_at", "exchanges"))
        found |= {"run": name, "name": name, "state": "unreadable", "cause": " ".join(error.faults)}
    found.pop("metrics", None)
    return found


def sources(named: Sequence[str]) -> list[Source]:
    """Return the named places, or without any those of the current folder.

    Raises:
        AtollError: a place is none; the message has all that are none, or how to name one.
    """
    found, faults = list[Source](), list[str]()
    for text in dict.fromkeys(named or places_here()):
        try:
            found.append(Source(len(found) + 1, text, place(text)))
        except AtollError as error:
            faults += error.faults
    if faults:
        raise AtollError(*faults)
    if not found:
        raise AtollError(
            "there is nothing to show here: no atoll-state, no joined coordinator and no simulation; name a place: "
            "a coordinator's state directory, HOST:PORT of one that you have joined, a database, or a folder"
        )
    return found
