"""One block of an update, read alone."""

from typing import Any

from numpy.typing import NDArray

from atoll.tensors.layout import Tensor
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader


def read_block(update: StoredUpdate, tensor: Tensor, start: int, stop: int) -> NDArray[Any]:
    with UpdateReader(update) as reader:
        return reader.read(tensor, start, stop)
