"""The terms of a private centralized training: the noise for its budget, or the budget of its noise."""

from dataclasses import asdict
from typing import Any

from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.parallel.private.terms import Terms
from atoll.parallel.trainer.config import TrainConfig
from atoll.protocol.privacy import subsampled
from atoll.protocol.privacy.guarantee import Guarantee
from atoll.protocol.privacy.poisson_account import PoissonAccount, most
from atoll.task.local import Local, epoch_steps
from atoll.training.private.config import PrivacyConfig

OTHERS = (
    " This training alone: others on the same examples, also in another folder, add to it. Test data and the duration "
    "of steps are not protected."
)


def terms_of(privacy: PrivacyConfig, config: TrainConfig, local: Local) -> Terms | None:
    """Return the terms of a training; None: it is not private.

    Raises:
        CommandError: no noise keeps the budget, or the given noise spends it before the last step.
    """
    if not privacy.is_on:
        return None
    q, clip_norm, delta = privacy.sample_rate, privacy.clip_norm, privacy.delta
    assert q is not None
    assert clip_norm is not None
    assert delta is not None
    steps, budget = _steps(q, config, local), privacy.epsilon
    account = PoissonAccount(q, delta)
    z = privacy.noise_multiplier
    if z is None:
        assert budget is not None
        try:
            z = account.least_noise(budget, steps)
        except ValueError as error:
            raise CommandError(f"privacy.epsilon: {error}") from error
    elif budget is not None and account.epsilon_of(z, steps) > budget:
        fits = most(lambda number: subsampled.epsilon_bound(q, z, number, delta) <= budget, steps)
        raise CommandError(
            f"privacy.epsilon: {budget:g} at delta {delta:g} is spent after {fits} of {count_of(steps, 'step')} with "
            f"privacy.noise_multiplier {z:g}; allowed: more noise (leave it out, and the least is found), at most "
            f"{count_of(fits, 'step')} (--steps), or a smaller privacy.sample_rate"
        )

    def allowed(number: int) -> int:
        if budget is None or number <= steps or account.epsilon_of(z, number) <= budget:
            return number
        return most(lambda number: number <= steps or account.epsilon_of(z, number) <= budget, number)

    def guarantee(number: int) -> dict[str, Any]:
        epsilon, accountant = account.account_of(z, number or 1)
        found = Guarantee(
            epsilon=epsilon if number else 0.0,
            delta=delta,
            unit="example",
            mechanism="gaussian",
            noise_multiplier=z,
            clip_norm=clip_norm,
            uses=number,
            accountant=accountant,
            noise_by="site",
            sampling_rate=q,
        )
        left_out = ("uses", "mechanism", "separation", "noise_by", "quantile")
        plain = {name: value for name, value in asdict(found).items() if name not in left_out}
        return {**plain, "epsilon_max": budget, "steps": number, "sentence": found.sentence + OTHERS}

    return Terms(
        sample_rate=q,
        noise_multiplier=z,
        clip_norm=clip_norm,
        delta=delta,
        steps=steps,
        allowed=allowed,
        guarantee=guarantee,
    )


def _steps(rate: float, config: TrainConfig, local: Local) -> int:
    """Return the steps of the training; an epoch has 1 / sample rate."""
    if config.steps is not None:
        return config.steps
    if config.epochs is not None:
        return config.epochs * epoch_steps(rate)
    every = local.epochs * epoch_steps(rate)
    return min(every, local.max_steps or every)
