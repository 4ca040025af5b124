"""The noise of a job: one generator from a secret, which no public seed predicts.

The seeds of Python's, numpy's and torch's generators follow from values that the coordinator and all sites know
(`randomness`). So secret noise is drawn from `context.secret_rng` instead. Its key comes with the request of the job,
from the secret of the state directory of the agent or the coordinator:

    HMAC-SHA256(secret, (kind of work, run, round, digest of the model, fresh bytes, site))      -> AES-256-CTR

An agent's fresh bytes are gone when the update leaves. Work whose steps are not accounted has a fresh key each time.

A simulation, a centralized training and a trial have no such secret: their noise follows from public seeds, so that a
result can be repeated, and protects nothing; a note on stderr says so at the first draw.

Importing this file imports neither numpy nor `cryptography`.
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from atoll.ground.noise.key import BYTES, key_of

if TYPE_CHECKING:
    from atoll.ground.noise.generator import SecretGenerator

FIELD = "noise"
"""The field of a request with the key, in hexadecimal digits."""

NOT_PRIVATE = (
    "noise is drawn from public seeds here, as there is no secret of a state directory: anyone can draw it again, and "
    "nothing in this run is private"
)


class Noise:
    """The noise of one job, with one generator for all of it: a second one would draw the same again.

    Args:
        key: 32 bytes; None: there is no secret here.
        purpose: the part of the key's noise.
    """

    on_public: "ClassVar[Callable[[], None]]"
    """The function that is called when noise is drawn without a secret."""

    def __init__(self, key: bytes | None = None, *purpose: str | int) -> None:
        self._key, self._purpose = key, purpose
        self._generator: SecretGenerator | None = None

    @property
    def is_secret(self) -> bool:
        """Return whether the noise is drawn from a secret."""
        return self._key is not None

    def generator(self, *public: str | int) -> "SecretGenerator":
        """Return the generator of the job's noise.

        Args:
            public: the seed if there is no secret.

        Raises:
            ModuleNotFoundError: `cryptography` is not installed here.
        """
        if self._generator is None:
            from atoll.ground.noise.generator import SecretGenerator  # imports numpy

            if self._key is None:
                Noise.on_public()
            purpose = self._purpose if self.is_secret else ("public", *self._purpose, *public)
            self._generator = SecretGenerator(key_of(self._key or bytes(BYTES), *purpose))
        return self._generator

    def again(self) -> "Noise":
        """Return the same noise from its beginning, for a trial whose outcome is dropped."""
        return Noise(self._key, *self._purpose)

    def narrow(self, *purpose: str | int) -> None:
        """Switch to the noise of a part of the job, named by further words of its purpose, such as one rank's."""
        self._purpose, self._generator = (*self._purpose, *purpose), None


def noise_of(request: Mapping[str, Any], *purpose: str | int) -> Noise:
    """Return the noise for a purpose, from the key in a request; without one there is no secret."""
    key = request.get(FIELD)
    return Noise(bytes.fromhex(key) if key else None, *purpose)


def noise_of_job(request: Mapping[str, Any], loading: Mapping[str, Any]) -> Noise:
    """Return the noise of a request's job.

    Args:
        request: an agent gives each request a key.
        loading: the request that loaded the task; a coordinator gives its worker one key for a run.
    """
    of_job = request if request.get(FIELD) else loading
    return noise_of(of_job, request.get("op", ""), request.get("split", ""), request.get("version") or 0)


@cache
def tell_public() -> None:
    """Say once in a process, on stderr, that its noise protects nothing."""
    sys.stderr.write(f"note: {NOT_PRIVATE}\n")


Noise.on_public = staticmethod(tell_public)
