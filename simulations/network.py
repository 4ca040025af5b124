"""The simulated network: ordered control streams that may break at any instant, uploads that may need many tries."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.client import events as client
from atoll.protocol.vocabulary import RejectReason
from atoll.server.events import Accept, Effect, Reject, Update

if TYPE_CHECKING:
    from atoll.simulations.agent import SimulatedAgent
    from atoll.simulations.coordinator import SimulatedCoordinator
    from atoll.simulations.world import World

BAD_BYTES = (RejectReason.BAD_MANIFEST, RejectReason.WRONG_LAYOUT, RejectReason.NOT_FINITE)


class Connection:
    """One control stream. Messages arrive in order, late, or (once it is cut) not at all."""

    def __init__(
        self, world: "World", agent: "SimulatedAgent", coordinator: "SimulatedCoordinator", session: str
    ) -> None:
        self.world, self.agent, self.coordinator, self.session = world, agent, coordinator, session
        self.is_open = True
        self.is_stalled = False  # half open: nothing gets through, and nobody was told
        self._lives = (agent.life, coordinator.life)
        self._arrival_at_agent = self._arrival_at_coordinator = 0.0

    def to_agent(self, event: client.Event) -> None:
        """Send to the client."""
        self._arrival_at_agent = max(self._arrival_at_agent, self.world.now + self.world.latency())
        self._deliver(self._arrival_at_agent, lambda: self.agent.heard(self, event))

    def to_coordinator(self, message: client.Effect | None) -> None:
        """Send to the server; None says goodbye."""
        self._arrival_at_coordinator = max(self._arrival_at_coordinator, self.world.now + self.world.latency())
        self._deliver(self._arrival_at_coordinator, lambda: self.coordinator.lines.heard(self, message))

    def _deliver(self, when: float, action: Callable[[], None]) -> None:
        self.world.at(when, lambda: action() if self.carries else None)

    @property
    def carries(self) -> bool:
        """Whether a message that is under way still arrives."""
        return self.is_open and not self.is_stalled and self._lives == (self.agent.life, self.coordinator.life)

    def cut(self, *, half_open: bool = False) -> None:
        """The stream breaks; both sides find out in their own time, or the server only by its leases."""
        if not self.is_open:
            return
        rng = self.world.rng
        if half_open:
            self.is_stalled = True
            self.world.after(rng.uniform(0.5, self.world.scenario.server_lease), self.close, self.agent)
            return
        self.close()
        self.world.after(rng.uniform(0, 2), lambda: self.coordinator.lines.ended(self), self.coordinator)

    def close(self) -> None:
        """The agent finds that its stream has ended."""
        self.is_open = False
        self.world.after(self.world.rng.uniform(0, 0.5), lambda: self.agent.disconnected(self), self.agent)


class Upload:
    """One try at uploading one update: begun, transferred, judged, answered; any of it may fail."""

    def __init__(
        self,
        world: "World",
        agent: "SimulatedAgent",
        coordinator: "SimulatedCoordinator",
        key: client.Key,
        update: Update,
        fault: RejectReason | None,
    ) -> None:
        self.world, self.agent, self.coordinator = world, agent, coordinator
        self.key, self.update, self.fault = key, update, fault
        self.is_over = False
        self._server_life = coordinator.life
        world.after(world.latency(), self._begin)

    def cancel(self) -> None:
        """The agent no longer wants an answer."""
        self.is_over = True

    def cut(self) -> None:
        """The stream of bytes broke."""
        if not self.is_over:
            self.is_over = True
            self.world.after(
                self.world.rng.uniform(0, 1),
                lambda: self.agent.upload_ended(self, client.UploadCut(self.key)),
                self.agent,
            )

    def _reaches_server(self) -> bool:
        if self.is_over:
            return False
        server, chance = self.coordinator, self.world.scenario.faults.upload_cut / 2
        stands = server.is_up and server.life == self._server_life and self.agent.is_online
        if not stands or self._happens(chance):
            self.cut()
            return False
        return True

    def _happens(self, chance: float) -> bool:
        return self.world.happens(chance)

    def _begin(self) -> None:
        self._server_life = self.coordinator.life
        if not self._reaches_server():
            return
        if self.fault in (RejectReason.BAD_MANIFEST, RejectReason.WRONG_LAYOUT):
            self._refuse(self.fault)
            return
        if self.world.rng.random() < 0.5:  # the service looks before it takes the bytes
            machine = self.coordinator.running
            if (refusal := machine.refusal(self.update)) is not None:
                self._answer(client.Answered(self.key, False, *refusal))
                return
            if machine.is_accepted(self.update) or machine.is_hopeless(self.update):
                self.coordinator.update_arrived(self.update, self._judged)
                return
        self.coordinator.upload_begun(self.update)
        self.world.after(self.world.rng.uniform(0.5, 1.5) * self.world.scenario.upload, self._transferred)

    def _transferred(self) -> None:
        if not self._reaches_server():
            return
        if self._happens(self.world.scenario.faults.upload_damaged):
            reason = RejectReason.DIGEST_MISMATCH
            self._answer(client.Answered(self.key, False, reason, resend=True))
        elif self.fault is not None:
            self._refuse(self.fault)
        else:
            self.coordinator.update_arrived(self.update, self._judged)
            if self._happens(self.world.scenario.faults.upload_repeated):
                self.world.after(self.world.rng.expovariate(1 / 20), self._repeat)

    def _repeat(self) -> None:
        """A copy of the update that had been under way on another path."""
        if self.coordinator.is_up:
            self.coordinator.update_arrived(self.update, None)

    def _refuse(self, reason: RejectReason) -> None:
        self.coordinator.update_refused(
            self.update, reason, lambda _: self._answer(client.Answered(self.key, False, reason))
        )

    def _judged(self, effects: tuple[Effect, ...]) -> None:
        """The verdict is on disk and leaves the coordinator."""
        for effect in effects:
            if isinstance(effect, Accept) and effect.digest == self.update.digest:
                self.coordinator.acknowledged(effect)
                self._answer(client.Answered(self.key, True))
                return
            if isinstance(effect, Reject) and effect.digest == self.update.digest:
                self._answer(client.Answered(self.key, False, effect.reason, effect.detail))
                return
        raise AssertionError("the machine did not answer an update")

    def _answer(self, event: client.Answered) -> None:
        if self.is_over:
            return
        if self._happens(self.world.scenario.faults.verdict_lost):
            self.cut()
            return
        self.world.after(self.world.latency(), lambda: self.agent.upload_ended(self, event), self.agent)
