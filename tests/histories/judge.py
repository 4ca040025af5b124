"""The run and the judgement of one world."""

from tests.histories.checks import check
from tests.histories.history import History
from tests.histories.scenario import Scenario, random_scenario
from tests.histories.world import World

LINES_SHOWN = 60


class BadHistory(AssertionError):
    """A history that breaks an invariant; the message has the command that replays it."""


def judged(seed: int, scenario: Scenario | None = None, *, preset: str = "standard") -> History:
    """Run one world and judge its history.

    Args:
        seed: the seed of the world.
        scenario: the scenario of the world; None: that of the seed.
        preset: the preset of its faults, see `faults`.

    Raises:
        BadHistory: the history breaks an invariant; with the fault, the end of the history and the command that
            replays it.
    """
    world = World(seed, scenario or random_scenario(seed, preset))
    try:
        history = world.run()
        check(history)
    except Exception as error:  # nothing narrower: a machine may raise anything, and the transcript shows the cause
        shown = world.history.transcript(last=LINES_SHOWN)
        command = f"python -m tests.histories --faults {preset} --seed {seed}"
        raise BadHistory(f"seed={seed}: {type(error).__name__}: {error}\n\n{shown}\n\nreplay: {command}") from error
    return history
