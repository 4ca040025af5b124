"""The host of a ServerApp: its `main()` runs on a thread, and its `strategy.start(...)` is answered natively.

    main's thread       main() --> strategy.start(...) waits here: evaluate_fn calls, then the Result --> rest of main()
    the worker's        started() --> evaluate(version, arrays) ... --> finish(result)

So an app's code before and after `start` runs unchanged in a separate process, in one call of `main()`. `start` is
replaced by Atoll's rounds, journal and recovery. After a restart `main()` runs again up to `start`.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NoReturn

from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from atoll.flower.app import SERVER, UNNUMBERED, FlowerApp
from atoll.flower.secret_noise import NoisyContext
from atoll.task.errors import TaskBroken
from atoll.task.noise import Noise

HOSTED = "without program.native (--native) it runs hosted"
TOO_LATE = f"after the start of its strategy; {HOSTED}"
NO_SIGNALS = "signal only works in main thread"
"""The first words of Python's error for a signal handler outside of the main thread, where a native `main()` runs."""


class NotNative(TaskBroken):
    """A ServerApp cannot run natively (by Atoll's rounds); the message has the reason."""


@dataclass(frozen=True, slots=True)
class Started:
    """The arguments of `strategy.start`."""

    strategy: Strategy
    arrays: ArrayRecord
    rounds: int
    timeout_s: float | None
    train: Mapping[str, Any]
    evaluate: Mapping[str, Any]
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None


class _Refused(BaseException):
    """The end of a `main()` that cannot run natively, by Atoll's rounds; no `except Exception` of an app catches it."""


def server_app_of(app: FlowerApp) -> ServerApp:
    """Return the ServerApp of an app.

    Raises:
        TaskBroken: the app's reference to it names another object.
        TaskNotFound: the reference names no object.
        Exception: any error that the app's module raises.
    """
    found = app.load(app.serverapp)
    if not isinstance(found, ServerApp):
        what = f"{app.serverapp} is a {type(found).__name__}"
        raise TaskBroken(f"{what}: tool.flwr.app.components.serverapp must name a ServerApp")
    return found


