"""A `Task` at one site: its data, its options in the present run, and the settings of each round."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch

from atoll.ground.strict_json import ManifestError
from atoll.task.context import Context, context_of, within
from atoll.task.deadline import Deadline
from atoll.task.errors import TaskBroken, TaskMismatch
from atoll.task.given import Given
from atoll.task.local import Local
from atoll.task.noise import noise_of, noise_of_job
from atoll.task.overrides import check_all
from atoll.task.randomness import data_of, server_data_of
from atoll.task.task import Task
from atoll.task.told import logger, tell_rows
from atoll.training.local.algorithms import check_training
from atoll.training.private.local_steps import PrivateTerms, check_terms
from atoll.training.statistics.of_data import of_task
from atoll.training.statistics.parts import SPLITS, SiteStatistics
from atoll.training.statistics.question import Question, read_question
from atoll.training.trials.first_batch import Batches, Casting, Rows, first_batch
from atoll.training.trials.trial import refuse
from atoll.training.worker.bench import Json, Measures, only_declared

READINGS_KEPT = 2
"""Number of readings of the data that stay in memory."""

HOW_THEY_DIFFER = (
    "give the site the same files of the base, or the same versions of the task and its packages, which draw them"
)


class SiteTask:
    """A task with one site, whose data sets stay in memory while `data` of the requests is the same.

    `data` is the agent's name of a reading of the data, which belongs to one run.

    Args:
        task: the task as it was loaded.
        request: `load` (`worker/main`).

    Raises:
        OverridesRefused: values of the run or the site do not fit the task; the message lists every reason.
        TaskBroken: the task's training does not fit the run's algorithm.
    """

    def __init__(self, task: Task, request: Json) -> None:
        given = Given.read(request.get("local") or {})
        mine = only_declared(request, task.settings)
        check_all(
            lambda: given.check(task.local, request.get("rounds") or 1),
            lambda: task.with_options(given.options),
            lambda: task.with_settings(mine),
        )
        self._loaded = task.with_settings(mine)
        self.task, self._options = self._loaded.with_options(given.options), given.options
        """The task with the site's settings and the run's options; another object when the options change."""
        self.site: str | None = request.get("site")
        self.local = task.local.with_overrides(given.local)
        """The settings of the local training, without schedules."""
        self.algorithm: str = request.get("algorithm") or "fedavg"
        check_training(task, self.algorithm, self.local)
        self.is_private = bool(given.private)
        """Whether the run at loading has a guarantee for examples."""
        if self.is_private:
            check_terms(given, task, self.algorithm)
        self._reading: str | None = None
        self._read: dict[str | None, dict[str, Any]] = {None: {}}
        """The data sets by reading and split, the present reading last."""
        self._loading = request

    def at(self, site: str) -> "SiteTask":
        """Return the same task at another site, whose data is reread."""
        other = copy(self)
        other.site, other._read = site, {None: {}}
        return other

    def local_of(self, request: Json, round_: int) -> Local:
        """Return the settings of a round; switch to the options of the request's run.

        Round r makes version r. A version is evaluated with the settings of its round: after the last round there is no
        next one, in which a schedule may have no allowed value.
        """
        given = Given.read(request.get("local") or {})
        if "local" in request and given.options != self._options:  # the worker's last run had others
            self.task, self._options = self._loaded.with_options(given.options), given.options
            self._read = {None: {}}
        self._take_reading(request.get("data"))
        return given.local_of(self.local, max(1, round_))

    def private_of(self, request: Json) -> PrivateTerms | None:
        """Return the terms of the request's private steps; None: they are not private. Errors as in `check_terms`."""
        given = Given.read(request.get("local") or {})
        return check_terms(given, self._loaded, request.get("algorithm") or "fedavg")

    def check_frozen(self, request: Json, digest: Callable[[], str]) -> None:
        """Check that the model's frozen tensors, which are not exchanged, are equal to the coordinator's.

        Args:
            request: its run has their digest, or "".
            digest: () -> the digest of the model here; empty: it has no frozen tensors.

        Raises:
            TaskMismatch: they differ; the message has both digests.
        """
        expected = Given.read(request.get("local") or {}).frozen
        if expected and (found := digest() or "none") != expected:
            raise TaskMismatch(
                f"the tensors that are not exchanged differ from the coordinator's: their digest is {found} at "
                f"{self.site or 'the server'}, and {expected} in the run: {HOW_THEY_DIFFER}"
            )

    def context(self, request: Json, **circumstances: Any) -> Context:
        """Return the context of a request's job."""
        fields = {"site": self.site, "version": request.get("version") or 0} | circumstances
        fields |= {"seed": request.get("seed") or model_seed(request), "noise": noise_of_job(request, self._loading)}
        return context_of(self.task, **fields)

    def num_examples(self) -> int | None:
        """Return the size of the training split; None without a site."""
        return None if self.site is None else len(self.training_data())

    def training_data(self) -> Any:
        """Return the data set of the site's training split.

        Raises:
            TaskBroken: the site has no training split.
        """
        if self.site is None:
            raise TaskBroken("this worker was started without a site, so it has no data to train on")
        dataset = self.dataset("train")
        if dataset is None:
            raise TaskBroken(
                f"task.data({self.site!r}, 'train') returned no data set, and a site without examples to train on "
                "takes no part, in evaluations neither; data to measure on can be the task's test_data"
            )
        return dataset

    def dataset(self, split: str) -> Any:
        """Return the data set of a split: train, test, or server; None if there is none."""
        datasets = self._read.setdefault(self._reading, {})
        if split not in datasets:
            datasets[split] = self._read_anew(split)
        return datasets[split]

    def _read_anew(self, split: str) -> Any:
        if split == "server":
            return server_data_of(self.task)
        found = data_of(self.task, self.site, split, noise_of(self._loading, "data", split)) if self.site else None
        if found is not None:
            tell_rows(f"the {split} data of {self.site}", split, len(found))
        return found

    def _take_reading(self, reading: str | None) -> None:
        """Reread the data for a new reading; the last readings stay in memory, for runs that take turns."""
        if reading is None:
            return
        if reading != self._reading:
            self._read[reading] = self._read.pop(reading, {})
            self._read.pop(None, None)
            while len(self._read) > READINGS_KEPT:
                del self._read[next(iter(self._read))]
            self._reading = reading

    def try_out(self, device: str, casting: Casting = nullcontext) -> None:
        """Try model, loss and metrics on a batch of the site's training data, or without a site on the server's data.

        Faults of a site's test data are named in its log, as a run may have no evaluation by the sites.

        Raises:
            TaskBroken: the first step, or each evaluation, would fail, or leave a metric out.
        """
        context = self.context({})
        if self.site is None:
            data = self.dataset("server")
            self._try(
                [] if data is None else [Rows(data=data, where="task.test_data()", context=context)], device, casting
            )
            return
        trained, at_once = self.task.fit is None, self.local.batch_size
        with within(context):
            data = self.dataset("train")
        where = f"the {{}} data of site {self.site!r}"
        rows = Rows(data=data, where=where.format("train"), context=context, is_trained=trained, at_once=at_once)
        evaluated = list[Rows]()
        try:
            if (data := self.dataset("test")) is not None and len(data):
                evaluated = [Rows(data=data, where=where.format("test"), context=context)]
        except Exception as error:
            logger.warning("an evaluation would fail: %s", error)
        self._try([rows] if trained and rows.data is not None else [], device, casting, evaluated)
        try:
            self._try(evaluated, device, casting)
        except Exception as error:
            logger.warning("an evaluation would fail: %s", error)

    def _try(self, every: list[Rows], device: str, casting: Casting, unmeasured: Iterable[Rows] = ()) -> None:
        if every:
            way = Batches(task=self.task, every=every, device=device, casting=casting, unmeasured=unmeasured)
            refuse([first_batch], way)

    def is_empty(self, split: str) -> bool:
        """Return whether the data set of this split exists and has no examples."""
        dataset = self.dataset(split)
        return dataset is not None and not len(dataset)

    def why_not(self, where: str, local: Local) -> str:
        """Return the reason why a split cannot be evaluated; empty: it can."""
        if self.dataset(where) is None:
            return "the task has no test_data" if where == "server" else "this site has no such data"
        if self.is_empty(where):
            return "the task's test_data has no examples" if where == "server" else "this site has no such data"
        if where == "server" and local.keep is not None:
            return f"the layers of local.keep ({local.keep}) are at the sites: let clients evaluate"
        return ""

    def measures(self) -> Measures:
        """Return the names of the loss and the task's metrics, and whether the server has data for them."""
        return Measures(tuple(sorted({"loss", *self.task.metrics})), self.why_not("server", self.local))

    def statistics(self, request: Json, deadline: Deadline) -> SiteStatistics:
        """Return the statistics of the rows of both splits, and of the task's function."""
        self.local_of(request | {"data": None}, 1)  # takes the options of the request
        if self.site is None:
            raise TaskBroken("this worker was started without a site, so it has no data")
        anew = request.get("data") is not None  # in a worker whose other data may belong to a run
        datasets = {split: self._read_anew(split) if anew else self.dataset(split) for split in SPLITS}
        with within(self.context(request)):
            return of_task(self.task, datasets, deadline, question_of(request))


def question_of(request: Json) -> Question | None:
    """Return the layout of the secure sum for which a request's statistics are; None: they are plain.

    Raises:
        TaskBroken: it is none.
    """
    try:
        return read_question(str(request["question"]).encode()) if request.get("question") else None
    except ManifestError as error:
        raise TaskBroken(f"question: {error}") from None


def model_seed(request: Json) -> int:
    """Return the seed of the run's model."""
    return request.get("model_seed") or 0


def device_of(request: Json) -> str:
    """Return the kind of device, cpu or cuda; "auto" is a GPU if torch finds one. Only the worker has torch to ask.

    Raises:
        TaskBroken: cuda is set, and there is no GPU.
    """
    name: str = request.get("device") or "cpu"
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise TaskBroken("device 'cuda' is set, and torch finds no GPU; allowed: auto, cpu")
    return name
