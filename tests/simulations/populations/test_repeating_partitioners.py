"""Partitioners that do not give each example to one client once, without flwr-datasets: `datasets` is a stand-in."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from atoll.simulations.populations.partitioners import partitioned
from atoll.simulations.populations.partitions import Impossible


class Columns(dict):
    """The columns of a dataset."""

    column_names = property(list)

    def shuffle(self, seed):
        return self


class Pool:
    """Four examples."""

    labels = np.zeros(4, np.int64)

    def __len__(self):
        return 4


class Partitioner:
    """A partitioner of given parts."""

    num_partitions = 2

    def __init__(self, parts):
        self._parts, self.dataset = parts, None

    def load_partition(self, client):
        return Columns(index=self._parts[client])


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([[0, 1], [2, 3]], None),
        ([[0, 1, 1], [2, 3]], "gives an example to a client twice"),
        ([[0, 1], [1, 2, 3]], "gives an example to two clients"),
        ([[0, 1], [3]], "leaves 1 example to no client"),
    ],
)
def test_each_example_has_one_client_once(monkeypatch, parts, told):
    stand_in = SimpleNamespace(disable_progress_bars=lambda: None, Dataset=SimpleNamespace(from_dict=Columns))
    monkeypatch.setitem(sys.modules, "datasets", stand_in)

    def divide():
        return partitioned(Partitioner, Pool(), np.zeros(4, np.int64), 2, np.random.default_rng(0), {"parts": parts})

    if told is None:
        assert divide().tolist() == [0, 0, 1, 1]
    else:
        with pytest.raises(Impossible, match=told):
            divide()
