"""Generated models in generated plans: as the plain loop, or refused before the first step.

`make test` tries 200, `make soak` 5,000.
"""

from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings

from tests.parallel.generated.judge import Tally
from tests.parallel.generated.strategies import Case, cases


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # torch's words about odd models are no faults of theirs
def test_a_generated_model_is_that_of_the_plain_loop_in_every_plan_or_is_refused_before_the_first_step(
    record_property: Callable[[str, object], None],
) -> None:
    tally = Tally()

    @settings(max_examples=200, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a failure costs its ranks
    @given(cases())
    def each(case: Case) -> None:
        found = tally.judge(case)
        assert found.startswith(("equal", "refused")), f"{case}: {found}"

    each()
    record_property("said", f"generated models: {tally}")
    assert 3 * tally.words["refused"] < sum(tally.words.values()), tally.refusals
