"""One world, happened and judged."""

from atoll.simulations.histories.checks import check
from atoll.simulations.histories.history import History
from atoll.simulations.histories.scenario import Scenario, random_scenario
from atoll.simulations.histories.world import World

LINES_SHOWN = 60


class BadHistory(AssertionError):
    """A history in which something happened that must never happen; the text replays it."""


def judged(seed: int, scenario: Scenario | None = None, *, preset: str = "standard") -> History:
    """Let one world happen and judge it.

    Args:
        seed: of the world.
        scenario: what it is like; left out: what the seed makes it.
        preset: which faults there are, see `faults`.

    Raises:
        BadHistory: with the fault, the end of the history and the command that replays it.
    """
    world = World(seed, scenario or random_scenario(seed, preset))
    try:
        history = world.run()
        check(history)
    except Exception as error:  # whatever a machine raises, the history says how it came to that
        shown = world.history.transcript(last=LINES_SHOWN)
        how = f"atoll simulate --faults {preset} --seed {seed}"
        raise BadHistory(f"seed={seed}: {type(error).__name__}: {error}\n\n{shown}\n\nreplay: {how}") from error
    return history
