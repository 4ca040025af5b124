"""The terms of a private centralized training: the noise for its budget, or the budget of its noise."""

from typing import Any

from atoll.operations.faults import CommandError
from atoll.operations.privacy_plan import plan
from atoll.operations.requests import PrivacyPlanRequest
from atoll.parallel.private.terms import Terms, epoch_steps
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.job import JobRefused
from atoll.task.local import Local
from atoll.training.private.config import EXAMPLE, PrivacyConfig


def terms_of(privacy: PrivacyConfig, config: TrainConfig, local: Local) -> Terms | None:
    """Return the terms of a training; None: it is not private.

    Raises:
        JobRefused: no noise keeps the budget, or the given noise spends it before the last step.
    """
    if not privacy.is_on:
        return None
    assert privacy.sample_rate is not None
    assert privacy.clip_norm is not None
    assert privacy.delta is not None
    steps, asked = _steps(privacy.sample_rate, config, local), privacy
    common = {
        "unit": EXAMPLE,
        "delta": privacy.delta,
        "clip_norm": privacy.clip_norm,
        "sample_rate": privacy.sample_rate,
    }
    try:
        planned = plan(
            PrivacyPlanRequest(
                **common, steps=steps, epsilon=asked.epsilon, noise_multiplier=asked.noise_multiplier  # type: ignore[arg-type]
            )
        )
    except CommandError as error:
        raise JobRefused("; ".join(_by_setting(fault) for fault in error.faults)) from error
    z = planned.guarantee.noise_multiplier
    if planned.fits is not None and planned.fits < steps:
        raise JobRefused(
            f"privacy.epsilon: {privacy.epsilon:g} at delta {privacy.delta:g} is spent after {planned.fits} of {steps} "
            f"steps with privacy.noise_multiplier {z:g}; allowed: more noise (leave it out, and the least is found), "
            f"at most {planned.fits} steps (--steps), or a smaller privacy.sample_rate"
        )

    def guarantee(number: int) -> dict[str, Any]:
        found = plan(PrivacyPlanRequest(**common, steps=max(1, number), noise_multiplier=z))  # type: ignore[arg-type]
        document = found.document
        names = ("epsilon", "delta", "unit", "noise_multiplier", "clip_norm", "sampling_rate", "accountant", "sentence")
        return {"steps": number, "epsilon_max": privacy.epsilon, **{name: document[name] for name in names}}

    return Terms(
        sample_rate=privacy.sample_rate,
        noise_multiplier=z,
        clip_norm=privacy.clip_norm,
        delta=privacy.delta,
        steps_max=planned.fits,
        steps=steps,
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


def _by_setting(fault: str) -> str:
    """Return the fault of an option of `atoll privacy plan` with the setting's name."""
    flag, colon, rest = fault.partition(":")
    return f"privacy.{flag.removeprefix('--').replace('-', '_')}{colon}{rest}" if flag.startswith("--") else fault
