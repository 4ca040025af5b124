"""A member of a run: one client with its session, measurements and history. Pure."""

from dataclasses import dataclass

from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.rounds.events import Candidate, Profile


@dataclass(slots=True)
class Member:
    """A client that has joined this run at least once."""

    profile: Profile
    session: str | None = None  # of the open control stream, if `start` is the membership's
    lost_because: str = ""  # reason of its loss; empty while it is not lost
    download_seconds: float | None = None  # moving averages of the measured times
    train_seconds: float | None = None
    upload_seconds: float | None = None
    counted_round: RoundId = RoundId(0)  # noqa: RUF009 - the newest of its rounds whose update is in a model; 0: none
    loss: float | None = None  # of its newest accepted update that reported one, see `oort_utility`
    utility: float = 0.0
    last_round: RoundId = RoundId(0)  # noqa: RUF009 - the newest round with an accepted update of it; 0: none
    times_chosen: int = 0
    start: int = 0  # `Membership.start` when `session` began
    has_declined: bool = False  # its site's policy does not let it train for this run; until it joins again

    @property
    def expected_seconds(self) -> float | None:
        """The expected duration of a round at this client [s]; None: nothing was measured."""
        if self.train_seconds is None:
            return None
        return (self.download_seconds or 0.0) + self.train_seconds + (self.upload_seconds or 0.0)

    def as_candidate(self, client_id: ClientId) -> Candidate:
        """Return the facts that a sampler may use."""
        profile = self.profile
        return Candidate(
            client_id,
            profile.num_examples,
            profile.label,
            self.loss,
            self.utility,
            self.expected_seconds,
            self.last_round,
            self.times_chosen,
        )
