"""The bench of a Flower app and one site: its `ClientApp` at a site, its ServerApp's `main()` at the coordinator."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from atoll.parallel.flower.client_host import ClientHost, config_record
from atoll.parallel.flower.records import arrays_of, pack, record_of, unpack
from atoll.parallel.flower.server_host import NotNative, ServerHost
from atoll.parallel.flower.strategies import Native, native
from atoll.parallel.flower.terms import Terms
from atoll.parallel.local_training.warm_start import Aliases
from atoll.parallel.statistics.parts import SiteStatistics
from atoll.parallel.task.array_task import Trained, checked
from atoll.parallel.task.arrays import Arrays, check_finite, check_like, layout_of
from atoll.parallel.task.deadline import Deadline
from atoll.parallel.task.errors import OutOfTime, TaskBroken
from atoll.parallel.task.flower_app import FlowerApp
from atoll.parallel.task.given import Given
from atoll.parallel.task.json_text import to_json
from atoll.parallel.task.metrics import Metrics, Statistics, as_statistics
from atoll.parallel.task.randomness import seed_everything, seeded
from atoll.parallel.worker.bench import AllTravels, Measures, Outcome, Received

STATE = "flower.state"
"""The name of the site's own tensor: the packed state of the app's context."""


class FlowerBench(AllTravels):
    """The bench of a Flower app; see `bench.Bench`."""

    metrics: ClassVar[Metrics] = {}
    grows = False

    def __init__(self, app: FlowerApp, request: dict[str, Any]) -> None:
        self._app, self._site = app, request.get("site")
        self._settings: dict[str, Any] = dict(request.get("settings") or {})
        if (request.get("algorithm") or "fedavg") != "fedavg":
            raise TaskBroken(f"a Flower app has its own client: algorithm {request['algorithm']} does not go with it")
        self._terms, self._run_config = _terms_of(app, request)
        self._folder = Path(request["folder"]) if request.get("folder") else None
        self._first = None if self._folder is None else self._folder.with_name(f"{self._folder.name}.version0.json")
        self._client = None if self._site is None else ClientHost(app, self._site, self._settings)
        self._server: ServerHost | None = None

    def initial(self, seed: int) -> Arrays:
        """Return the arrays with which `main()` starts its strategy."""
        if self._server is None:
            seed_everything(seed)
        started = self._main().started()
        if self._first is not None and not self._first.exists():
            found = self._main().evaluate(0, started.arrays)  # as Flower does before the first round
            self._first.write_text(to_json({} if found is None else numbers_of(found)), encoding="utf-8")
        return arrays_of(started.arrays)

    def plan(self, nodes: int) -> dict[str, Any]:
        """Return how the app runs natively, or why not; see `strategies.native`."""
        try:
            return asdict(native(self._app, self._main().started(), nodes))
        except NotNative as error:
            return asdict(Native("", {}, {}, reasons=(str(error),)))

    def conclude(self, arrays: Arrays, history: dict[str, Any]) -> None:
        """Let `main()` go on with the result of the run."""
        if self._first is not None and self._first.exists() and (first := json.loads(self._first.read_text("utf-8"))):
            history["server"] = {"0": _finite(first), **history["server"]}
        by_round = {
            kind: {int(number): metric_record(values) for number, values in rounds.items()}
            for kind, rounds in history.items()
        }
        record = record_of(arrays, self._terms.ordered(arrays), self._terms.casts)
        self._main().finish(Result(record, by_round["train"], by_round["clients"], by_round["server"]))
        self._server = None

    def _main(self) -> ServerHost:
        if self._server is None:
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
                os.chdir(self._folder)  # an app writes into its current folder
            self._server = ServerHost(self._app, self._run_config)
        return self._server

    def settings(self) -> list[str]:
        """Return the names of all settings of the site: they are the app's `node_config`, which declares no names."""
        return list(self._settings)

    def aliases(self) -> Aliases:
        """Return nothing: arrays have one name each."""
        return {}

    def buffers(self) -> list[str]:
        """Return no names: Flower's strategies treat all arrays alike."""
        return []

    def num_examples(self) -> int | None:
        """Return None: an app states the size of its data in each reply."""
        return None

    def train(self, arrays: Received, request: dict[str, Any], deadline: Deadline) -> Outcome:
        """Send the app a `train` message; the app observes no deadline."""
        if deadline.passed():
            raise OutOfTime("the deadline passed before the training began")
        self._take_terms(request)
        state = _state_of(arrays.own)
        seed_everything(request["seed"])
        version = request.get("version") or 0
        reply = self._ask("train", arrays.version, self._terms.train, state, version + 1)
        record = _only(reply.array_records, "ArrayRecord", "train")
        metrics = _only(reply.metric_records, "MetricRecord", "train")
        update = self._update(record, arrays.version)
        weight, statistics = weighted(metrics, self._terms.weight)
        trained = checked(Trained(update, weight, statistics))
        return Outcome(trained, {"steps": 0}, {STATE: np.frombuffer(pack(state), np.uint8)} if state else {})

    def _update(self, record: ArrayRecord, version: Arrays) -> Arrays:
        """Return local - global, in the dtype in which each array travels."""
        layout, local = layout_of(version), arrays_of(record)
        check_like(local, layout)
        started = record_of(version, list(local), self._terms.casts)  # the values from which the app began
        update: Arrays = {}
        for name, array in record.items():
            difference = array.numpy() - started[name].numpy()
            update[name] = np.asarray(difference, dtype=version[name].dtype)
        check_finite(update, "update")
        return update

    def evaluate(self, arrays: Received, request: dict[str, Any]) -> Statistics | str:
        """Send the app an `evaluate` message, and return its metrics, weighted by its examples."""
        self._take_terms(request)
        version = request.get("version") or 0
        if request["split"] == "server" and self._site is None:
            return self._evaluate_centrally(arrays.version, version)
        if self._client is None or request["split"] != "test":
            return f"the app has no data for {request['split']!r} here"
        with seeded(request.get("model_seed") or 0):
            reply = self._ask("evaluate", arrays.version, self._terms.evaluate, _state_of(arrays.own), version)
        metrics = _only(reply.metric_records, "MetricRecord", "evaluate")
        return as_statistics(weighted(metrics, self._terms.weight)[1])

    def _evaluate_centrally(self, arrays: Arrays, version: int) -> Statistics | str:
        record = record_of(arrays, self._terms.ordered(arrays), self._terms.casts)
        found = self._main().evaluate(version, record)
        if found is None:
            return "the app has no evaluate_fn, or it has returned None"
        return {name: (value, 1.0) for name, value in numbers_of(found).items()}

    def statistics(self, request: dict[str, Any], deadline: Deadline) -> SiteStatistics:
        """Raise TaskBroken: an app has no statistics of its data."""
        raise TaskBroken(self.no_statistics())

    def no_statistics(self) -> str:
        """Return the reason: an app has no such function."""
        return "a Flower app has no statistics of its data: ask it with a query message"

    def measures(self) -> Measures:
        """Return that the app names its metrics itself."""
        return Measures(None)

    def _ask(
        self, kind: str, arrays: Arrays, config: Mapping[str, Any], state: RecordDict, server_round: int
    ) -> RecordDict:
        if self._client is None:
            raise TaskBroken("this worker was started without a site, so it has no data")
        terms = self._terms
        content = RecordDict(
            {
                terms.arrays: record_of(arrays, terms.ordered(arrays), terms.casts),
                terms.config: config_record(config, server_round),
            }
        )
        return self._client.call(kind, content, state=state, run_config=self._run_config, group=str(server_round))

    def _take_terms(self, request: dict[str, Any]) -> None:
        if "local" in request:
            self._terms, self._run_config = _terms_of(self._app, request)


