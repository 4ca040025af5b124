"""The bench of an `ArrayTask`: the task loaded with one site's data, for the worker. All its results are checked."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atoll.ground.faults import faults_in
from atoll.task.array_task import ArrayTask, Instructions, checked
from atoll.task.array_values import valued
from atoll.task.arrays import Arrays, check_finite, check_grows, check_like, check_rows_like, layout_of
from atoll.task.content import Content
from atoll.task.context import Context, context_of, within
from atoll.task.deadline import Deadline
from atoll.task.errors import NotFinite, OutOfTime, TaskBroken
from atoll.task.given import Given
from atoll.task.metrics import Metrics, Statistics, as_statistics
from atoll.task.noise import noise_of_job
from atoll.task.overrides import check_all
from atoll.task.randomness import DATA_SEED, seed_everything, seeded
from atoll.tensors.layout import BESIDE
from atoll.training.local.algorithms import CONCATENATE, check_algorithm
from atoll.training.private.config import NOT_A_TASK
from atoll.training.statistics.own import cannot_give, of_array_task
from atoll.training.statistics.parts import SiteStatistics
from atoll.training.worker.bench import PROCESS, AllTravels, Measures, MessageAnswer, Outcome, Received, only_declared
from atoll.training.worker.warm_start import Aliases

if TYPE_CHECKING:
    from atoll.training.worker.left_behind import Kept


def _refuse_private(given: Given) -> None:
    """Refuse a run with a guarantee for examples, by TaskBroken: the task trains by its own code."""
    if given.private:
        raise TaskBroken(NOT_A_TASK)


class ArrayBench(AllTravels):
    """The bench of an `ArrayTask` (task loaded with a site's data); see `bench.Bench`."""

    def __init__(self, task: ArrayTask, request: dict[str, Any]) -> None:
        self.metrics: Metrics = getattr(task, "metrics", {})
        given = Given.read(request.get("local") or {})
        mine = only_declared(request, getattr(task, "settings", {}))
        check_all(lambda: given.overrides(1), lambda: valued(task, given.options, mine))  # every schedule has a start
        _refuse_private(given)
        self._loaded = valued(task, settings=mine)
        self._task, self._options = valued(self._loaded, given.options), given.options
        self._site: str | None = request.get("site")
        self._loading = request
        self._local = given.local
        check_algorithm(request.get("algorithm") or "fedavg", None)
        self.grows = request.get("algorithm") == CONCATENATE
        self._kept = _kept_by(task) if request.get("warm") == PROCESS else None

    def initial(self, seed: int) -> Arrays:
        """Check the task's initial arrays, and return them."""
        context = context_of(self._task, seed=seed)
        with seeded(seed), within(context):  # seeded for libraries that draw from a global generator
            arrays = self._task.initial(seed)
        layout = layout_of(arrays)
        if self.grows:
            check_grows(layout)
        if reserved := [name for name in arrays if name.startswith(BESIDE)]:
            raise TaskBroken(
                f"{', '.join(reserved)}: the prefixes {', '.join(BESIDE)} are reserved for tensors beside the model"
            )
        try:
            check_finite(arrays, "initial model")
        except NotFinite as error:
            raise TaskBroken(*faults_in(error)) from error
        return arrays

    def settings(self) -> list[str]:
        """Return the names of the site's settings that the task declares."""
        return list(getattr(self._task, "settings", {}))

    def aliases(self) -> Aliases:
        """Return nothing: arrays have one name each."""
        return {}

    def buffers(self) -> list[str]:
        """Return no names: it is unknown which arrays are trained."""
        return []

    def num_examples(self) -> int | None:
        """Return the task's `num_examples`; None without a site, or if the task has none."""
        count = getattr(self._task, "num_examples", None)
        with within(context_of(self._task, site=self._site)):
            return int(count(self._site)) if count is not None and self._site is not None else None

    def train(self, arrays: Received, request: dict[str, Any], deadline: Deadline) -> Outcome:
        """Call the task's `train`, check its result and return the outcome; the task must observe the deadline."""
        if self._site is None:
            raise TaskBroken("this worker was started without a site, so it has no data to train on")
        check_algorithm(request.get("algorithm") or "fedavg", None)
        if deadline.passed():
            raise OutOfTime("the deadline passed before the training began")
        if self._kept is not None:
            self._kept.name()
        _refuse_private(Given.read(request.get("local") or {}))
        given, version = self._given(request), request.get("version") or 0
        parameters = arrays.version
        layout = layout_of(parameters)
        seed, round_id = request["seed"], request.get("round_id", 0)
        context = self._context(request, round=round_id, version=version, seed=seed, deadline=deadline)
        local = {**self._local, **given.overrides(version + 1)}
        instructions = Instructions(self._site, seed, round_id, deadline, local, context)
        seed_everything(instructions.seed)
        trained = checked(self._task.train(parameters, instructions))
        if request.get("algorithm") == CONCATENATE:
            check_rows_like(trained.update, layout)
        else:
            check_like(trained.update, layout, may_omit=True)  # the coordinator judges partial updates
        check_finite(trained.update, "update")
        return Outcome(trained, {"steps": 0})

    def message(self, content: Content, own: Arrays | None, request: dict[str, Any]) -> MessageAnswer:
        """Call the task to answer a message of a server program; it keeps no state for the next message."""
        answer, kind = getattr(self._task, "message", None), request["kind"]
        if answer is None:
            raise TaskBroken(f"the task answers no messages, and was asked for {kind!r}")
        if self._site is None:
            raise TaskBroken("this worker was started without a site, so it has no data")
        self._given(request)
        seed_everything(request["seed"])
        with within(self._context(request, round=request["round_id"], seed=request["seed"])):
            reply = answer(kind, content, site=self._site)
        if not isinstance(reply, Content):
            raise TaskBroken(f"message must return a Content, got {type(reply).__name__}")
        return MessageAnswer(reply)

    def evaluate(self, arrays: Received, request: dict[str, Any]) -> Statistics | str:
        """Return the statistics of the task's `evaluate`, or the reason why there are none."""
        if self._kept is not None:
            self._kept.name()
        self._given(request)
        evaluate, split = getattr(self._task, "evaluate", None), request["split"]
        site = None if split == "server" else self._site
        if evaluate is None or (split != "server" and site is None):
            return "the task has no `evaluate`, or there is no site"
        seed, version = request.get("model_seed") or 0, request.get("version") or 0
        with seeded(seed), within(self._context(request, site=site, version=version, seed=seed)):
            statistics: Mapping[str, Any] | None = evaluate(arrays.version, split=split, site=site)
        return f"the task has no data for {split!r} here" if statistics is None else as_statistics(statistics)

    def statistics(self, request: dict[str, Any], deadline: Deadline) -> SiteStatistics:
        """Return the results of the task's `statistics` and `num_examples`, which observe no deadline."""
        self._given(request)
        if self._site is None:
            raise TaskBroken("this worker was started without a site, so it has no data")
        seed = request.get("model_seed") or 0
        with seeded(DATA_SEED), within(self._context(request, seed=seed)):
            return of_array_task(self._task, self._site)

    def no_statistics(self) -> str:
        """Return the reason why the task has no statistics, or ""."""
        return cannot_give(self._task)

    def _context(self, request: dict[str, Any], **circumstances: Any) -> Context:
        """Return the context of a request's job; its noise as in `SiteTask`."""
        noise = noise_of_job(request, self._loading)
        return context_of(self._task, **{"site": self._site, "noise": noise} | circumstances)

    def _given(self, request: dict[str, Any]) -> Given:
        """Return the values of the request's run, and switch the task to its options."""
        given = Given.read(request.get("local") or {})
        if "local" in request and given.options != self._options:  # the worker's last run had others
            self._task, self._options = valued(self._loaded, given.options), given.options
        return given

    def measures(self) -> Measures:
        """Return that the names of the metrics are unknown (the task's `evaluate` gives them), or that it has none."""
        has = getattr(self._task, "evaluate", None) is not None
        return Measures(None if has else (), "" if has else "the task has no `evaluate`")


def _kept_by(task: ArrayTask) -> "Kept":
    from atoll.training.worker import left_behind  # after the task: knows torch if that has imported it

    return left_behind.Kept({"": task})
