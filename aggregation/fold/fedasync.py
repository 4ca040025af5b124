"""Draws the model towards an older version of itself, beside the mean: what FedAsync's mixing of whole models asks for.

    x_t = x + D + a (x_old - x)        of all floats that an update carries

With D = a u, u being the update of a client that trained from x_old, x_t = (1 - a) x + a (x_old + u).

Source: Xie et al., "Asynchronous Federated Optimization", arXiv:1903.03934, Algorithm 1.
"""

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.tiles import Mean
from atoll.aggregation.tensors.layout import Tensor
from atoll.aggregation.updates.reader import UpdateReader


def drawn(mean_of: Mean, tensor: Tensor, masters: UpdateReader, older: UpdateReader, share: float) -> Mean:
    """A mean, and its share of the way from the base to the older version.

    Args:
        mean_of: D.
        tensor: whose mean it is.
        masters: x.
        older: x_old.
        share: a, in (0, 1].
    """

    def with_way(start: int, stop: int) -> NDArray[np.float64]:
        way = older.read(tensor, start, stop).astype(np.float64)
        np.subtract(way, masters.read(tensor, start, stop), out=way)
        return np.add(mean_of(start, stop), np.multiply(way, share, out=way), out=way)

    return with_way
