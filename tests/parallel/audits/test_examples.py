"""Canary examples: which rows a training gets, and with which targets."""

import random

import torch

from atoll.parallel.audits.examples import Canaries
from atoll.task.randomness import data_of
from tests.operations.audited import task


def test_canaries_are_rows_that_are_in_or_absent_with_the_targets_of_another_one() -> None:
    canaries = Canaries.draw(task, 100, random.Random(1))
    changed = canaries.task(task)
    assert 30 < sum(canaries.is_in) < 70
    for site in task.sites:
        before, after = data_of(task, site, "train"), data_of(changed, site, "train")
        of_site = canaries.of_site(site)
        rows = [row for row in range(len(before)) if row not in of_site or of_site[row][1]]
        assert len(after) == len(rows) < len(before)
        for number, row in enumerate(rows):
            target = of_site[row][0] if row in of_site else row
            inputs, label = after[number]
            assert torch.equal(inputs, before[row][0])
            assert label == before[target][1]
        assert all(target != row and target in of_site for row, (target, _) in of_site.items())
        assert data_of(changed, site, "test") is None
