"""One client that has joined a run. Pure."""

from dataclasses import dataclass

from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.rounds.events import Candidate, Profile


@dataclass(slots=True)
class Member:
    """One client that has ever joined this run."""

    profile: Profile
    session: str | None = None  # of the standing control stream, if its `start` is the newest
    lost_because: str = ""  # while nothing is expected of it any more
    download_seconds: float | None = None  # moving averages of what was measured
    train_seconds: float | None = None
    upload_seconds: float | None = None
    counted_round: RoundId = RoundId(0)  # noqa: RUF009 - the newest of its rounds whose update is in a model; 0: none
    loss: float | None = None  # of its newest accepted update, see `utility`
    utility: float = 0.0
    last_round: RoundId = RoundId(0)  # noqa: RUF009 - of that update; 0: none
    times_chosen: int = 0
    start: int = 0  # how often everyone had been disconnected at once when `session` began
    has_declined: bool = False  # its site's policy does not let it train for this run; until it says otherwise

    @property
    def expected_seconds(self) -> float | None:
        """How long it is expected to take for a round [s]; None when nothing was measured."""
        if self.train_seconds is None:
            return None
        return (self.download_seconds or 0.0) + self.train_seconds + (self.upload_seconds or 0.0)

    def as_candidate(self, client_id: ClientId) -> Candidate:
        """What a sampler may look at."""
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
