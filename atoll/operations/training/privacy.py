"""The terms of a private centralized training: the noise for its budget, or the budget of its noise."""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.parallel.private.terms import Terms, epoch_steps
from atoll.parallel.trainer.config import TrainConfig
from atoll.protocol.privacy import gaussian, loss_distribution, subsampled
from atoll.protocol.privacy.guarantee import EXACT, PLD, RDP, Guarantee
from atoll.task.local import Local
from atoll.training.private.config import PrivacyConfig

OTHERS = (
    " This training alone: others on the same examples, also in another folder, add to it. Test data and the duration "
    "of steps are not protected."
)
PRECISION = 1e-3
"""Share of the budget that the found noise may leave unused."""

_TRIES = 8


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
    epsilon_at, accountant = _account_of(q, delta)
    z = privacy.noise_multiplier
    if z is None:
        assert budget is not None
        z = _least_noise(budget, q, delta, steps, epsilon_at)
    elif budget is not None and epsilon_at(z, steps) > budget:
        fits = _most(lambda number: subsampled.epsilon_bound(q, z, number, delta) <= budget, steps)
        raise CommandError(
            f"privacy.epsilon: {budget:g} at delta {delta:g} is spent after {fits} of {count_of(steps, 'step')} with "
            f"privacy.noise_multiplier {z:g}; allowed: more noise (leave it out, and the least is found), at most "
            f"{count_of(fits, 'step')} (--steps), or a smaller privacy.sample_rate"
        )

    def allowed(number: int) -> int:
        if budget is None or number <= steps or epsilon_at(z, number) <= budget:
            return number
        return _most(lambda number: number <= steps or epsilon_at(z, number) <= budget, number)

    def guarantee(number: int) -> dict[str, Any]:
        found = Guarantee(
            epsilon=epsilon_at(z, number) if number else 0.0,
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
        left_out = ("uses", "mechanism", "separation", "noise_by")
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


def _account_of(q: float, delta: float) -> tuple[Callable[[float, int], float], str]:
    """Return (noise multiplier, steps) -> epsilon, and the accountant's name: the tightest one that is installed."""
    if q == 1.0:
        return lambda z, steps: gaussian.epsilon_of(gaussian.mu_of([(z, steps)]), delta), EXACT
    if loss_distribution.is_installed():
        return cache(lambda z, steps: loss_distribution.epsilon_of(q, z, steps, delta)), PLD
    return lambda z, steps: subsampled.epsilon_bound(q, z, steps, delta), RDP


def _least_noise(budget: float, q: float, delta: float, steps: int, epsilon_at: Callable[[float, int], float]) -> float:
    """Return a noise multiplier within the budget that leaves at most `PRECISION` of it, in a few evaluations.

    From the built-in bound, which is enough, by secants of log epsilon over log z.

    Raises:
        CommandError: no noise is enough.
    """
    try:
        z = subsampled.noise_multiplier_bound(budget, delta, q, steps)
    except ValueError as error:
        raise CommandError(f"privacy.epsilon: {error}") from error
    while epsilon_at(z, steps) > budget:  # an accountant that is not below the bound, by its own rounding
        z *= 1.001
    best, power = z, 1.2
    for _ in range(_TRIES):
        found = epsilon_at(best, steps)
        if found >= budget * (1.0 - PRECISION) or found <= 0.0:
            break
        tried = best * (found / (budget * (1.0 - PRECISION / 2.0))) ** (1.0 / power)
        if epsilon_at(tried, steps) <= budget:
            best = tried
        else:
            power *= 1.5  # epsilon falls faster with z than was thought
    return best


def _most(holds: Callable[[int], bool], below: int) -> int:
    """Return the largest number, less than `below`, for which a condition holds that is monotone; 0: none."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _steps(rate: float, config: TrainConfig, local: Local) -> int:
    """Return the steps of the training; an epoch has 1 / sample rate."""
    if config.steps is not None:
        return config.steps
    if config.epochs is not None:
        return config.epochs * epoch_steps(rate)
    every = local.epochs * epoch_steps(rate)
    return min(every, local.max_steps or every)
