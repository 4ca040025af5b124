"""Generated models in generated plans: as the plain loop, or refused before the first step. `make soak` tries 5,000."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import Phase, given, settings

from tests.parallel.generated.judge import Tally
from tests.parallel.generated.strategies import Case, cases

MODELS = 200


@pytest.fixture
def tally() -> Iterator[Tally]:
    made = Tally()
    yield made
    made.pool.end()


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # torch's words about odd models are no faults of theirs
def test_a_generated_model_is_that_of_the_plain_loop_in_every_plan_or_is_refused_before_the_first_step(
    tally: Tally, record_property: Callable[[str, object], None]
) -> None:
    @settings(max_examples=MODELS, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a failure costs its ranks
    @given(cases())
    def each(case: Case) -> None:
        found = tally.judge(case)
        assert found.startswith(("equal", "refused")), f"{case}: {found}"

    each()
    record_property("said", f"generated models: {tally}")
    assert 3 * tally.words["refused"] < sum(tally.words.values()), tally.refusals
