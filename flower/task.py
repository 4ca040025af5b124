"""A Flower app with all its clients in one process, for the simulator. Importing this imports no flwr."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.flower.app import FlowerApp
from atoll.ground.faults import faults_in
from atoll.task.apps import AppTask
from atoll.task.array_task import Instructions, Trained
from atoll.task.arrays import Arrays
from atoll.task.errors import TaskBroken
from atoll.task.given import OPTION
from atoll.task.overrides import OverridesRefused

NODES = 10
"""The number of clients on one machine, if neither the project nor the operator states one."""

if TYPE_CHECKING:
    from atoll.flower.bench import ClientBench, MainBench


class FlowerTask(AppTask):
    """An app and the partitions of its clients.

    Args:
        app: the app.
        nodes: the number of clients; client i has the partition i.
        options: values that override the run config.
        site_settings: further entries of `node_config`, by site.
        folder: the current folder of `main()`, which is made; None: the current folder of this process.
    """

    def __init__(
        self,
        app: FlowerApp,
        nodes: int,
        options: Mapping[str, Any] | None = None,
        site_settings: Mapping[str, Mapping[str, Any]] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._folder = None if folder is None else folder.absolute()
        self.app, self.sites = app, tuple(f"node-{number}" for number in range(nodes))
        self._options, self._site_settings = dict(options or {}), dict(site_settings or {})
        self._server: MainBench | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a process that trains: `main()` stays here."""
        return {**self.__dict__, "_server": None}

    def with_options(self, values: Mapping[str, Any]) -> "FlowerTask":
        """Return a copy with a run's values of the run config.

        Raises:
            OverridesRefused: unknown keys or wrong types; the message lists all faults.
        """
        try:
            self.app.run_config(values)
        except ValueError as error:
            raise OverridesRefused(*faults_in(error)) from error
        return FlowerTask(self.app, len(self.sites), {**self._options, **values}, self._site_settings, self._folder)

    def with_site_settings(self, tables: Mapping[str, Mapping[str, Any]]) -> "FlowerTask":
        """Return a copy with further entries of `node_config` for some sites.

        Raises:
            OverridesRefused: there are no such sites.
        """
        if faults := [f"sites.{site}: no site of the task (its sites: {', '.join(self.sites)})" for site in tables
                      if site not in self.sites]:  # fmt: skip
            raise OverridesRefused(*faults)
        settings = {**self._site_settings, **tables}
        return FlowerTask(self.app, len(self.sites), self._options, settings, self._folder)

    def in_folder(self, folder: Path) -> "FlowerTask":
        """Return a copy whose `main()` has this current folder, which is made."""
        return FlowerTask(self.app, len(self.sites), self._options, self._site_settings, folder)

    def bench(self, request: Mapping[str, Any]) -> "ClientBench | MainBench":
        """Make the `Bench` of a request's site; without a site return the one in which `main()` runs."""
        from atoll.flower.bench import ClientBench, MainBench

        site = request.get("site")
        if site is None and self._server is not None:
            return self._server
        given = {f"{OPTION}{key}": value for key, value in self._options.items()}
        asked = {**request, "local": {**(request.get("local") or {}), **given}}
        if site is None:
            self._server = MainBench(self.app, {**asked, "folder": self._folder})
            return self._server
        partition = {"partition-id": self.sites.index(site), "num-partitions": len(self.sites)}
        return ClientBench(self.app, {**asked, "settings": {**partition, **self._site_settings.get(site, {})}})

    def initial(self, seed: int) -> Arrays:
        """Return the arrays with which `main()` starts its strategy."""
        return self.bench({}).initial(seed)

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        """Raise TaskBroken: a training needs the state of the site's context, which only a `Bench` has."""
        raise TaskBroken(f"{self.app.task} is a Flower app: a coordinator or a simulation trains it")

    def conclude(self, arrays: Arrays, history: dict[str, Any]) -> None:
        """Run `main()` to its end with the result of a run; see `bench.AppBench`."""
        assert self._server is not None, "a run has begun"
        self._server.conclude(arrays, history)
