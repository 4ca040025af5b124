"""The `Bench` of a Flower app at a site, which calls its `ClientApp`, and at the coordinator, which calls `main()`."""

import math
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from atoll.flower.app import UNNUMBERED, FlowerApp
from atoll.flower.client_host import ClientHost, Envelope, config_record
from atoll.flower.measured import Measured
from atoll.flower.native.strategies import Native, native
from atoll.flower.native.terms import Terms
from atoll.flower.records import arrays_of, from_content, in_app, record_of, to_content, travelling
from atoll.flower.secret_noise import flower_noise
from atoll.flower.server_host import HOSTED, NotNative, ServerHost
from atoll.ground.faults import faults_in
from atoll.task.array_task import Trained, checked
from atoll.task.arrays import Arrays, check_finite, check_like, layout_of
from atoll.task.content import Content, from_tensors, to_tensors
from atoll.task.deadline import Deadline
from atoll.task.errors import OutOfTime, TaskBroken, TaskMismatch
from atoll.task.given import Given
from atoll.task.metrics import Metrics, Statistics, as_statistics
from atoll.task.noise import Noise, noise_of, noise_of_job
from atoll.task.randomness import generators_kept, seed_everything
from atoll.training.statistics.parts import SiteStatistics
from atoll.training.worker.bench import AllTravels, Measures, MessageAnswer, Outcome, Received
from atoll.training.worker.warm_start import Aliases

EMPTY, NUMBER = "[0:0]", "[]"
"""The name suffixes of an empty list of metrics, and of a number whose name ends like a list's."""

NO_EVALUATE = "No evaluate function registered"
"""The first words of Flower's error for a ClientApp without an evaluate function: a strategy continues then."""


class _AppBench(AllTravels):
    """Base of the app's site and coordinator benches; see `bench.Bench`."""

    metrics: ClassVar[Metrics] = {}
    grows = False

    def __init__(self, app: FlowerApp, request: dict[str, Any]) -> None:
        if (request.get("algorithm") or "fedavg") != "fedavg":
            raise TaskBroken(f"the client of a Flower app does not support algorithm {request['algorithm']}")
        self._app = app
        self._terms, self._run_config = _terms_of(app, request)

    def aliases(self) -> Aliases:
        """Return nothing: arrays have one name each."""
        return {}

    def buffers(self) -> list[str]:
        """Return no names: Flower's strategies treat all arrays alike."""
        return []

    def num_examples(self) -> int | None:
        """Return None: an app states the size of its data in each reply."""
        return None

    def measures(self) -> Measures:
        """Return unknown names: the app names its metrics itself."""
        return Measures(None)

    def statistics(self, request: dict[str, Any], deadline: Deadline) -> SiteStatistics:
        """Raise TaskBroken: an app has no statistics of its data."""
        raise TaskBroken(self.no_statistics())

    def no_statistics(self) -> str:
        """Return the reason why an app has no statistics of its data."""
        return "a Flower app has no statistics of its data"

    def _record(self, arrays: Arrays) -> ArrayRecord:
        return record_of(arrays, self._terms.ordered(arrays), self._terms.casts)


