"""The end of a run of a Flower app: its `main()` gets the result, as if its strategy had run here, and goes on."""

import logging
from collections.abc import Iterable
from pathlib import Path

from atoll.parallel.task.metrics import merge, values
from atoll.protocol.vocabulary import RunId
from atoll.server.folding.evaluator import EvaluationFailed, Evaluator
from atoll.server.journal.journal import EvaluationRow
from atoll.server.journal.sources import TRAINING, WHOLE
from atoll.server.rounds.events import Sums

logger = logging.getLogger(__name__)

History = dict[str, dict[str, dict[str, float]]]
"""Metrics by kind ("train", "clients", "server"), round and name."""


async def conclude(run_id: RunId, evaluator: Evaluator, model: Path, rows: Iterable[EvaluationRow]) -> None:
    """Let an app's `main()` go on to its end; its failure is logged, and changes nothing in the run.

    Args:
        run_id: the run.
        evaluator: the worker in which `main()` waits.
        model: the last version.
        rows: all evaluations of the run.
    """
    logger.info("%s: main() of the app goes on", run_id)
    try:
        await evaluator.conclude(model, history_of(rows))
    except EvaluationFailed as error:
        logger.error("%s: main() of the app failed after the last round: %s", run_id, error)
    else:
        logger.info("%s: main() of the app has ended", run_id)


def history_of(rows: Iterable[EvaluationRow]) -> History:
    """Return the metrics of a run by round; round n makes version n.

    The metrics of a round's training are the sums over the clients whose policy lets theirs leave alone.
    """
    history: History = {"train": {}, "clients": {}, "server": {}}
    trained: dict[int, list[Sums]] = {}
    for row in rows:
        if row.statistics is None:
            continue
        if row.source.startswith(TRAINING):
            trained.setdefault(row.version + 1, []).append(row.statistics)
        elif row.source in WHOLE:
            history[row.source][str(row.version)] = _defined(row.statistics)
    history["train"] = {str(number): _defined(merge(sums)) for number, sums in sorted(trained.items())}
    return history


def _defined(sums: Sums) -> dict[str, float]:
    return {name: value for name, value in values({}, sums).items() if value is not None}
