"""ServerApps that do something of their own around one `strategy.start`: some of them need Flower's own loop."""

import functools
import os
import signal
import sys
from contextlib import suppress

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, Result

client, only_trains = ClientApp(), ClientApp()
results = []


def started(grid, strategy=None, **named):
    first = ArrayRecord({"w": Array(np.array([1.0, 2.0], np.float32))})
    results.append((strategy or FedAvg()).start(grid, first, num_rounds=3, **named))


def server_app(main):
    app = ServerApp()
    app.main()(main)
    return app


@server_app
def plain(grid, context):
    def saved(grid):
        return grid

    if context.run_config["rounds"] < 0:
        started(grid)
    elif saved(1):
        rate = ConfigRecord({"lr": 0.5})
        started(
            grid,
            train_config=rate,
            evaluate_fn=lambda number, arrays: MetricRecord({"r": number} if number < 9 else after),
        )
        after = {"number": len(results)}


@server_app
def asks_first(grid, context):
    nodes = 0
    with suppress(Exception):
        nodes = len(list(grid.get_node_ids()))
    started(grid, train_config=ConfigRecord({"lr": 0.1 * nodes}))


@server_app
def asks_first_and_goes_on(grid, context):
    nodes = 0
    with suppress(BaseException):
        nodes = len(list(grid.get_node_ids()))
    started(grid, train_config=ConfigRecord({"lr": 0.1 * nodes}))


@server_app
def asks_after(grid, context):
    started(grid)
    sent = [Message(RecordDict({"arrays": results[-1].arrays}), node, "evaluate") for node in grid.get_node_ids()]
    assert all(reply.has_content() for reply in grid.send_and_receive(sent))


@server_app
def two_folds(grid, context):
    for momentum in (0.5, 0.1):
        started(grid, train_config=ConfigRecord({"lr": momentum}))


@server_app
def a_method_of_its_own(grid, context):
    strategy = FedAvg()
    original = strategy.configure_train

    def configure(server_round, arrays, config, nodes):
        config["lr"] = 1.0 / server_round
        return original(server_round, arrays, config, nodes)

    strategy.configure_train = configure
    started(grid, strategy)


@server_app
def a_class_that_is_changed(grid, context):
    original = FedAvg.aggregate_evaluate
    FedAvg.aggregate_evaluate = lambda strategy, number, replies: MetricRecord({"heard": len(list(replies))})
    try:
        started(grid)
    finally:
        FedAvg.aggregate_evaluate = original


@server_app
def a_rate_that_falls(grid, context):
    config = ConfigRecord({"lr": 0.5})

    def evaluate_fn(server_round, arrays):
        config["lr"] *= 0.5
        return MetricRecord({"lr": config["lr"]})

    started(grid, train_config=config, evaluate_fn=evaluate_fn)


class Fewer:
    """Measures, and lets no node evaluate from then on."""

    def __init__(self, strategy):
        self.strategy = strategy

    def __call__(self, server_round, arrays):
        self.strategy.fraction_evaluate = 0.0


@server_app
def an_object_that_measures(grid, context):
    strategy = FedAvg()
    started(grid, strategy, evaluate_fn=Fewer(strategy))


@server_app
def a_method_that_measures(grid, context):
    strategy = FedAvg()
    started(grid, strategy, evaluate_fn=Fewer(strategy).__call__)


@server_app
def asks_between(grid, context):
    def evaluate_fn(nodes, server_round, arrays):
        return MetricRecord({"nodes": len(list(nodes.get_node_ids()))})

    started(grid, evaluate_fn=functools.partial(evaluate_fn, grid))


class Best:
    def __init__(self):
        self.loss = 9.0

    def measure(self, server_round, arrays):
        self.loss = min(self.loss, server_round)


@server_app
def keeps_the_best(grid, context):
    started(grid, evaluate_fn=Best().measure)


@server_app
def counts_its_calls(grid, context):
    calls = 0

    def measure(server_round, arrays):
        nonlocal calls
        calls += 1

    started(grid, evaluate_fn=measure)


@server_app
def keeps_a_table(grid, context):
    best = {"loss": 9.0}

    def measure(server_round, arrays):
        best["loss"] = min(best["loss"], server_round)

    started(grid, evaluate_fn=measure)


HISTORY = []


def noted(server_round, arrays):
    lines = {}
    lines["round"] = server_round
    HISTORY.append(lines)


@server_app
def keeps_a_list(grid, context):
    started(grid, evaluate_fn=noted)


@server_app
def goes_elsewhere(grid, context):
    os.mkdir("outputs")
    os.chdir("outputs")
    started(grid, evaluate_fn=lambda number, arrays: os.mkdir(f"version-{number}"))
    os.mkdir("end")


@server_app
def measures_every_second(grid, context):
    started(grid, evaluate_fn=lambda number, arrays: None if number % 2 else MetricRecord({"r": number}))