class ClientBench(_AppBench):
    """An app at one site: each training and evaluation is a message to its `ClientApp`."""

    def __init__(self, app: FlowerApp, request: dict[str, Any]) -> None:
        super().__init__(app, request)
        self._settings: dict[str, Any] = dict(request.get("settings") or {})
        self._loading = request
        self._client = ClientHost(app, request["site"], self._settings)

    def initial(self, seed: int) -> Arrays:
        """Return nothing: the model is the server's, and arrives with the first version."""
        return {}

    def settings(self) -> list[str]:
        """Return the names of all settings of the site: they are the app's `node_config`, which declares no names."""
        return list(self._settings)

    def train(self, arrays: Received, request: dict[str, Any], deadline: Deadline) -> Outcome:
        """Send the app a `train` message; the app observes no deadline."""
        if deadline.passed():
            raise OutOfTime("the deadline passed before the training began")
        self._take_terms(request)
        state, version = _state_of(arrays.own), request.get("version") or 0
        noise = self._begin(request, request["seed"])
        config = config_record(self._terms.train, version + 1)
        reply = self._ask(_envelope(request, "train"), arrays.version, config, state, noise)
        record = _only(reply.array_records, "ArrayRecord", "train")
        metrics = _only(reply.metric_records, "MetricRecord", "train")
        weight, statistics = weighted(metrics, self._terms.weight)
        if not weight:
            raise TaskMismatch(
                f"{self._terms.weight!r} in the metrics of a reply is 0; a native run needs more; {HOSTED}"
            )
        trained = checked(Trained(self._update(record, arrays.version), weight, statistics))
        return Outcome(trained, {"steps": 0}, _own_of(state) if state else {})

    def evaluate(self, arrays: Received, request: dict[str, Any]) -> Statistics | str:
        """Send the app an `evaluate` message, and return its metrics, weighted by its examples.

        Changes of the app's state are lost: only an accepted training changes it.
        """
        self._take_terms(request)
        if request["split"] != "test":
            return f"the app has no data for {request['split']!r} here"
        state, version = _state_of(arrays.own), request.get("version") or 0
        try:
            with generators_kept():
                noise = self._begin(request, request.get("model_seed") or 0)
                config = config_record(self._terms.evaluate, version)
                reply = self._ask(_envelope(request, "evaluate"), arrays.version, config, state, noise)
        except ValueError as error:
            if not str(error).startswith(NO_EVALUATE):
                raise
            return "the ClientApp has no evaluate function"
        metrics = _only(reply.metric_records, "MetricRecord", "evaluate")
        return as_statistics(weighted(metrics, self._terms.weight)[1])

    def message(self, content: Content, own: Arrays | None, request: dict[str, Any]) -> MessageAnswer:
        """Send the app a ServerApp's message unchanged; keep its context's state if the reply is accepted."""
        self._take_terms(request)
        state, records = _state_of(own), from_content(content)
        del content  # the app has a copy: a large file need not stay mapped while it trains
        reply = self._client.call(
            _envelope(request, request["kind"]),
            records,
            state=state,
            run_config=self._run_config,
            noise=self._begin(request, request["seed"]),
        )
        return MessageAnswer(to_content(reply), _own_of(state) if state or own else None)

    def _begin(self, request: dict[str, Any], seed: int) -> Noise:
        """Seed all generators for a job, and return its noise."""
        noise = noise_of_job(request, self._loading)
        flower_noise().begin(noise.generator if noise.is_secret else None, seed)
        return noise

    def _ask(
        self, envelope: Envelope, arrays: Arrays, config: ConfigRecord, state: RecordDict, noise: Noise
    ) -> RecordDict:
        content = RecordDict({self._terms.arrays: self._record(arrays), self._terms.config: config})
        return self._client.call(envelope, content, state=state, run_config=self._run_config, noise=noise)

    def _update(self, record: ArrayRecord, version: Arrays) -> Arrays:
        """Return local - global, each array in its dtype on the wire."""
        local = {name: array.numpy() for name, array in record.items()}
        try:
            check_like(travelling(local), layout_of(version))
        except TaskMismatch as error:  # Flower's code takes any arrays that the replies have in common
            raise TaskMismatch(f"the arrays of a reply differ from the model's: {error}; {HOSTED}") from error
        update = {}
        for name in [*local]:  # arrays are freed one after the other
            begun, moved = in_app(version[name], self._terms.casts.get(name)), local.pop(name)
            difference = np.asarray(moved - begun)
            if difference.dtype.kind == "i" and bool(((difference < 0) != (moved < begun)).any()):
                raise TaskBroken(f"{name}: an integer has moved further than {difference.dtype} reaches")
            update[name] = np.asarray(difference, dtype=version[name].dtype)
        check_finite(update, "update")
        return update

    def _take_terms(self, request: dict[str, Any]) -> None:
        if "local" in request:  # the worker's last run may have had others
            self._terms, self._run_config = _terms_of(self._app, request)


