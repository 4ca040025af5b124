"""FedAsync's mixing of whole models, as a pull of the model towards an older version of itself, beside the mean.

    x_t = x + D + a (x_old - x)        of all floats that an update carries

With D = a u, u being the update of a client that trained from x_old, x_t = (1 - a) x + a (x_old + u).

Source: Xie et al., "Asynchronous Federated Optimization", arXiv:1903.03934, Algorithm 1.
"""

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.tiles import Mean
from atoll.tensors.layout import Tensor
from atoll.tensors.updates.reader import UpdateReader


def drawn(mean_of: Mean, tensor: Tensor, masters: UpdateReader, older: UpdateReader, share: float) -> Mean:
    """Return a mean plus its fraction of the difference from the base to the older version: D + a (x_old - x).

    Args:
        mean_of: D.
        tensor: the tensor of the mean.
        masters: x.
        older: x_old.
        share: a, in (0, 1].
    """

    def with_pull(start: int, stop: int) -> NDArray[np.float64]:
        pull = older.read(tensor, start, stop).astype(np.float64)
        np.subtract(pull, masters.read(tensor, start, stop), out=pull)
        return np.add(mean_of(start, stop), np.multiply(pull, share, out=pull), out=pull)

    return with_pull