def _terms_of(app: FlowerApp, request: dict[str, Any]) -> tuple[Terms, dict[str, Any]]:
    given = Given.read(request.get("local") or {})
    try:
        return Terms.read(given), app.run_config(given.options)
    except ValueError as error:
        raise TaskBroken(str(error)) from error


def _finite(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if isinstance(number, float)}


def _state_of(own: Arrays | None) -> RecordDict:
    return unpack(own[STATE].tobytes()) if own and STATE in own else RecordDict()


def _only(records: Mapping[str, Any], kind: str, what: str) -> Any:
    if len(records) != 1:
        names = ", ".join(records) or "none"
        raise TaskBroken(f"a reply to {what} has one {kind}, this one has {len(records)} ({names})")
    (record,) = records.values()
    return record


def weighted(metrics: MetricRecord, weight: str) -> tuple[int, dict[str, tuple[float, float]]]:
    """Return the weight of a reply, and its other metrics as (weight x value, weight); lists as in `numbers_of`.

    Raises:
        TaskBroken: there is no weight, or it is no whole number.
    """
    number = metrics.get(weight)
    if isinstance(number, bool | list) or number is None or number != int(number):
        raise TaskBroken(f"{weight!r} in the metrics of a reply must be a whole number, got {number!r}")
    others = {name: value for name, value in numbers_of(metrics).items() if name != weight}
    return int(number), {name: (value * number, float(number)) for name, value in others.items()}


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record of metrics; the value j of a list named `m` is `m[j]`."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            numbers |= {f"{name}[{place}]": float(item) for place, item in enumerate(value)}
        else:
            numbers[name] = float(value)
    return numbers


def metric_record(numbers: Mapping[str, float]) -> MetricRecord:
    """Return the record of metrics of which `numbers_of` makes these numbers, but for integers, which are floats."""
    values: dict[str, Any] = {}
    for name, number in numbers.items():
        listed, bracket, place = name.removesuffix("]").rpartition("[")
        if bracket and name.endswith("]") and place.isdecimal():
            values.setdefault(listed, []).append(number)
        else:
            values[name] = number
    return MetricRecord(values)
