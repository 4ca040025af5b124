"""The places that a dashboard shows, and what it reads of them through the Python interface."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.dashboard.pages.audit import Proof
from atoll.dashboard.pages.runs import OfPlace
from atoll.interface.agents import Agent
from atoll.interface.audit import soundness
from atoll.interface.deployed import DeployedRun, Federation
from atoll.interface.errors import AtollError
from atoll.interface.places import Place, Simulations, label_of, place, places_here
from atoll.interface.simulated import SimulatedRun

Document = Mapping[str, Any]

KINDS: Mapping[type, str] = {Federation: "deployed", Agent: "agent", Simulations: "simulated"}
NAMES: Mapping[type, str] = {
    Federation: "a coordinator",
    Agent: "an agent's state directory",
    Simulations: "a folder of simulations",
}
"""The kinds of places."""

AGAIN_S, REST = 10.0, 10
"""Least seconds between two verifications of a log, and as a multiple of the duration of one."""

WAIT_S = 0.2
"""Seconds for which a page waits for a verification."""


@dataclass(frozen=True)
class Source:
    """A place with its number and name.

    Args:
        number: its number among the places, from 1 on.
        label: its name, as the person has given it.
        place: the coordinator, the agent of a site, or the folder of simulations.
    """

    number: int
    label: str
    place: Place
    verdicts: "Verdicts" = field(default_factory=lambda: Verdicts(), repr=False, compare=False)
    """The newest verdict on its log."""

    def runs(self) -> Sequence[Document]:
        """Return the runs, as `atoll run list --json` has them, the newest last; of an agent as `site list`.

        Raises:
            AtollError: the place cannot be read.
        """
        if isinstance(self.place, Federation):
            return list(self.place.runs)
        if isinstance(self.place, Agent):
            return list(self.place.runs)
        return [_simulated(self.place, name) for name in self.place.names]

    def names(self) -> list[str]:
        """Return the names of the simulated runs.

        Raises:
            AtollError: the place is no folder of simulations.
        """
        if isinstance(self.place, Simulations):
            return list(self.place.names)
        raise AtollError(f"{self.label} is {NAMES[type(self.place)]}: a folder of simulations alone has sweeps")

    def run(self, name: str) -> DeployedRun | SimulatedRun:
        """Return a run of the place; errors as `simulated` and `federation`."""
        return self.simulated(name) or self.deployed(name)

    def of_page(self) -> OfPlace:
        """Return the runs for the page of all runs, or why they cannot be read."""
        kind = KINDS[type(self.place)]
        try:
            return OfPlace(self.number, self.label, kind, self.runs())
        except AtollError as error:
            return OfPlace(self.number, self.label, kind, fault=" ".join(error.faults))

    def federation(self) -> Federation:
        """Return the coordinator.

        Raises:
            AtollError: the place is none.
        """
        if isinstance(self.place, Federation):
            return self.place
        raise AtollError(f"{self.label} is {NAMES[type(self.place)]}: a coordinator's runs alone have this page")

    def agent(self) -> Agent:
        """Return the agent of a site; errors as `federation`."""
        if isinstance(self.place, Agent):
            return self.place
        raise AtollError(f"{self.label} is {NAMES[type(self.place)]}: an agent's state directory alone has this page")

    @property
    def is_agent(self) -> bool:
        """Whether the place is the agent of a site."""
        return isinstance(self.place, Agent)

    @property
    def is_controlled(self) -> bool:
        """Whether `controlled` returns a coordinator."""
        return isinstance(self.place, Federation) and "://" not in self.label

    def controlled(self, user: str = "") -> Federation:
        """Return the coordinator whose runs and members can be changed.

        Args:
            user: the user of a proxy for whom they are changed; empty: the owner of this process.

        Raises:
            AtollError: the place is a database, which does not tell where its coordinator is, or none of a coordinator.
        """
        if "://" in self.label:
            raise AtollError("a database is read alone: name its coordinator's state directory, or HOST:PORT")
        return self.federation().acting_for(user)

    def deployed(self, run: str) -> DeployedRun:
        """Return a run of the coordinator; errors as `federation`."""
        return self.federation().known_run(run)

    def proof(self) -> Proof:
        """Return the newest verdict on the log of the place, verified beside; errors as `federation`."""
        agent = self.place if isinstance(self.place, Agent) else None
        return self.verdicts.newest(self.federation().audit_verdict if agent is None else agent.decisions_verdict)

    def simulated(self, run: str) -> SimulatedRun | None:
        """Return a simulated run; None: the place is a coordinator.

        Raises:
            AtollError: there is no such run.
        """
        return self.place.run(run) if isinstance(self.place, Simulations) else None


class Verdicts:
    """Verdicts on the log of one place: it is verified on a thread, as that takes long for a long log.

    At most one verification runs; the next one begins `AGAIN_S`, or `REST` times its duration, after the last one.
    """

    def __init__(self) -> None:
        self._lock, self._thread = threading.Lock(), threading.Thread()
        self._found, self._next = Proof(), 0.0

    def newest(self, verify: Callable[[], Document]) -> Proof:
        """Return the newest verdict; a verification that is due begins, and has `WAIT_S` to end.

        Args:
            verify: returns the verdict of now; raises AtollError.
        """
        with self._lock:
            if not self._thread.is_alive() and time.monotonic() >= self._next:
                self._thread = threading.Thread(target=self._verify, args=(verify,), name="verdict", daemon=True)
                self._thread.start()
            thread = self._thread
        if thread.ident is not None:
            thread.join(WAIT_S)
        return self._found

    def _verify(self, verify: Callable[[], Document]) -> None:
        begun = time.monotonic()
        try:
            verdict = verify()
            self._found = Proof(time.time(), verdict, soundness(verdict["num_faults"], verdict["first"]))
        except AtollError as error:
            self._found = Proof(sentence=" ".join(error.faults))
        took = time.monotonic() - begun
        self._next = time.monotonic() + max(AGAIN_S, REST * took)


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
            found.append(Source(len(found) + 1, label_of(text), place(text)))
        except AtollError as error:
            faults += error.faults
    if faults:
        raise AtollError(*faults)
    if not found:
        raise AtollError(
            "there is nothing to show here: no atoll-state, no joined coordinator and no simulation; name a place: "
            "the state directory of a coordinator or an agent, HOST:PORT of one that you have joined, a database, or a "
            "folder"
        )
    return found


def only_state(found: Sequence[Source]) -> str:
    """Return the state directory of the only coordinator among some places.

    Raises:
        AtollError: there is no coordinator, or another one, or it is not on this machine; or a site is shown beside it.
    """
    coordinators = [source for source in found if isinstance(source.place, Federation)]
    if len(coordinators) != 1 or not Path(coordinators[0].label).is_dir():
        listed = ", ".join(source.label for source in coordinators) or "none"
        raise AtollError(
            f"an interface other than loopback shows one coordinator, to its members: got {listed}; allowed: one state "
            "directory on this machine, which has the certificate of its coordinator"
        )
    if agents := ", ".join(source.label for source in found if isinstance(source.place, Agent)):
        raise AtollError(
            f"an interface other than loopback shows no site to the coordinator's members: got {agents}; allowed: the "
            "coordinator's state directory, and folders of simulations; show the site by a dashboard on loopback"
        )
    return coordinators[0].label
