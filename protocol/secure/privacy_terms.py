"""The terms of differential privacy in a secure sum: the guarantee, the noise, and who adds it.

They are a text in the terms of the sum, so that all its members have the same, sign it, and approve it. The clip norm
and the grid are terms of the sum itself.
"""

import json
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Literal

from atoll.ground.strict_json import check_canonical, exact, fields_of, inexact, integer, one_of, read_object, refuse
from atoll.protocol.secure.session_size import MEMBERS_MAX
from atoll.protocol.value_type import value

_INT_MAX = 2**53
_BYTES_MAX = 4096


@value
class PrivacyTerms:
    """What the members of a private sum agree to.

    Attributes:
        unit: what is protected: all contributions of one client, or one example of one client; the values for the task
            have the clip norm of an example, its sampling and the divisor of a step.
        noise_by: "clients": each member adds a share; "coordinator": the opened sum gets the noise.
        epsilon, delta: the budget of the run.
        noise_multiplier: of the sum, which gets noise of at least this standard deviation in clip norms: z, for
            examples z over the divisor of a step.
        participations_max: most uses of one client.
        divisor: the fixed number by which the sum is divided.
        honest_min: h, fewest honest members of a sum, each of which adds the variance (z C)^2 / h; 0: none adds noise.
        colluders: n_c, members that may tell the coordinator their shares; a sum has at least h + n_c members.
    """

    unit: Literal["client", "example"]
    noise_by: Literal["clients", "coordinator"]
    epsilon: float
    delta: float
    noise_multiplier: float
    participations_max: int
    divisor: int
    honest_min: int
    colluders: int

    @property
    def sum_min(self) -> int:
        """Fewest members of a sum for its noise; 0: any number has it."""
        return self.honest_min + self.colluders if self.noise_by == "clients" else 0

    def text(self) -> str:
        """Return the terms as a text, of which there is one form."""
        document = {name: exact(each) if isinstance(each, float) else each for name, each in asdict(self).items()}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=64)
def read_privacy(text: str) -> PrivacyTerms | None:
    """Read the privacy of a sum's terms; None: the sum is not private.

    Raises:
        ManifestError: the text has another form, or a value out of range; the message has its path.
    """
    if not text:
        return None
    at = "terms.privacy"
    keys = frozenset(field.name for field in fields(PrivacyTerms))
    found = fields_of(read_object(text.encode(), num_bytes_max=_BYTES_MAX, what=at), at, keys=keys)
    one_of(found["unit"], f"{at}.unit", allowed=("client", "example"))
    parties = ("clients", "coordinator") if found["unit"] == "client" else ("clients",)
    one_of(found["noise_by"], f"{at}.noise_by", allowed=parties)
    for name in ("epsilon", "delta", "noise_multiplier"):
        found[name] = inexact(found[name], f"{at}.{name}", low=0.0)
    if found["delta"] >= 1.0:
        refuse(f"{at}.delta", found["delta"], "a number below 1")
    integer(found["participations_max"], f"{at}.participations_max", low=1, high=_INT_MAX)
    integer(found["divisor"], f"{at}.divisor", low=1, high=_INT_MAX)
    is_shared = found["noise_by"] == "clients"
    integer(found["honest_min"], f"{at}.honest_min", low=int(is_shared), high=MEMBERS_MAX if is_shared else 0)
    integer(found["colluders"], f"{at}.colluders", low=0, high=MEMBERS_MAX if is_shared else 0)
    result = PrivacyTerms(**found)
    check_canonical(result.text().encode(), text.encode())
    return result
