"""A client that a sampler may draw. Pure."""

from typing import NamedTuple

from atoll.protocol.vocabulary import ClientId, RoundId


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
