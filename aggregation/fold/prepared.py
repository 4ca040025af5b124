"""The preparation of a server optimizer's step from whole updates, once, before the first tile."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.custom_optimizer import CustomOptimizer
from atoll.aggregation.fold.exchange import Exchange, from_all
from atoll.aggregation.fold.step import Step
from atoll.tensors.layout import Layout

Gram = Callable[[Layout], NDArray[np.float64]]
"""(some tensors of the model) -> the inner products (K, K) of all updates over them."""


def prepared(step: Step, layout: Layout, gram: Gram, exchange: Exchange | None = None) -> Step:
    """Call the optimizer's `prepare`, and return the step with its result; without `prepare` return the step unchanged.

    Args:
        step: the step of the fold.
        layout: the model's tensors.
        gram: the function that returns the Gram matrix of the updates within their norm bounds.
        exchange: the exchange with the other ranks, which all take the first rank's result; None: there are none.

    Raises:
        ValueError: an update leaves a tensor out, or `prepare` failed.
        ExchangeBroken: another rank is gone.
    """
    optimizer = step.optimizer
    if not (isinstance(optimizer, CustomOptimizer) and optimizer.has_prepare):
        return step
    products = gram(tuple(tensor for tensor in layout if step.is_trained(tensor)))
    found = optimizer.prepare(products, step.place)
    if exchange is not None:  # libraries of two machines may round differently
        found = from_all(exchange, found)[0].view(np.float64).reshape(found.shape)
    return replace(step, place=replace(step.place, prepared=found.item() if found.ndim == 0 else found))


def whole_tensors(step: Step) -> bool:
    """Return whether the optimizer needs all elements of a tensor at once."""
    return isinstance(step.optimizer, CustomOptimizer) and step.optimizer.is_whole


def check_whole(step: Step, layout: Layout, num_pieces: Mapping[str, int]) -> None:
    """Check that no rank has only a part of a tensor that the optimizer needs as a whole.

    Raises:
        ValueError: tensors are cut; the message lists all of them.
    """
    if not whole_tensors(step):
        return
    if cut := [t.name for t in layout if step.is_trained(t) and num_pieces.get(t.name, 1) > 1]:
        raise ValueError(
            f"the optimizer has `whole = True`, and aggregation ranks cut {', '.join(cut[:5])} into pieces: allowed "
            "are tensors of one piece (up to 4 MiB), or a coordinator without ranks"
        )
