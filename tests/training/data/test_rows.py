"""The division of a batch by its examples."""

from typing import Any

import numpy as np
import pytest
import torch

from atoll.parallel.data.batch import Batch
from atoll.parallel.engine.microbatches import split
from atoll.training.data.rows import Division, Forms, Undivided, num_rows

BOXES = [torch.full((2 + number, 4), float(number)) for number in range(4)]
"""Of four images; those of the third are as many as the images."""


def second_half(tree: Any, forms: Forms | None = None, *, rows: int = 4, may_list: bool = True) -> Any:
    return Division(rows, forms, may_list=may_list).of(tree, "targets").take(slice(rows // 2, rows))


def test_a_list_of_entries_is_cut_by_entry() -> None:
    assert second_half(BOXES) == BOXES[2:]
    assert second_half(tuple(BOXES)) == tuple(BOXES[2:])
    assert second_half(["one", "two", "three", "four"]) == ["three", "four"]
    assert second_half([1, 2, 3, 4]) == [3, 4]
    dicts = [{"boxes": boxes, "name": "x"} for boxes in BOXES]
    assert second_half({"of": dicts, "scale": 0.5}) == {"of": dicts[2:], "scale": 0.5}
    taken = Division(4).of(BOXES, "targets").take(torch.tensor([3, 3]))
    assert taken[0] is taken[1] is BOXES[3]


def test_fields_are_cut_by_row() -> None:
    labels, texts = torch.arange(4), ("a", "b", "c", "d")
    found = second_half([labels, texts, np.arange(4), torch.tensor(2.0), torch.ones(1, 4), None, 3])
    assert found[0].tolist() == [2, 3]
    assert found[1] == ("c", "d")
    assert found[2].tolist() == [2, 3]
    assert found[3:4] + found[5:] == [torch.tensor(2.0), None, 3]
    assert found[4].shape == (1, 4)


def test_a_list_that_can_be_fields_or_entries_is_refused_unless_a_batch_has_shown_it() -> None:
    pair = [torch.arange(2), torch.arange(2) + 10]
    with pytest.raises(
        Undivided, match="targets is a list of 2 with 2 rows each: fields of the batch, or its examples"
    ):
        second_half(pair, rows=2)
    assert [field.tolist() for field in second_half(pair, rows=2, may_list=False)] == [[1], [11]]
    forms: Forms = {}
    second_half([torch.arange(4), torch.arange(4)], forms)
    assert [field.tolist() for field in second_half(pair, forms, rows=2)] == [[1], [11]]
    forms = {}
    second_half(BOXES, forms)
    assert second_half(pair, forms, rows=2) == pair[1:]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"weights": torch.ones(3)}, r"targets\['weights'\] has 3 rows for 4 examples"),
        (["a", "b", "c"], "targets is a list of 3 for 4 examples"),
        (BOXES[:3], r"targets\[0\] has 2 rows for 4 examples"),
        ({1, 2, 3, 4}, "targets is set, whose rows are not known"),
    ],
)
def test_what_has_no_row_for_each_example_is_refused_by_name(tree: Any, words: str) -> None:
    with pytest.raises(Undivided, match=words):
        second_half(tree)


def test_the_examples_are_those_collated_and_not_the_rows_of_the_first_tensor() -> None:
    assert num_rows(4, BOXES) == 4
    assert num_rows(4, {"windows": torch.zeros(9, 2)}, torch.zeros(9)) == 9, "each example gives several rows"
    assert num_rows(None, {"x": torch.zeros(3, 2)}) == 3


def test_micro_batches_of_lists_are_the_examples() -> None:
    images = [torch.full((3, 2 + number), float(number)) for number in range(4)]
    micros = split(Batch(images, BOXES, 4, rows=4, may_list=True), 3)
    assert [image for micro in micros for image in micro.inputs] == images
    assert [boxes for micro in micros for boxes in micro.targets] == BOXES
    assert [(micro.rows, micro.count) for micro in micros] == [(2, 2), (1, 1), (1, 1)]
