"""The end of a run of a Flower app: its `main()` gets the result, as if its strategy had run here, and continues."""

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from atoll.protocol.vocabulary import RunId, Version
from atoll.server.folding.evaluator import EvaluationFailed, Evaluator
from atoll.server.journal.rows import EvaluationRow
from atoll.server.journal.sources import IN_SUMS, SITE, TRAINING, WHOLE
from atoll.server.rounds.events import Sums
from atoll.task.metrics import merge, names_refused, values

logger = logging.getLogger(__name__)

History = dict[str, dict[str, dict[str, float]]]
"""Metrics by kind ("train", "clients", "server"), round and name."""


async def conclude(
    run_id: RunId, evaluator: Evaluator, version: Version, model: Path, rows: Iterable[EvaluationRow]
) -> None:
    """Run the rest of an app's `main()` with the result; its failure is logged, and changes nothing in the run.

    Args:
        run_id: the run.
        evaluator: the worker in which `main()` waits.
        version: the number of the last version.
        model: the last version.
        rows: all evaluations of the run.
    """
    logger.info("%s: main() of the app continues", run_id)
    try:
        await evaluator.conclude(model, history_of(version, rows))
    except EvaluationFailed as error:
        logger.error("%s: main() of the app failed after the last round: %s", run_id, error)
    else:
        logger.info("%s: main() of the app has ended", run_id)


def history_of(last: Version, rows: Iterable[EvaluationRow]) -> History:
    """Return the metrics of a run by round; round n makes version n, so each version has a training.

    The metrics of a round's training are the sums over the clients whose policy lets their metrics leave individually.
    As in Flower, a metric is NaN if one client's is not finite, as far as the clients' policies reveal it.

    Args:
        last: the number of the last version.
        rows: all evaluations of the run.
    """
    history: History = {"train": {str(n): {} for n in range(1, last + 1)}, "clients": {}, "server": {}}
    trained: dict[int, list[Sums]] = {}
    refused: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.statistics is None:
            continue
        if row.source == IN_SUMS or row.source.startswith(TRAINING):
            trained.setdefault(row.version + 1, []).append(row.statistics)
        elif row.source.startswith(SITE):
            refused.setdefault(str(row.version), {}).update(_not_finite(row.statistics))
        elif row.source in WHOLE:
            history[row.source][str(row.version)] = _defined([row.statistics])
    history["train"] |= {str(number): _defined(sums) for number, sums in trained.items() if number <= last}
    for version, found in history["clients"].items():
        found |= refused.get(version, {})
    return history


def _defined(sums: Sequence[Sums]) -> dict[str, float]:
    found = {name: value for name, value in values({}, merge(sums)).items() if value is not None}
    return found | {name: number for one in sums for name, number in _not_finite(one).items()}


def _not_finite(sums: Sums) -> dict[str, float]:
    return dict.fromkeys(names_refused(sums), math.nan)
