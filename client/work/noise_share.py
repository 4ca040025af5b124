"""A site's share of the noise of a private sum: drawn for each attempt, from the secret of the site."""

from atoll.ground.noise.key import key_of
from atoll.protocol.secure.privacy_terms import read_privacy
from atoll.protocol.secure.terms import Terms
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.secure.vector import share_of_noise


def share_of(secret: bytes, terms: Terms, session: bytes) -> GridNoise | None:
    """Return a site's share of the noise of one attempt at a sum; None: the members of this sum add none.

    The session's id covers the terms and the keys of all members. So a masking that is repeated adds the same bits, and
    another attempt, other members or another base version get other noise, which nothing takes off.

    Args:
        secret: of the noise that this site draws.
        terms: of the sum.
        session: id of the session.
    """
    privacy = read_privacy(terms.privacy)
    if privacy is None or privacy.noise_by != "clients":
        return None
    at = (terms.run, terms.round, terms.model, session.hex(), terms.attempt)
    key = key_of(secret, "share of the noise", *at)
    return GridNoise(share_of_noise(terms.bits, privacy.noise_multiplier, privacy.honest_min), key)