class ServerHost:
    """One call of a ServerApp's `main()`; one instance at a time in a process.

    Args:
        app: the app.
        run_config: its run config.
        noise: the noise of its `main()`; None: there is no secret.
        run_id: the number of the run.
    """

    def __init__(
        self, app: FlowerApp, run_config: Mapping[str, Any], noise: Noise | None = None, run_id: int = UNNUMBERED
    ) -> None:
        self._run_id = run_id
        self._app, self._run_config, self._noise = app, dict(run_config), noise or Noise()
        self._requests: queue.SimpleQueue[Callable[[], Any] | Result] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._started: Started | None = None
        self._refusal: _Refused | None = None
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def started(self) -> Started:
        """Return the arguments of `strategy.start`; the first call runs `main()` up to there.

        Raises:
            NotNative: `main()` ends without a start, or uses the grid itself.
            Exception: any error of `main()`.
        """
        if self._started is None:
            server_app = server_app_of(self._app)
            if getattr(server_app, "_main", None) is None:
                raise NotNative(f"{self._app.serverapp} has no main(): it has the form from before Flower 1.21")
            self._thread = threading.Thread(target=self._run, args=(server_app,), name="main", daemon=True)
            self._thread.start()
            found = self._answer()
            if found is None:
                raise NotNative("main() ends without a call of strategy.start")
            self._started = found
        return self._started

    def evaluate(self, version: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the metrics of the app's `evaluate_fn`, called on main's thread; None: there is no function."""
        evaluate_fn = self.started().evaluate_fn
        if evaluate_fn is None:
            return None
        found: MetricRecord | None = self._ask(lambda: evaluate_fn(version, arrays))
        return found

    def finish(self, result: Result) -> None:
        """Return the result from `strategy.start`, and wait for the end of `main()`.

        Raises:
            NotNative: `main()` starts a second strategy, which is detected only here, after the rounds of the first.
            Exception: any error of `main()`.
        """
        self.started()
        self._ask(result)

    def _ask(self, request: Callable[[], Any] | Result) -> Any:
        """Send a request to the thread of `main()`, and return its answer."""
        if self._has_ended:
            raise TaskBroken("main() has ended within its strategy.start")
        self._requests.put(request)
        return self._answer()

    def _answer(self) -> Any:
        found = self._answers.get()
        if isinstance(found, Exception):
            raise found
        if isinstance(found, BaseException):  # it would end the worker
            raise TaskBroken(f"main() ended with {type(found).__name__}: {found}") from found
        return found

    def _run(self, server_app: Any) -> None:
        _stand_in()
        _of_thread.host = self
        context = NoisyContext(self._run_id, SERVER, {}, RecordDict(), self._run_config)
        context.source = self._noise.generator
        raised: BaseException | None = None
        try:
            server_app(_NoGrid(self), context)
        except SystemExit as error:
            raised = error if error.code else None  # an exit with 0 is a return
        except ValueError as error:
            of_signals = self._started is None and str(error).startswith(NO_SIGNALS)
            raised = NotNative("main() sets a signal handler") if of_signals else error
        except BaseException as error:
            raised = error
        self._has_ended = True
        self._answers.put(raised if self._refusal is None else NotNative(*self._refusal.args))

    def start(
        self,
        strategy: Strategy,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = 3600,
        train_config: Mapping[str, Any] | None = None,
        evaluate_config: Mapping[str, Any] | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Replace `Strategy.start`, with its arguments: wait for Atoll's rounds, and return their result."""
        if self._refusal is not None:
            raise self._refusal
        if self._started is not None:
            self.refuse("main() starts a second strategy")
        configs = dict(train_config or {}), dict(evaluate_config or {})
        begun = _changeable(strategy, train_config, evaluate_config)
        self._answers.put(Started(strategy, initial_arrays, num_rounds, timeout, *configs, evaluate_fn))
        while True:
            request = self._requests.get()
            if isinstance(request, Result):
                return request
            try:
                answer = request()
            except Exception as error:
                answer = error
            now = _changeable(strategy, train_config, evaluate_config)
            if changed := [name for name in begun.keys() | now.keys() if begun.get(name) != now.get(name)]:
                self.refuse(f"evaluate_fn changes {', '.join(sorted(changed))}")
            self._answers.put(answer)

    def refuse(self, reason: str) -> NoReturn:
        """End `main()`, and report that it cannot run natively, even if it catches the exception."""
        self._refusal = _Refused(reason if self._started is None else f"{reason} {TOO_LATE}")
        raise self._refusal


def _changeable(strategy: Strategy, *configs: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the plain values that Flower's loop rereads in each round, and that an app may change meanwhile."""
    values = {f"{type(strategy).__name__}.{name}": value for name, value in vars(strategy).items()}
    for what, config in zip(("train_config", "evaluate_config"), configs, strict=True):
        values |= {f"{what}[{name!r}]": value for name, value in (config or {}).items()}
    return {name: repr(v) for name, v in values.items() if v is None or isinstance(v, int | float | str | list)}


_of_thread = threading.local()
"""The host of the `main()` that runs on a thread."""


@cache
def _stand_in() -> None:
    """Replace `Strategy.start`: on a host's thread it calls the host, on other threads it stays Flower's."""
    original = Strategy.start

    @wraps(original)
    def start(strategy: Strategy, *args: Any, **named: Any) -> Result:
        host: ServerHost | None = getattr(_of_thread, "host", None)
        return original(strategy, *args, **named) if host is None else host.start(strategy, *args, **named)

    Strategy.start = start  # type: ignore[method-assign, assignment]


class _NoGrid(Grid):
    """A grid without nodes: a native run uses Atoll's coordinator."""

    def __init__(self, host: ServerHost) -> None:
        self._host = host

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._host.refuse("main() uses the grid itself")

    set_run = create_message = get_node_ids = push_messages = pull_messages = send_and_receive = _refuse
    run = property(_refuse)
