import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.parallel.data.batch import Batch, count_units
from atoll.parallel.engine.microbatches import split, split_padded


def batch(rows: int) -> Batch:
    inputs = {"x": torch.arange(rows), "y": (torch.arange(rows) + 100, torch.zeros(rows, 2))}
    targets = torch.arange(rows)
    return Batch(inputs, targets, count_units(targets))


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_row_is_in_one_micro_batch_and_their_number_is_given(rows: int, number: int) -> None:
    micros = split(batch(rows), number)
    assert len(micros) == number
    real = [micro for micro in micros if micro.count != 0]
    assert torch.cat([micro.targets for micro in real]).tolist() == list(range(rows))
    assert torch.cat([micro.inputs["y"][0] for micro in real]).tolist() == list(range(100, 100 + rows))
    assert sum(int(micro.count) for micro in micros) == rows
    assert all(micro.rows >= 1 for micro in micros)
    assert max(micro.rows for micro in micros) - min(micro.rows for micro in real) <= 1


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 10))
def test_padded_micro_batches_have_one_shape_and_the_same_rows(rows: int, number: int, size: int) -> None:
    if rows > number * size:
        with pytest.raises(ValueError, match=f"{rows} examples? does not fit {number} micro-batch(es)? of {size}"):
            split_padded(batch(rows), number, size)
        return
    micros = split_padded(batch(rows), number, size)
    assert len(micros) == number
    assert all(len(micro.inputs["x"]) == size for micro in micros)
    assert torch.cat([micro.inputs["x"][: micro.rows] for micro in micros]).tolist() == list(range(rows))
    assert torch.cat([micro.targets for micro in micros]).tolist() == list(range(rows))
    assert sum(int(micro.count) for micro in micros) == rows


def test_a_filler_weighs_nothing_however_it_is_divided() -> None:
    filler = Batch(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), 0)
    assert [micro.count for micro in split(filler, 2)] == [0, 0]
    assert [micro.count for micro in split_padded(filler, 2, 2)] == [0, 0]


def test_ignored_tokens_do_not_count() -> None:
    targets = torch.tensor([[1, -100], [-100, -100], [2, 3]])
    tokens = Batch(torch.zeros(3, 2), targets, count_units(targets))
    assert tokens.count == 3
    assert [int(micro.count) for micro in split(tokens, 3)] == [1, 0, 2]
