"""Context of a call of a custom rule or server optimizer: run, round, version, seeded generators."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Place:
    """Context of a call, for a rule or a server optimizer that has a parameter `place`.

    A tensor is folded in pieces, by several threads or ranks, and the cut is an implementation detail. So numbers that
    are drawn once for each piece are wrong; the generators here depend on the round alone, on the tensor, or on the
    element.
    """

    round_id: int
    """The round whose updates are folded."""

    version: int
    """The version that the fold makes of the round's updates."""

    key: str
    """The digest of the version to which they are added: the seed of all generators, the same in a repeated fold."""

    tensor: str = ""
    """The name of the tensor; empty for `mixing`, which is called once for all tensors."""

    start: int = 0
    """The first of the elements, in the tensor's flat order."""

    stop: int = 0

    shares: tuple[float, ...] = ()
    """The share p_k of each update u_k in the exact mean, sum_k p_k u_k, in the order of the client ids. A rule against
    malicious clients ignores it: the numbers of examples behind it are claims of the clients."""

    prepared: Any = None
    """The result of a server optimizer's `prepare`: a float, or an array of floats; None if it has no `prepare`."""

    @property
    def num_updates(self) -> int:
        """The number of updates K that are folded."""
        return len(self.shares)

    def of_round(self) -> np.random.Generator:
        """Return a new generator for numbers that are drawn once in a round: the same in each call of the round."""
        return np.random.Generator(np.random.PCG64(self._seed("")))

    def of_tensor(self) -> np.random.Generator:
        """Return a new generator for numbers that are drawn once for each tensor: the same in each piece of it."""
        return np.random.Generator(np.random.PCG64(self._seed(self.tensor)))

    def uniform(self) -> NDArray[np.float64]:
        """Return random numbers in [0, 1), one an element: an element's number is the same in any piece."""
        bits = np.random.PCG64(self._seed(f"{self.tensor} elements"))
        bits.advance(self.start)  # a double takes one step
        return np.random.Generator(bits).random(self.stop - self.start)

    def at(self, tensor: str, start: int, stop: int) -> "Place":
        """Return the context of some elements of a tensor."""
        return replace(self, tensor=tensor, start=start, stop=stop)

    def _seed(self, of: str) -> int:
        text = f"{self.key} {self.round_id} {of}".encode(errors="surrogatepass")
        return int.from_bytes(hashlib.sha256(text).digest()[:16], "big")


NOWHERE = Place(0, 0, "")
"""The context of a call outside of a run."""
