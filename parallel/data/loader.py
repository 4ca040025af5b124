"""A rank's batches in the steps of an order, prefetched on request, resumable to the exact example."""

import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from atoll.ground.faults import Refused
from atoll.ground.printable import count_of
from atoll.ground.process.forking import reopen_files
from atoll.parallel.data.batch import Batch, count_units, in_parts, map_tensors
from atoll.parallel.data.order import Indices, Order
from atoll.task.collated import collate_of
from atoll.task.errors import TaskBroken
from atoll.training.data.draws import Drew, Fetch, drawing, is_fixed, unseeded

logger = logging.getLogger(__name__)

State = dict[str, Any]
"""Plain JSON values: the order's fields, `epoch` and `step`."""

CARRIED = ("num_ranks", "last_min")
"""Fields of the order that may change from one epoch to the next: they follow the number of ranks."""


class Loader:
    """The batches of one data-parallel rank: a `for` yields the rest of the epoch, or, if it is over, the next epoch.

    The state is the yielded batches', not the prefetched ones'. An error of the data set is raised at its
    step; iterating again fetches that step again. Random numbers that the data set draws itself are a function of
    (the order's seed, epoch, index of the example); a thread cannot prefetch such a data set beside a model that draws
    from the same generators, so after its first draw batches are fetched on demand, or by worker processes. The same
    holds after a batch that fails in the thread alone: a connection of SQLite serves the thread that has opened it.

    Args:
        dataset: map-style, of (inputs, targets).
        order: the order of `len(dataset)` examples.
        rank: the coordinate among the order's ranks.
        device: the device of the batches.
        prefetch: batches that a thread fetches ahead, 0: each is fetched on demand; with worker processes, batches that
            each of them holds ready (at least 1).
        num_workers: processes that fetch, if Python's work on an example takes long (torch's DataLoader).
        count: targets -> units over which the task's loss averages.
        parts: micro-batches of a batch, each collated by itself; of tensors alone, whose rows can be cut, one.

    Raises:
        ValueError: the order is of another number of examples, there is no such rank, or a number is negative.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        prefetch: int = 0,
        num_workers: int = 0,
        count: Callable[[Any], float] = count_units,
        parts: int = 1,
    ) -> None:
        rules = [
            (
                len(dataset) == order.num_examples,
                f"dataset: must have the order's {count_of(order.num_examples, 'example')}, got {len(dataset)}",
            ),
            (0 <= rank < order.num_ranks, f"rank: must be in 0..{order.num_ranks - 1}, got {rank}"),
            (prefetch >= 0, f"prefetch: must not be negative, got {prefetch}"),
            (num_workers >= 0, f"num_workers: must not be negative, got {num_workers}"),
        ]
        if faults := [fault for is_met, fault in rules if not is_met]:
            raise Refused(*faults)
        self.order = order
        self._dataset, self._rank, self._count = dataset, rank, count
        self._may_list = collate_of(dataset) is not None
        self._device = torch.device(device)
        self._prefetch, self._num_workers = prefetch, num_workers
        self._parts = 1 if is_fixed(dataset) else parts
        self._began = order
        self._epoch = self._step = 0
        self._source: Iterator[Any] | None = None
        self._is_on_demand = False

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was yielded last; 0 at the start."""
        return self._epoch

    @property
    def step(self) -> int:
        """The number of batches yielded in this epoch."""
        return self._step

    def __len__(self) -> int:
        """Return the steps of one epoch, on every rank."""
        return self.order.num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch; if there are none, the batches of the next epoch."""
        if self._step == self._began.num_steps:
            self._epoch, self._step, self._began = self._epoch + 1, 0, self.order
        while self._step < self._began.num_steps:
            yield self._next()

    def state(self) -> State:
        """Return the position of the loader, in plain JSON values."""
        return _described(self._began) | {"epoch": self._epoch, "step": self._step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch that had been yielded when `state` was taken.

        It may come from another number of ranks: the global batches of the epoch stay the same, divided over the
        present ranks. With `partition`, ranks therefore read examples of each other's old parts until the epoch ends;
        from the next one on, the parts are the present ranks'.

        Raises:
            ValueError: the state is of another order; all differences at once.
        """
        carried: State = {key: state.get(key) for key in CARRIED}
        ours = _described(self.order) | carried
        faults = [
            f"{key} is {value!r}, in the state {state.get(key)!r}"
            for key, value in ours.items()
            if value != state.get(key)
        ]
        if faults:
            raise ValueError("the state belongs to another order: " + "; ".join(faults))
        epoch, step = state.get("epoch", -1), state.get("step", -1)
        if not all(type(value) is int and value >= 0 for value in (epoch, step, *carried.values())):
            raise ValueError(f"the state is not a loader's: epoch {epoch!r}, step {step!r}, {carried}")
        began = replace(self.order, **carried)
        if step > began.num_steps:
            raise ValueError(f"the state is at step {step} of an epoch of {began.num_steps}")
        self._epoch, self._step, self._began, self._source = epoch, step, began, None

    def _next(self) -> Batch:
        if self._source is None:
            self._source = self._fetched()
        try:
            fetched = next(self._source)
        except Drew:  # in the thread, which has changed nothing: fetch this step again without it
            self._is_on_demand, self._source = True, None
            return self._next()
        except Exception as error:
            self._source = None
            if not self._has_thread:
                raise
            fetched = self._fetched_here(error)
        except BaseException:
            self._source = None
            raise
        rows = self._began.counts(self._step, self.order.num_ranks)[self._rank]
        batch = Batch.of(fetched, self._count, max(rows, 1), is_filler=not rows, may_list=self._may_list)
        self._step += 1
        return batch if self._device.type == "cpu" else batch.to(self._device)

    def _fetched_here(self, error: Exception) -> Any:
        """Fetch the batch that has failed in the thread once more, in the caller's thread, as all later ones.

        Raises:
            Exception: it fails here as well.
        """
        self._is_on_demand = True
        try:
            source = self._fetched()
            fetched = next(source)
        except BaseException:
            self._is_on_demand = False
            raise
        self._source = source
        logger.warning(
            "rows are read when their step needs them, not ahead of it: in the thread that reads ahead a batch fails "
            "(%s: %.200s), in the training's own it does not; train.workers=1 reads ahead in a separate process",
            type(error).__name__,
            error,
        )
        return fetched

    @property
    def _has_thread(self) -> bool:
        """Whether a thread of this process fetches batches ahead."""
        return bool(self._prefetch) and not self._num_workers and not self._is_on_demand

    def _fetched(self) -> Iterator[Any]:
        """Return an endless iterator of collated batches from the loader's present position."""
        is_pinned, has_thread = self._device.type == "cuda", self._has_thread
        batches = _Batches(self._dataset, self.order.seed, self._parts, beside_others=has_thread)
        positions = _positions(self._began, self.order, self._rank, epoch=self._epoch, step=self._step)
        if self._num_workers:
            return _by_workers(
                DataLoader(
                    batches,
                    batch_size=None,  # an index is an epoch and a batch's indices
                    sampler=positions,
                    collate_fn=_unchanged,
                    num_workers=self._num_workers,
                    worker_init_fn=_begin,
                    prefetch_factor=max(self._prefetch, 1),
                    pin_memory=is_pinned,
                    generator=torch.Generator().manual_seed(self.order.seed),  # the global one is the model's
                )
            )
        fetched = map(batches.pinned if is_pinned else batches.__getitem__, positions)
        return ahead(fetched, self._prefetch) if has_thread else fetched


