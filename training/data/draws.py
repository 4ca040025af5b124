"""The random numbers of a data set (masking, augmentation): a function of (seed, epoch, index) alone.

Before each example torch's, numpy's and Python's global generators, and the data set's, are seeded by a hash of the
three, and after each batch they are restored. So an example draws the same on every rank, in every worker process, with
any prefetch and after a resume, and neither the model's draws nor the order of the examples change it. A collation
continues the draws of the last example of its batch. A data set that reads many examples at once (`__getitems__`) is
seeded by the first of them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from atoll.task.randomness import generators_kept
from atoll.training.data.batches import fetcher, rows_at
from atoll.training.model.as_built import AsBuilt
from atoll.training.model.places import Drawn

Fetch = Callable[[int, torch.Tensor], Any]
"""(epoch, indices (B,) int64) -> the collated batch (inputs, targets)."""


class Drew(Exception):
    """A random number was drawn where other threads draw from the same generators."""


class Steady:
    """A data set for evaluations: it draws the same numbers in every epoch.

    Args:
        dataset: map-style.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Return the number of examples of the data set."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one example of the data set."""
        return self.dataset[index]


class Seeded:
    """A data set that seeds the global generators, and some others, before each example by (seed, epoch, index).

    Examples that are read at once are seeded once, by the first index.

    Args:
        dataset: map-style.
        seed: the seed of all draws.
        held: the places of the generators that the data set holds.
    """

    def __init__(self, dataset: Any, seed: int, held: list[Drawn]) -> None:
        self.dataset, self.seed, self.held, self.epoch = dataset, seed, held, 0

    def __len__(self) -> int:
        """Return the number of examples of the data set."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one example, drawn with its seed."""
        self._begin(index)
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the examples of these indices."""
        return rows_at(self.dataset, indices, self._begin)

    def _begin(self, index: int) -> None:
        seed_example(self.seed, self.epoch, index, self.held)


def drawing(dataset: Any, seed: int, fetcher_of: Callable[[Any], Callable[[torch.Tensor], Any]] = fetcher) -> Fetch:
    """Return the function that fetches a batch of one epoch, with the random numbers of its examples.

    Args:
        dataset: map-style.
        seed: the seed of all draws.
        fetcher_of: data set -> indices -> the collated batch.
    """
    is_steady = type(dataset) is Steady
    dataset = dataset.dataset if is_steady else dataset
    if is_fixed(dataset):
        plain = fetcher_of(dataset)
        return lambda _epoch, indices: plain(indices)
    held = held_by(dataset)
    seeded = Seeded(dataset, seed, held)
    fetch = fetcher_of(seeded)

    def fetched(epoch: int, indices: torch.Tensor) -> Any:
        seeded.epoch = 0 if is_steady else epoch
        states = [each.get() for each in held]
        with generators_kept():
            try:
                return fetch(indices)
            finally:
                for each, state in zip(held, states, strict=True):
                    each.put(state)

    return fetched


def unseeded(dataset: Any, fetcher_of: Callable[[Any], Callable[[torch.Tensor], Any]] = fetcher) -> Fetch:
    """Return the function that fetches a batch beside other threads, and fails if the data set draws.

    Raises (the function):
        Drew: the data set has drawn, or was about to, or holds a generator, which a model may share.
    """
    dataset = dataset.dataset if type(dataset) is Steady else dataset
    fetch, is_known, is_first = fetcher_of(dataset), is_fixed(dataset), True
    has_own = not is_known and bool(held_by(dataset))

    def fetched(_epoch: int, indices: torch.Tensor) -> Any:
        nonlocal is_first
        if is_known:
            return fetch(indices)
        if has_own:
            raise Drew
        with no_draws(set_back=is_first):
            is_first = False
            return fetch(indices)

    return fetched


def is_fixed(dataset: Any) -> bool:
    """Return whether a data set consists only of tensors, so that it runs no code that could draw."""
    if type(dataset) is Subset:
        return is_fixed(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(is_fixed, dataset.datasets))
    return type(dataset) is TensorDataset


def held_by(dataset: Any) -> list[Drawn]:
    """Return the places of the generators that a data set holds, each once, in the order in which they are found.

    They are in attributes, transforms, closures, and the globals of its functions. A generator of secrets is left out.
    """
    if type(dataset) is ConcatDataset:
        found = [each for part in dataset.datasets for each in held_by(part)]
    elif type(dataset) is Subset:
        found = held_by(dataset.dataset)
    else:
        found = [] if is_fixed(dataset) else AsBuilt.generators_of(dataset)
    return [*{id(each.generator): each for each in found}.values()]


def seed_example(seed: int, epoch: int, index: int, held: Sequence[Drawn] = ()) -> None:
    """Seed the global generators of torch (CPU), numpy and Python, and some others, for one example."""
    words = blake2b(f"{seed} {epoch} {index}".encode(), digest_size=16).digest()
    torch.default_generator.manual_seed(int.from_bytes(words[:4], "little"))
    np.random.seed(int.from_bytes(words[4:8], "little"))
    random.seed(int.from_bytes(words[8:], "little"))
    seed_held(held, f"{seed} {epoch} {index}")


def seed_held(held: Sequence[Drawn], key: str) -> None:
    """Seed the generators that a data set holds, each by the key and the generator's index."""
    for number, generator in enumerate(each.generator for each in held):
        word = int.from_bytes(blake2b(f"{key} {number}".encode(), digest_size=4).digest(), "little")
        if isinstance(generator, torch.Generator):
            generator.manual_seed(word)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(word).state
        else:
            generator.seed(word)


@contextmanager
def no_draws(*, set_back: bool) -> Iterator[None]:
    """Refuse draws of this thread from the global generators, which other threads may be using.

    Args:
        set_back: restore numpy's and Python's generators, if no other thread draws at present.

    Raises:
        Drew: torch's generator was asked for a number, or seeded; or numpy's or Python's has moved.
    """
    of_torch, of_numpy, of_python = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    was_seeded_by = torch.default_generator.initial_seed()
    refusing = _Refusing()
    try:
        with refusing:
            yield
    finally:
        is_touched = refusing.has_refused or torch.default_generator.initial_seed() != was_seeded_by
        if is_touched or not _same(np.random.get_state(), of_numpy) or random.getstate() != of_python:
            if set_back:
                torch.default_generator.set_state(of_torch)
                np.random.set_state(of_numpy)
                random.setstate(of_python)
            raise Drew


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one[1], other[1])) and one[2:] == other[2:]


class _Refusing(TorchFunctionMode):
    """Mode of this thread in which torch's functions fail if they draw from the global generator.

    A data set that catches the error and continues has drawn nevertheless.
    """

    has_refused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in DRAWING and (kwargs or {}).get("generator") is None:
            self.has_refused = True
            raise Drew
        return func(*args, **(kwargs or {}))


DRAWING = frozenset(
    [
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "bernoulli"),
        *("multinomial", "poisson", "binomial", "random_", "uniform_", "normal_", "bernoulli_", "exponential_"),
        *("geometric_", "cauchy_", "log_normal_", "dropout", "dropout_", "alpha_dropout", "alpha_dropout_"),
        *("feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu", "rrelu_"),
    ]
)
"""The names of torch's functions that draw; with an argument `generator` they are allowed."""
