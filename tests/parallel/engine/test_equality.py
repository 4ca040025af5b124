"""Every strategy trains as the plain loop does. `make test-parallel` runs all cases, at 2, 4 and 8 ranks."""

import pytest

from tests.parallel.engine.cases import CASES, Case, check
from tests.turns import in_turn

HERE = (
    "single",
    "single accumulate 3, uneven",
    "single, recomputed",
    "single, recomputed selectively",
    "single, recomputed selectively, in place",
    "single, recomputed selectively, gated",
    "single, recomputed, batch norm",
    "batch norm, gpipe 2 in one",
    "frozen: tp+sp 2",
    "single bf16",
    "ddp 2",
    "ddp accumulate 2",
    "zero-1 accumulate 2",
    "zero-2 2",
    "zero-3 2",
    "zero-3 2, tied",
    "zero-3 2 bf16",
    "tp 2",
    "tp+sp+loss 2",
    "gpipe 2",
    "1f1b 2, tied",
    "1f1b 2, float64, not contiguous",
    "zbv-zero-bubble 2, views",
    "zbv-zero-bubble 2, tied",
    "interleaved-1f1b 2",
    "interleaved-zero-bubble 2",
    "zbv-zero-bubble 2",
    "sync batch norm 2",
    "own module: zero-3 2",
    "own sequential: 1f1b 2",
    "repeating: 1f1b 2",
    "odd: ddp 2",
    "odd: zero-3 2",
    "odd: fsdp x tp 2x2",
    "odd: pp x ddp 2x2",
    "hsdp 2x2",
    "zero-3 4, one example",
    "pp x tp 2x2, the head alone",
    "pp x fsdp x tp 2x2x2",
)


@pytest.mark.parametrize(
    "case",
    [
        in_turn(case, number=number, days=2, id=case.name)
        for number, case in enumerate(case for case in CASES if case.name in HERE)
    ],
)
def test_losses_norms_and_parameters_are_those_of_a_plain_loop(case: Case) -> None:
    check(case)


def test_every_name_above_is_a_case() -> None:
    assert set(HERE) <= {case.name for case in CASES}


def test_a_case_that_differs_is_noticed() -> None:
    """A learning rate of its own on one side must not pass."""
    case = next(case for case in CASES if case.name == "single")
    with pytest.raises(AssertionError, match="parameter"):
        check(case, optimizer="adamw")
