"""The noise that a training leaves to its secure sum: whether the sum has it.

The values for the task tell a site to train one step without noise. So all that they promise must be in the terms of
the sum, which the other members sign, too:

    z_sum >= z / B,    C_sum = C,    the words have the bits for which the site leaves room
"""

import json
from collections.abc import Mapping

from atoll.client.policy.run_terms import NORM_MAX, NORM_MIN, number_of
from atoll.ground.printable import count_of
from atoll.protocol.secure.privacy_terms import read_privacy
from atoll.protocol.secure.terms import Terms
from atoll.task.given import Given
from atoll.task.overrides import OverridesRefused

SLACK = 1e-12
"""Part of a noise multiplier that the rounding of a quotient may take."""


def fault_of_shares(local: str, secure: Terms | None) -> str:
    """Return why a training has not the noise that its run promises for examples inside a secure sum; empty: it has.

    Args:
        local: the run's values for its task.
        secure: the terms of the sum; None: the update would leave plain.
    """
    given = _given(local)
    privacy = None if secure is None else read_privacy(secure.privacy)
    is_inside = privacy is not None and privacy.unit == "example"
    if not given.is_shared:
        return "a secure sum with noise for examples of which the training knows nothing" if is_inside else ""
    if secure is None or privacy is None or not is_inside:
        return "a step without noise outside of a secure sum in which the clients add it"
    terms = given.private
    try:
        z, clip_norm, batch = (
            number_of(terms, name, NORM_MIN, NORM_MAX) for name in ("noise_multiplier", "clip_norm", "batch")
        )
    except ValueError as error:
        return f"a training {error}"
    if privacy.noise_multiplier < z / batch * (1.0 - SLACK):
        return f"a secure sum with noise multiplier {privacy.noise_multiplier:.6g}, and its step needs {z / batch:.6g}"
    if secure.clip_norm != clip_norm or secure.bits != terms.get("bits"):
        there = f"{secure.clip_norm:g}, {count_of(secure.bits, 'bit')}"
        return f"a secure sum with clip norm and words of {there}, and its step has {clip_norm:g}, {terms.get('bits')}"
    return ""


def _given(local: str) -> Given:
    """Parse the values as a training does; values that it refuses, as it does not begin, are none."""
    try:
        table = json.loads(local or "{}")
        return Given.read(table if isinstance(table, Mapping) else {})
    except (ValueError, RecursionError, OverridesRefused):
        return Given()
