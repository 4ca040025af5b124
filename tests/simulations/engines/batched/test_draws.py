"""Orders drawn for many clients at once, against torch's draws for each client alone."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.simulations.engines.batched import draws
from atoll.task.randomness import seed_everything
from atoll.tensors.numba_support import COMPILED_FROM, has_compiler

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs numba: make setup installs it")

compiled = cache(draws.compiled)

CLIENTS = st.lists(
    st.tuples(
        st.integers(0, 2**63 - 1),
        st.one_of(st.integers(1, 40), st.sampled_from([226, 227, 228, 229, 622, 623, 624, 625, 3000])),
        st.integers(1, 3),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=40,
)


def drawn(place, clients, cut):
    seeds, counts, epochs, more = (list(column) for column in zip(*clients, strict=True))
    counts, epochs = np.array(counts), np.array(epochs)
    strides = counts + np.array(more)
    rows = np.zeros((len(clients), max(1, int((strides * epochs).max()) - cut)), np.int64)
    place(rows, seeds, counts, epochs, strides)
    return rows


@needs_compiler
@given(clients=CLIENTS, cut=st.integers(0, 5))
def test_the_loop_draws_what_torch_draws(clients, cut):
    assert compiled() is not draws.place_by_torch
    assert np.array_equal(drawn(compiled(), clients, cut), drawn(draws.place_by_torch, clients, cut))


@given(seed=st.integers(0, 2**63 - 1), count=st.integers(1, 700))
def test_a_single_client_takes_its_examples_in_this_order_when_it_is_alone(seed, count):
    """The reference is local training: everything is seeded, then the loader's own generator from that."""
    seed_everything(seed)
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    alone = [torch.randperm(count, generator=generator) for _ in range(2)]
    rows = np.zeros((1, 2 * count), np.int64)
    draws.place(rows, [seed], np.array([count]), np.array([2]), np.array([count]))
    assert rows[0].tolist() == torch.cat(alone).tolist()


@needs_compiler
def test_where_torch_draws_in_another_way_the_loop_is_not_used(monkeypatch):
    from atoll.simulations.engines.batched import draws_compiled

    right = draws_compiled.place

    def one_is_wrong(rows, *arguments):
        right(rows, *arguments)
        rows[-1, :2] = rows[-1, 1::-1]

    monkeypatch.setattr(draws_compiled, "place", one_is_wrong)
    assert draws.compiled() is draws.place_by_torch


@needs_compiler
def test_the_loop_is_loaded_when_much_has_been_drawn():
    few = np.zeros((1, 1), np.int64), [1], *(np.ones(1, np.int64) for _ in range(3))
    for _ in range(COMPILED_FROM // draws.CLIENT_ELEMENTS):
        draws.place(*few)
    assert draws.loop_for(0) is not None
