"""A Flower app as the settings of a run: a worker process runs its `main()` up to the start of the strategy."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from atoll.flower.app import FlowerApp, read_app
from atoll.ground.faults import faults_in
from atoll.operations.faults import CommandError, without_frames
from atoll.operations.reporter import note, waiting_for
from atoll.operations.worker_check import worker_of
from atoll.protocol.secrets import without_password
from atoll.protocol.settings import ConfigError, load_text
from atoll.server.config.run import RunFile

PLAN_TIMEOUT_S = 600.0

HOSTED = "without program.native (--native) the app runs hosted, unchanged"

KEEP_SITES = 1_000_000
"""Versions whose metrics of single sites stay: the `Result` of Flower has the metrics of each training."""


@dataclass(frozen=True, slots=True)
class AppPlan:
    """The settings with which Atoll's rounds replace an app's server (native run), or the reasons that they cannot."""

    app: FlowerApp
    strategy: str
    settings: Mapping[str, Any]
    became: Mapping[str, str]
    notes: tuple[str, ...]
    reasons: tuple[str, ...]


def app_of(reference: str) -> FlowerApp:
    """Read the description of a Flower app.

    Raises:
        CommandError: the description is wrong; the error lists all faults.
    """
    try:
        return read_app(reference)
    except ValueError as error:
        raise CommandError(str(error)) from error


def checked_app(reference: str, options: Mapping[str, Any]) -> FlowerApp:
    """Check that an app's run config can have the given values, and return the app's description.

    Raises:
        CommandError: the description or a value is wrong; the error lists all faults.
    """
    app = app_of(reference)
    try:
        app.run_config(options)
    except ValueError as error:
        raise CommandError(*faults_in(error)) from error
    return app


def plan_of(reference: str, options: Mapping[str, Any], *, nodes: int | None = None) -> AppPlan:
    """Return the settings of an app's native run (by Atoll's rounds), or the reasons against one.

    Args:
        reference: the reference of the app.
        options: values of its run config over the defaults.
        nodes: the number of clients; None: the number of the project's federations.

    Raises:
        CommandError: its description is wrong, a value is, or its code raises before the strategy starts.
    """
    from atoll.training.worker.process import WorkerCrashed, WorkerError, WorkerHung

    app = checked_app(reference, options)
    with worker_of(reference, options=options) as worker:
        try:
            with waiting_for(f"main() of {app.task}", "it runs up to the start of its strategy"):
                answer = worker.call("plan", PLAN_TIMEOUT_S, nodes=nodes or app.num_supernodes)
        except WorkerError as error:
            raise CommandError(*(f"{reference}: {line}" for line in without_frames(error.detail))) from error
        except (WorkerCrashed, WorkerHung) as error:
            raise CommandError(f"{reference}: main() does not reach its strategy: {error}") from error
    reasons = answer["reasons"] or _no_place_for(answer["settings"], reference)
    if reasons:
        return AppPlan(app, answer["strategy"], {}, {}, (), tuple(reasons))
    settings = {**answer["settings"], "evaluation": {**answer["settings"]["evaluation"], "keep_sites": KEEP_SITES}}
    return AppPlan(app, answer["strategy"], settings, answer["became"], tuple(answer["notes"]), ())


def _no_place_for(settings: Mapping[str, Any], reference: str) -> Sequence[str]:
    """Return sentences about a strategy's settings that a native run cannot have, such as no rounds."""
    try:
        load_text(RunFile, tomli_w.dumps({"task": reference, **settings}), (), name="")
    except ConfigError as error:
        return error.faults
    return ()


def run_of_app(reference: str, options: Mapping[str, Any], *, nodes: int | None = None, is_native: bool = False) -> str:
    """Return the TOML of an app's run: over messages, hosted, or natively.

    Its options are the run config of this copy of the app, so that every site has the same, whatever its copy says.

    Args:
        reference: the reference of the app.
        options: values of its run config over the defaults.
        nodes: the number of clients, for which a run of messages waits before its first look; None: the number
            of the project's federations.
        is_native: run `main()` up to the start of its strategy, and take the settings of that.

    Raises:
        CommandError: as `plan_of`; or the app has no native run; the error lists every reason.
    """
    if is_native:
        plan = plan_of(reference, options, nodes=nodes)
        if plan.reasons:
            raise CommandError(*(f"program.native: {reason}" for reason in plan.reasons), f"{HOSTED}: leave it out")
        app, settings = plan.app, plan.settings
    else:
        app = checked_app(reference, options)
        first = {"round": {"cohort_size": nodes, "quorum": 1, "min_available": nodes}} if nodes else {}
        settings = {"program": {"main": reference}, **first}
    config = {key: value for key, value in app.config.items() if _travels(value)}
    if own := app.config.keys() - config.keys():
        note(f"each site uses its own {', '.join(sorted(own))} of the run config; only plain values are sent")
    return tomli_w.dumps({"name": run_name(app.name), "task": reference, "options": config, **settings})


def _travels(value: Any) -> bool:
    """Return whether a value of the run config is one of `protocol.settings.Plain`, and its text no secret."""
    match value:
        case str():
            return without_password(value) == value
        case float():
            return math.isfinite(value)
        case int():
            return -(2**63) <= value < 2**63
    return False


def run_name(name: str) -> str:
    """Return the name of an app as one of a run: other characters become hyphens."""
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())[:64] or "app"
