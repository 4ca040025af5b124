"""A task of an exported app, ready for work at one site; it stays loaded between messages."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from atoll.flower.exported.run_values import RunValues
from atoll.task.array_task import ArrayTask
from atoll.task.array_values import tuned
from atoll.task.arrays import layout_of
from atoll.task.errors import TaskBroken
from atoll.task.task import Task, load_task
from atoll.tensors.layout import Layout
from atoll.training.worker.bench import Bench
from atoll.training.worker.benches import bench_of

SITE, PARTITION = "site", "partition-id"


@dataclass(frozen=True)
class Ready:
    """A task at a site, ready for work."""

    bench: Bench
    site: str
    """The name of the site; empty: the server."""
    seed: int
    """The seed of the run, from which the model is built."""

    @cached_property
    def layout(self) -> Layout:
        """The names, dtypes and shapes of the tensors that are exchanged."""
        return layout_of(self.bench.initial(self.seed))


def ready_at(reference: str, values: RunValues, node_config: Mapping[str, Any] | None) -> Ready:
    """Load a task with the data and settings of a node's site.

    Args:
        reference: the reference of the task.
        values: the values of the run.
        node_config: the node's settings: `site`, or `partition-id` as the place among the task's sites; `device`; and
            the task's settings of a site. None: the server, which has no site.

    Raises:
        TaskBroken: the settings name no site.
        OverridesRefused: values do not fit the task; the message lists all faults.
        Exception: any error that the task's module raises.
    """
    task = _task(reference)
    site = "" if node_config is None else site_of(node_config, getattr(task, "sites", ()))
    key = (reference, repr(values), repr(node_config))
    if key not in _newest:
        _newest.clear()
        bench = _bench(task, values.rounds, dict(values.given), site, node_config)
        _newest[key] = Ready(bench, site, values.seed)
    return _newest[key]


def site_of(node_config: Mapping[str, Any], sites: Any) -> str:
    """Return the site of a node, named by `site`, or by `partition-id` among the task's sites.

    Raises:
        TaskBroken: neither names one.
    """
    if SITE in node_config:
        return str(node_config[SITE])
    place = node_config.get(PARTITION)
    if isinstance(place, int) and 0 <= place < len(sites):
        return str(sites[place])
    known = f"0 to {len(sites) - 1}, for {', '.join(sites)}" if sites else "none, as the task names no sites"
    raise TaskBroken(
        f"the node config has no {SITE}, and {PARTITION} is {place!r} (allowed: {known}): start the SuperNode with "
        f"--node-config '{SITE}=\"NAME\"'"
    )


@cache
def _task(reference: str) -> Task | ArrayTask:
    return load_task(reference)


_newest: dict[tuple[str, ...], Ready] = {}
"""The task of the last message: a process of Flower's simulation serves one node after the other."""


def _bench(
    task: Task | ArrayTask, rounds: int, given: dict[str, Any], site: str, node_config: Mapping[str, Any] | None
) -> Bench:
    request = {"rounds": rounds, "local": given, "device": (node_config or {}).get("device", "auto")}
    if node_config is None:
        return bench_of(task, request)
    settings = {name: value for name, value in node_config.items() if name in getattr(task, "settings", {})}
    if settings and site in getattr(task, "sites", ()):  # over those of `Task.site_settings`
        return bench_of(tuned(task, site_settings={site: settings}), request | {"site": site})
    return bench_of(task, request | {"site": site, "settings": settings})
