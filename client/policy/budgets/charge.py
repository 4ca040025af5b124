"""What one training spends of the budget of the data that it reads. Pure values."""

from atoll.protocol.privacy.composition import Steps
from atoll.protocol.privacy.guarantee import NoiseBy, Unit
from atoll.protocol.value_type import value


@value
class Charge:
    """What a training spends, by the terms on which its run asks.

    Attributes:
        unit: what the run's guarantee protects: one client's contributions, or one example.
        steps: the Gaussian steps on the data, at most; the noise multiplier is relative to the sensitivity of the unit.
        noise_by: the party that adds the noise. The coordinator is trusted to; a site cannot check that it did.
        content: SHA-256 of the work with the secret of its noise: equal contents have equal bits.
    """

    unit: Unit
    steps: tuple[Steps, ...]
    noise_by: NoiseBy
    content: str


@value
class Work:
    """The work that is charged.

    Attributes:
        agent: id of the state directory of the agent that trains.
        coordinator: address of the place that receives the update, for the record.
        run, round, task: of the invitation.
    """

    agent: str
    coordinator: str
    run: str
    round: int
    task: str


def spent_by(charge: Charge, unit: Unit) -> tuple[Steps, ...]:
    r"""Return what a charge spends of a budget in the given unit.

    A guarantee for clients bounds the effect of all that a client contributes: with u the update, clipped to C, and 0
    in its place, ||u - 0|| <= C. One example more or less gives another update u' of norm <= C: ||u - u'|| <= 2 C. So
    for an example the same noise z C has the multiplier z / 2.

    Raises:
        ValueError: a guarantee for examples says nothing about all examples of a client together.
    """
    if charge.unit == unit:
        return charge.steps
    if unit == "client":
        raise ValueError("a guarantee for examples bounds nothing for all of a site's data")
    return tuple(Steps(part.noise_multiplier / 2.0, part.sample_rate, part.steps) for part in charge.steps)