class MainBench(_AppBench):
    """An app at the coordinator: one call of its `main()`, in which a run is the strategy's rounds."""

    def __init__(self, app: FlowerApp, request: dict[str, Any]) -> None:
        super().__init__(app, request)
        self._folder = Path(request["folder"]) if request.get("folder") else None
        self._host: ServerHost | None = None
        self._where: Path | None = None
        self._measured, self._loading = Measured(self._folder), request

    def initial(self, seed: int) -> Arrays:
        """Return the arrays with which `main()` starts its strategy; evaluate them once, as Flower does."""
        if self._host is None:
            seed_everything(seed)
        with self._main() as main:
            started = main.started()
            measured = None if 0 in self._measured else main.evaluate(0, started.arrays)
        if measured is not None:
            self._measured.add(0, measured)
        return arrays_of(started.arrays)

    def settings(self) -> list[str]:
        """Return no names: settings are a site's."""
        return []

    def train(self, arrays: Received, request: dict[str, Any], deadline: Deadline) -> Outcome:
        """Raise TaskBroken: the coordinator has no data to train on."""
        raise TaskBroken("this worker was started without a site, so it has no data to train on")

    def evaluate(self, arrays: Received, request: dict[str, Any]) -> Statistics | str:
        """Return the metrics of the app's `evaluate_fn`."""
        if request["split"] != "server":
            return "there is no site"
        if self._host is None:  # after a restart, `main()` draws the numbers of `initial` again
            seed_everything(request.get("model_seed") or 0)
        with self._main() as main:
            if main.started().evaluate_fn is None:
                return "the app has no evaluate_fn"
            found = main.evaluate(version := request.get("version") or 0, self._record(arrays.version))
        if found is None:
            return {}  # no reason: it is called for the next version, too
        self._measured.add(version, found)
        return {name: (value, 1.0) for name, value in numbers_of(found).items()}

    def plan(self, nodes: int) -> dict[str, Any]:
        """Return the settings of the app's native run, or the reasons against one; see `strategies.native`."""
        try:
            with self._main() as main:
                return asdict(native(self._app, main.started(), nodes))
        except NotNative as error:
            return asdict(Native("", {}, {}, reasons=(str(error),)))

    def conclude(self, arrays: Arrays, history: dict[str, Any]) -> None:
        """Return the result of the run to the waiting `main()`, and run it to its end."""
        by_round = {
            kind: {int(number): metric_record(values) for number, values in rounds.items()}
            for kind, rounds in history.items()
        }
        server = {number: record for number, record in by_round["server"].items() if record}
        server |= self._measured.records(max(by_round["train"], default=0))
        by_round["server"] = dict(sorted(server.items()))
        with self._main() as main:
            main.finish(Result(self._record(arrays), by_round["train"], by_round["clients"], by_round["server"]))
        self._host = self._where = None

    @contextmanager
    def _main(self) -> Iterator[ServerHost]:
        """Set the current folder, in the block, to `main()`'s, which may have moved: a simulator has another one."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        with nullcontext() if self._folder is None else chdir(self._where or self._folder):
            if self._host is None:
                number = self._loading.get("run_number") or UNNUMBERED
                self._host = ServerHost(self._app, self._run_config, noise_of(self._loading, "main"), number)
            yield self._host
            self._where = Path.cwd()


def _envelope(request: Mapping[str, Any], kind: str) -> Envelope:
    """Return the metadata of a request's message."""
    number = request.get("version") if kind == "evaluate" and "split" in request else request.get("round_id")
    run_id, created_at = request.get("run_number") or UNNUMBERED, request.get("asked_at") or 0.0
    return Envelope(kind, request.get("group") or "", number or 0, run_id, created_at)


def _terms_of(app: FlowerApp, request: dict[str, Any]) -> tuple[Terms, dict[str, Any]]:
    given = Given.read(request.get("local") or {})
    try:
        return Terms.read(given), app.run_config(given.options)
    except ValueError as error:
        raise TaskBroken(*faults_in(error)) from error


def _state_of(own: Arrays | None) -> RecordDict:
    return from_content(from_tensors(own)) if own else RecordDict()


def _own_of(state: RecordDict) -> Arrays:
    """Encode the state of the app's context as tensors that stay at the site."""
    return to_tensors(to_content(state))


def _only(records: Mapping[str, Any], kind: str, what: str) -> Any:
    if len(records) != 1:
        names = ", ".join(records) or "none"
        raise TaskMismatch(f"a reply to {what} has one {kind}, this one has {len(records)} ({names}); {HOSTED}")
    (record,) = records.values()
    return record


def weighted(metrics: MetricRecord, weight: str) -> tuple[int | float, dict[str, tuple[float, float]]]:
    """Return the weight of a reply, and its other metrics as (weight x value, weight); lists as in `numbers_of`.

    Raises:
        TaskMismatch: the weight is missing, or is no number >= 0.
    """
    number = metrics.get(weight)
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < math.inf:
        raise TaskMismatch(f"{weight!r} in the metrics of a reply must be a number >= 0, got {number!r}; {HOSTED}")
    others = {name: value for name, value in numbers_of(metrics).items() if name != weight}
    return number, {name: (value * number, float(number)) for name, value in others.items()}


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record of metrics, from which `metric_record` restores it.

    The value j of a list named `m` is `m[j]`, an empty list `m[0:0]`, a plain number named `m[j]` is `m[j][]`.
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            numbers |= {f"{name}[{place}]": float(item) for place, item in enumerate(value)}
            numbers |= {} if value else {f"{name}{EMPTY}": 0.0}
        else:
            numbers[f"{name}{NUMBER}" if name.endswith("]") else name] = float(value)
    return numbers


def metric_record(numbers: Mapping[str, float | None]) -> MetricRecord:
    """Restore a Flower MetricRecord from the numbers of `numbers_of`. All values are floats.

    None becomes NaN, which JSON lacks.
    """
    values: dict[str, Any] = {}
    lists: dict[str, dict[int, float]] = {}
    for name, given in numbers.items():
        number = math.nan if given is None else given
        listed, _, place = name.removesuffix("]").rpartition("[")
        if name.endswith(EMPTY):
            values[name.removesuffix(EMPTY)] = []
        elif name.endswith("]") and place.isdecimal():
            values[listed] = lists.setdefault(listed, {})
            lists[listed][int(place)] = number
        else:
            values[name.removesuffix(NUMBER)] = number
    return MetricRecord(values | {name: [found[j] for j in sorted(found)] for name, found in lists.items()})
