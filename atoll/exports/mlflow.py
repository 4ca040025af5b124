"""The export to MLflow: a run of an experiment, in a SQLite file or at a tracking server.

MLflow appends: so the numbers that the run has are read first, and each point is logged under its own key, step and
time, which a database stores once.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before the import: an export sends nothing elsewhere
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a run does not wait minutes for a server
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from atoll.exports.destination import DestinationAway, ExportRefused
from atoll.exports.rows import About, Row, State
from atoll.ground.file_lock import Locked, lock_file
from atoll.protocol.json_values import plain
from atoll.protocol.secrets import without_password

ID = "atoll.id"
"""The tag with the identity of a run."""

DATABASE, ARTIFACTS = "mlflow.db", "artifacts"
METRICS_AT_ONCE, ENTRIES_AT_ONCE = 1000, 100
"""The largest numbers of metrics, and of parameters or tags, in one request to MLflow."""

SENTENCE_MAX = 400
REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED", "UNAUTHENTICATED")
"""The error codes of MLflow that no second try changes."""

KEY_MAX, PARAM_MAX, TAG_MAX = 250, 6000, 5000
NO_KEY = re.compile(r"[^\w.\- ]")

STATUS = {"finished": "FINISHED", "early": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
"""The status of a run in MLflow; all other states are RUNNING."""


class Mlflow:
    """The destination `mlflow` of an export: a run in an MLflow store.

    Args:
        to: a folder, for the SQLite file `mlflow.db` in it, or the URI of an MLflow store.
    """

    def __init__(self, to: str) -> None:
        self._folder = None if is_uri(to) else Path(to).absolute()
        self._uri = to if self._folder is None else f"sqlite:///{self._folder / DATABASE}"
        self.place = without_password(self._uri)
        self._client: Any = None
        self._run_id = self._status = ""
        self._lock: int | None = None
        self._known: dict[str, set[int]] = {}
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}

    def check(self) -> None:
        """Check that the store answers; a new SQLite file gets its tables."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.WARNING)  # the steps of a new database's making
        with self._faults():
            self._client = MlflowClient(tracking_uri=self._uri)
            self._client.search_experiments(max_results=1)

    def begin(self, about: About) -> None:
        """Open the run, made when it is missing, and read which numbers it has."""
        if self._client is None:
            self.check()
        if self._folder is not None:
            self._lock = _lock(self._folder, about)
        with self._faults():
            self._open(about)

    def lacks(self, row: Row) -> bool:
        """Return whether some number of the row is missing."""
        return any(row.step not in self._known.get(key_of(name), ()) for name in row.values)

    def write(self, rows: Sequence[Row]) -> None:
        """Log the numbers that are missing."""
        metrics = []
        for row in rows:
            for name, value in row.values.items():
                key = key_of(name)
                if row.step not in self._known.get(key, ()):
                    metrics.append(Metric(key, value, int(row.at * 1000), row.step))
        with self._faults():
            for part in _parts(metrics, METRICS_AT_ONCE):
                self._client.log_batch(self._run_id, metrics=part)
        for each in metrics:
            self._known.setdefault(each.key, set()).add(each.step)

    def state(self, state: State) -> None:
        """Set the state and the facts as tags if they differ, and the run's status."""
        status = STATUS.get(state.state, "RUNNING")
        with self._faults():
            self._set_tags({f"atoll.{key}": value for key, value in state.document().items()})
            if status == self._status:
                return
            if status == "RUNNING":
                self._client.update_run(self._run_id, status=status)
            else:
                self._client.set_terminated(self._run_id, status)
        self._status = status

    def close(self) -> None:
        """Release the lock on the run's export."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn MLflow's errors in the block into ExportRefused or DestinationAway, each with a sentence."""
        try:
            yield
        except MlflowException as error:
            why = without_password(f"{self.place}: {' '.join(str(error).split())[:SENTENCE_MAX]}")
            if error.error_code in REFUSALS:
                raise ExportRefused(why) from error
            raise DestinationAway(why) from error

    def _open(self, about: About) -> None:
        experiment = self._experiment(about.group)
        found = self._client.search_runs([experiment], f"tags.`{ID}` = '{about.id}'", max_results=1)
        if found:
            run = found[0]
        else:
            start = int(about.created_at * 1000)
            tags = {ID: about.id, "mlflow.source.name": "atoll", "mlflow.source.type": "JOB"}
            run = self._client.create_run(experiment, start_time=start, tags=tags, run_name=about.name)
        self._run_id, self._status = run.info.run_id, str(run.info.status)
        self._params, self._tags = dict(run.data.params), dict(run.data.tags)
        for key in run.data.metrics:
            self._known[key] = {each.step for each in self._client.get_metric_history(self._run_id, key)}
        self._set_params({key: text_of(plain(value))[:PARAM_MAX] for key, value in about.settings.items()})

    def _experiment(self, name: str) -> str:
        """Return the id of an experiment, which is made when it is missing, maybe by another process meanwhile."""
        if (found := self._client.get_experiment_by_name(name)) is None:
            place = None if self._folder is None else (self._folder / ARTIFACTS).as_uri()
            try:
                return str(self._client.create_experiment(name, artifact_location=place))
            except MlflowException:
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return str(found.experiment_id)

    def _set_params(self, settings: Mapping[str, str]) -> None:
        """Log new parameters; one that has changed, which MLflow refuses, has its new value in a tag."""
        new = [Param(key_of(key), text) for key, text in settings.items() if key_of(key) not in self._params]
        for part in _parts(new, ENTRIES_AT_ONCE):
            self._client.log_batch(self._run_id, params=part)
        changed = {key: text for key, text in settings.items() if self._params.get(key_of(key), text) != text}
        self._set_tags({f"atoll.changed.{key}": text for key, text in changed.items()})

    def _set_tags(self, tags: Mapping[str, Any]) -> None:
        texts = {key_of(key): text_of(value)[:TAG_MAX] for key, value in tags.items()}
        new = [RunTag(key, text) for key, text in texts.items() if self._tags.get(key) != text]
        for part in _parts(new, ENTRIES_AT_ONCE):
            self._client.log_batch(self._run_id, tags=part)
        self._tags |= texts


def is_uri(to: str) -> bool:
    """Return whether a place is an address of MLflow's, such as sqlite:///FILE or http://HOST, and not a folder."""
    return re.match(r"[a-z][a-z0-9+.-]+:", to) is not None or to == "databricks"


def key_of(name: str) -> str:
    """Return a name as a key of MLflow, where a character that it does not take is its number between underscores."""
    parts = [NO_KEY.sub(lambda found: f"_{ord(found[0]):x}_", part) for part in name.split("/")]
    return "/".join(f"_{part}_" if part in ("", ".", "..") else part for part in parts)[:KEY_MAX]


def text_of(value: Any) -> str:
    """Return a setting as text; an empty one, which some stores refuse, as JSON."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _parts(entries: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (entries[at : at + size] for at in range(0, len(entries), size))


def _lock(folder: Path, about: About) -> int:
    """Take the lock on the export of a run to a folder.

    Raises:
        ExportRefused: another process holds it.
    """
    try:
        return lock_file(folder / f".{about.id}.lock", f"process {os.getpid()}")
    except Locked as error:
        raise ExportRefused(
            f"{folder}: another export ({error.owner or 'of an unknown process'}) writes this run: wait for its end, "
            "or choose another place with --to"
        ) from error