Position = tuple[int, Indices]
"""The epoch of a batch and the indices of its examples."""


def _positions(first: Order, then: Order, rank: int, *, epoch: int, step: int) -> Iterator[Position]:
    """Yield the position of each batch from a step on, endlessly; later epochs have the order `then`."""
    order = first
    while True:
        indices = order.steps(epoch, rank, then.num_ranks)
        yield from ((epoch, indices(number)) for number in range(step, order.num_steps))
        epoch, step, order = epoch + 1, 0, then


class _Batches(Dataset[Any]):
    """A data set whose examples are batches, and whose indices are positions."""

    def __init__(self, dataset: Any, seed: int, parts: int, *, beside_others: bool) -> None:
        self._dataset, self._seed, self._parts, self._beside_others = dataset, seed, parts, beside_others
        self._fetch: Fetch | None = None

    def __getitem__(self, position: Position) -> Any:
        epoch, indices = position
        if self._fetch is None:  # here, so that each worker process creates its own
            self._fetch = unseeded(self._dataset) if self._beside_others else drawing(self._dataset, self._seed)
        rows = torch.from_numpy(indices)
        return self._fetch(epoch, rows) if self._parts == 1 else in_parts(self._fetch, epoch, rows, self._parts)

    def pinned(self, position: Position) -> Any:
        return map_tensors(torch.Tensor.pin_memory, self[position])


def _by_workers(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of torch's loader; errors lose their traceback, which would keep the worker processes alive."""
    try:
        yield from batches
    except TaskBroken as error:  # its text is the traceback in the process, which ends with the sentence
        raise TaskBroken(str(error).rpartition(f"{TaskBroken.__name__}: ")[2].strip()) from None
    except Exception as error:
        raise error.with_traceback(None) from None


def _begin(_worker: int) -> None:
    reopen_files()


def _unchanged(batch: Any) -> Any:
    return batch


def _described(order: Order) -> State:
    """Return the order in plain JSON values, with a checksum of its shards, which may be many."""
    return asdict(order) | {"shards": zlib.crc32(",".join(map(str, order.shards)).encode())}


T = TypeVar("T")

_END: Any = object()


def ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the items of an iterable in their order, while one thread draws the next `depth` of them.

    An error is raised in the place of its item. The thread ends when this iterator is closed or garbage-collected.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="atoll-data")
    waiting: deque[Future[T]] = deque()
    try:
        while True:
            while len(waiting) <= depth:
                waiting.append(executor.submit(next, items, _END))
            if (item := waiting.popleft().result()) is _END:
                return
            yield item
    finally:
        executor.shutdown(cancel_futures=True)
