"""Generated models in generated plans: as the plain loop, or refused before the first step. `make soak` tries 5,000."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from tests.parallel.generated.judge import Tally
from tests.parallel.generated.strategies import Case, cases

MODELS = 200


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    made = Tally()
    yield made
    made.pool.end()


@pytest.mark.real
def test_a_generated_model_is_that_of_the_plain_loop_in_every_plan_or_is_refused_before_the_first_step(
    tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    @settings(max_examples=MODELS)
    @given(cases())
    def each(case: Case) -> None:
        found = tally.judge(case)
        assert found.startswith(("equal", "refused")), f"{case}: {found}"

    each()
    with capsys.disabled():
        print(f"\n{tally}")
    assert 3 * tally.words["refused"] < sum(tally.words.values()), tally.refusals
