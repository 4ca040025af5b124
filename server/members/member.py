"""A member of a run, one client with its session, measurements and history, and what a sampler may know of it. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import ClientId, RoundId


@value
class Profile:
    """Client's description of its data, for samplers."""

    num_examples: int = 0
    label: str = ""


class Candidate(NamedTuple):
    """Available client, with the facts that a sampler may use."""

    client_id: ClientId
    num_examples: int
    label: str
    loss: float | None = None  # mean training loss of its newest accepted update with one; None: there is none
    utility: float = 0.0  # statistical utility of that update (`oort_utility.utility_of`)
    seconds: float | None = None  # expected duration of a round at this client; None: nothing was measured
    last_round: RoundId = RoundId(0)  # the newest round with an accepted update of the client; 0: there is none
    times_chosen: int = 0  # number of invitations to rounds

    @property
    def without_values(self) -> "Candidate":
        """The candidate without values of its data, work and speed, which a cohort of a private run would release."""
        return self._replace(num_examples=0, loss=None, utility=0.0, seconds=None)


@dataclass(slots=True)
class Trouble:
    """Failures of a client: the newest one, which may be a decline, and their consequences."""

    reason: str
    detail: str
    at: float
    failures: int = 0  # consecutive failures since the client's last accepted update
    rest_until: float = 0.0  # time before which the client is not invited; 0: it does not rest
    waits: bool = False  # it has declined, but its site's policy will allow the work later; until it joins again
    declines_evaluation: bool = False  # whether its site's policy forbids it to evaluate; until it joins again


@dataclass(slots=True)
class Member:
    """Client that has joined this run at least once."""

    profile: Profile
    session: str | None = None  # name of the open control stream, if `start` is the membership's
    lost_because: str = ""  # reason of its loss; empty while it is not lost
    download_seconds: float | None = None  # moving averages of the measured times
    train_seconds: float | None = None
    upload_seconds: float | None = None
    counted_round: RoundId = RoundId(0)  # noqa: RUF009 - the newest of its rounds whose update is in a model; 0: none
    loss: float | None = None  # utility of its newest accepted update that reported one, see `oort_utility`
    utility: float = 0.0
    last_round: RoundId = RoundId(0)  # noqa: RUF009 - the newest round with an accepted update of it; 0: none
    times_chosen: int = 0
    start: int = 0  # `Membership.start` when `session` began
    has_declined: bool = False  # whether its site's policy forbids it to train for this run; until it joins again
    seen_at: float = 0.0  # time of the newest event of its connection
    software: str = ""  # software of its agent
    dropped_sums: int = 0  # rounds in a row in which the secure sum with its update was dropped for what was added
    trouble: Trouble | None = None  # None: it has neither failed nor declined
    uses: int = 0  # private sums that its updates are in, whether or not a version came of them
    spent: float = 0.0  # the sum over these of 1 / z^2
    is_spent: bool = False  # whether it may be in no further one
    apart_until: int = 0  # of correlated noise: the version that the next round with it begins from, at least; 0: any

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