@server_app
def no_timeout(grid, context):
    started(grid, timeout=None)


SHARED = ConfigRecord({"lr": 0.5})


class Schedule:
    """Changes a config that it keeps."""

    def __init__(self, config):
        self.configs = {"train": config}

    def step(self):
        self.configs["train"]["lr"] *= 0.5


def after(server_round, schedule):
    schedule.step()


@server_app
def a_rate_that_an_object_lets_fall(grid, context):
    SHARED["lr"] = 0.5
    schedule = Schedule(SHARED)
    started(grid, train_config=SHARED, evaluate_fn=lambda number, arrays: after(number, schedule))


def decay():
    SHARED["lr"] *= 0.5


def decays(server_round, arrays):
    [decay() for _ in range(server_round > 0)]


@server_app
def a_rate_of_the_module_that_falls(grid, context):
    SHARED["lr"] = 0.5
    started(grid, train_config=SHARED, evaluate_fn=decays)


class NoProgress(Exception):
    """The end of a training that does not get better."""


class Patience:
    def __init__(self):
        self.arrays = {}

    def measure(self, server_round, arrays):
        self.arrays[server_round] = arrays
        self.stop_after(server_round)

    def stop_after(self, server_round):
        if server_round == 2:
            raise NoProgress


@server_app
def a_stop_by_an_exception(grid, context):
    patience = Patience()
    try:
        started(grid, evaluate_fn=patience.measure)
    except NoProgress:
        results.append(Result(arrays=patience.arrays[2]))


@server_app
def a_stop_that_is_suppressed(grid, context):
    patience = Patience()
    with suppress(NoProgress):
        started(grid, evaluate_fn=patience.measure)
    results.append(Result(arrays=patience.arrays[2]))


@server_app
def an_exit_as_a_stop(grid, context):
    patience = Patience()

    def measure(server_round, arrays):
        patience.arrays[server_round] = arrays
        if server_round == 2:
            results.append(Result(arrays=arrays))
            sys.exit()

    with suppress(SystemExit):
        started(grid, evaluate_fn=measure)


@server_app
def a_signal_handler(grid, context):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    started(grid)
    signal.signal(signal.SIGUSR1, before)


class Trainer:
    """Has the grid, and methods that measure for themselves."""

    def __init__(self, grid, context):
        self.nodes, self.context, self.strategy = grid, context, FedAvg()

    def fit(self, **named):
        if self.context.run_config["rounds"] > 9:
            raise ValueError("too many")
        started(self.nodes, self.strategy, **named)

    def measure(self, server_round, arrays):
        return MetricRecord({"r": self.round_of(server_round)})

    def round_of(self, server_round):
        return server_round * self.context.run_config["rounds"]

    def fit_twice(self):
        self.fit()
        self.fit()


class TrainerOnce(Trainer):
    """Fits once."""


@server_app
def two_by_a_method(grid, context):
    Trainer(grid, context).fit_twice()


def once(grid, context, trainer):
    made = trainer(grid, context)
    try:
        made.fit(evaluate_fn=made.measure)
    except ValueError:
        raise SystemExit(3) from None


@server_app
def one_elsewhere(grid, context):
    if context.run_config["rounds"] < 0:
        once(grid, context, None)
        return
    once(grid, context, TrainerOnce)


@server_app
def one_by_a_function_of_its_own(grid, context):
    def run(**named):
        started(grid, **named)

    match context.run_config["rounds"]:
        case 2:
            run(train_config=ConfigRecord({"lr": 0.25}))
        case _:
            run()


@server_app
def two_by_a_function_of_its_own(grid, context):
    def run(**named):
        started(grid, **named)

    run()
    run(train_config=ConfigRecord({"lr": 0.25}))


@server_app
def ends_in_order(grid, context):
    started(grid)
    sys.exit(0)


@server_app
def ends_the_process(grid, context):
    raise SystemExit("no data today")


def both(grid):
    nodes = grid
    started(nodes)
    with suppress(Exception):
        started(nodes)


@server_app
def two_elsewhere(grid, context):
    both(grid)


def a_second(grid):
    started(grid)
    started(grid)


@server_app
def two_by_a_function(grid, context):
    a_second(grid=grid)


@server_app
def asks_elsewhere(grid, context):
    context.nodes = grid
    with suppress(BaseException):
        started(grid)
        context.nodes.get_node_ids()


@only_trains.train()
@client.train()
def train(message, context):
    rate = message.content["config"].get("lr", 1.0)
    step = np.float32(rate * (1 + context.node_config["partition-id"]))
    arrays = {key: Array(array.numpy() + step) for key, array in message.content["arrays"].items()}
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics()}), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    return Message(RecordDict({"metrics": metrics()}), reply_to=message)


def metrics():
    return MetricRecord({"num-examples": 1, "loss": 0.5})
