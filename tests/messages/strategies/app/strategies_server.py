"""All cases one after the other on one grid: each leaves its arrays and metrics in a file of its name."""

import math
import random
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server import ServerApp as LegacyApp
from flwr.server import strategy as legacy
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp, strategy

app = ServerApp()


def first_arrays():
    rng = np.random.default_rng(3)
    shapes = {"w": ((5, 4), np.float32), "b": ((4,), np.float64), "scale": ((), np.float32)}
    return {name: np.asarray(rng.normal(size=shape), dtype) for name, (shape, dtype) in shapes.items()}


def result_of(result):
    metrics = {"train": result.train_metrics_clientapp, "evaluate": result.evaluate_metrics_clientapp}
    flat = {
        f"{kind} {number} {name}": np.asarray(value)
        for kind, rounds in metrics.items()
        for number, values in rounds.items()
        for name, value in values.items()
    }
    return {name: array.numpy() for name, array in result.arrays.items()} | flat


def of_today(name, kind="plain", **options):
    """A case of a strategy of `flwr.serverapp`."""

    def run(grid, context):
        made = getattr(strategy, name)(**_all(context), **options)
        return started(made, grid, context)

    return kind, run


def _all(context):
    number = context.run_config["nodes"]
    return {"min_train_nodes": number, "min_evaluate_nodes": number, "min_available_nodes": number}


def started(made, grid, context, arrays=None, **train_config):
    arrays = arrays or {name: Array(array) for name, array in first_arrays().items()}
    result = made.start(
        grid=grid,
        initial_arrays=ArrayRecord(arrays),
        num_rounds=context.run_config["rounds"],
        train_config=ConfigRecord(train_config),
        timeout=600,
    )
    return result_of(result)


def private(name, kind="plain", **options):
    """A case of a wrapper for differential privacy around FedAvg."""

    def run(grid, context):
        inner = strategy.FedAvg(**_all(context))
        made = getattr(strategy, name)(
            inner, noise_multiplier=0.2, num_sampled_clients=context.run_config["nodes"], **options
        )
        return started(made, grid, context)

    return kind, run


def trees(name, kind):
    """A case of XGBoost: the first model has no trees."""

    def run(grid, context):
        number = context.run_config["nodes"]
        options = {"min_available_nodes": number} if kind == "cyclic" else _all(context)
        first = {"0": Array(np.frombuffer(b"", np.uint8))}
        return started(getattr(strategy, name)(**options), grid, context, first, kind=kind)

    return "boosted", run


def of_before(name, **options):
    """A case of a strategy of `flwr.server`, which sends from a thread for each client."""

    def run(grid, context):
        made = getattr(legacy, name)(**_legacy(context), **options)
        server = Server(client_manager=SimpleClientManager(), strategy=made)
        config = ServerConfig(num_rounds=context.run_config["rounds"])
        LegacyApp(server_fn=lambda _: ServerAppComponents(server=server, config=config))(grid, context)
        return _listed(parameters_to_ndarrays(server.parameters))

    return "legacy", run


def _legacy(context):
    number = context.run_config["nodes"]
    return {
        "min_fit_clients": number,
        "min_evaluate_clients": number,
        "min_available_clients": number,
        "on_fit_config_fn": lambda number: {"round": number},
        "initial_parameters": ndarrays_to_parameters([np.zeros(3), np.ones((2, 2), np.float32)]),
    }


def _listed(arrays):
    return {str(place): array for place, array in enumerate(arrays)}


def secure_aggregation(grid, context):
    """SecAgg+: the server sees sums of masked values alone."""
    number = context.run_config["nodes"]
    of_run = LegacyContext(
        context=context,
        config=ServerConfig(num_rounds=context.run_config["rounds"]),
        strategy=legacy.FedAvg(**_legacy(context)),
    )
    workflow = SecAggPlusWorkflow(num_shares=number, reconstruction_threshold=number - 1, clipping_range=4.0)
    DefaultWorkflow(fit_workflow=workflow)(grid, of_run)
    arrays = next(record for name, record in of_run.state.array_records.items() if "parameters" in name)
    return _listed([array.numpy() for array in arrays.values()])


def pushed(grid, context):
    """A loop of its own: pushes, pulls until all are in, weighs by the order of the pushes."""
    arrays = ArrayRecord({name: Array(array) for name, array in first_arrays().items()})
    for number in range(1, context.run_config["rounds"] + 1):
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": number})})
        sent = [Message(content, node, "train", group_id=str(number)) for node in sorted(grid.get_node_ids())]
        numbers, replies = list(grid.push_messages(sent)), {}
        while len(replies) < len(numbers):
            found = grid.pull_messages([one for one in numbers if one not in replies])
            replies |= {reply.metadata.reply_to_message_id: reply for reply in found}
            time.sleep(0.01)
        assert [message.metadata.message_id for message in sent] == numbers
        kept = [replies[one].content["arrays"] for one in numbers]
        means = {key: np.mean([one[key].numpy() for one in kept], axis=0) for key in arrays}
        arrays = ArrayRecord({key: Array(np.asarray(mean)) for key, mean in means.items()})
    return {name: array.numpy() for name, array in arrays.items()}


def asked(grid, context):
    """Queries with a content of their own, an action that no client knows, and a node that does not exist."""
    nodes = sorted(grid.get_node_ids())
    questions = [
        Message(RecordDict({"question": ConfigRecord({"for": f"node {place}"})}), node, "query.place")
        for place, node in enumerate(nodes)
    ]
    replies = {reply.metadata.reply_to_message_id: reply for reply in grid.send_and_receive(iter(questions))}
    told = [replies[question.metadata.message_id].content["told"] for question in questions]
    empty = RecordDict()
    wrong = [Message(empty, nodes[0], "query.nothing"), Message(empty, nodes[1], "train.other")]
    errors = list(grid.send_and_receive(wrong))
    return {
        "places": np.array([one["place"] for one in told]),
        "data": np.array([one["data"][0] for one in told]),
        "echo": np.array([one["asked"] == f"node {place}" for place, one in enumerate(told)]),
        "errors": np.array([reply.has_error() for reply in errors]),
        "codes": np.array([reply.error.code for reply in errors]),
    }


FIXED, ADAPTIVE = {"clipping_norm": 0.4}, {"initial_clipping_norm": 0.4, "clipped_count_stddev": 3.0}
CASES = {
    "FedAvg": of_today("FedAvg"),
    "FedAvgM": of_today("FedAvgM", server_learning_rate=0.8, server_momentum=0.5),
    "FedAdagrad": of_today("FedAdagrad", eta=0.05, tau=0.01),
    "FedAdam": of_today("FedAdam", eta=0.02, beta_1=0.8, beta_2=0.95),
    "FedYogi": of_today("FedYogi", eta=0.03),
    "FedProx": of_today("FedProx", proximal_mu=0.25),
    "FedMedian": of_today("FedMedian"),
    "FedTrimmedAvg": of_today("FedTrimmedAvg", beta=0.2),
    "Krum": of_today("Krum", num_malicious_nodes=1),
    "MultiKrum": of_today("MultiKrum", num_malicious_nodes=1, num_nodes_to_select=4),
    "Bulyan": of_today("Bulyan", num_malicious_nodes=1),
    "QFedAvg": of_today("QFedAvg", client_learning_rate=0.1, q=0.2),
    "FedXgbBagging": trees("FedXgbBagging", "bagging"),
    "FedXgbCyclic": trees("FedXgbCyclic", "cyclic"),
    "DifferentialPrivacyServerSideFixedClipping": private("DifferentialPrivacyServerSideFixedClipping", **FIXED),
    "DifferentialPrivacyServerSideAdaptiveClipping": private(
        "DifferentialPrivacyServerSideAdaptiveClipping", **ADAPTIVE
    ),
    "DifferentialPrivacyClientSideFixedClipping": private(
        "DifferentialPrivacyClientSideFixedClipping", "fixed", **FIXED
    ),
    "DifferentialPrivacyClientSideAdaptiveClipping": private(
        "DifferentialPrivacyClientSideAdaptiveClipping", "adaptive", **ADAPTIVE
    ),
    "FedAvg with LocalDpMod": of_today("FedAvg", "local"),
    "legacy FedAvg": of_before("FedAvg"),
    "legacy FedAdam": of_before("FedAdam", eta=0.02),
    "legacy FedMedian": of_before("FedMedian"),
    "SecAgg+ workflow": ("secagg", secure_aggregation),
    "push and pull": ("plain", pushed),
    "queries and errors": ("plain", asked),
}


@app.main()
def main(grid, context):
    config = context.run_config
    nodes = sorted(grid.get_node_ids())
    assert len(nodes) == config["nodes"], nodes
    for name in CASES if config["cases"] == "all" else config["cases"].split(","):
        kind, run = CASES[name]
        told = RecordDict({"case": ConfigRecord({"app": kind})})
        begun = list(grid.send_and_receive([Message(told, node, "query.case") for node in nodes]))
        assert not any(reply.has_error() for reply in begun), [reply.error for reply in begun]
        random.seed(5)
        np.random.seed(5)
        context.state = RecordDict()
        try:
            found = run(grid, context)
        except Exception as error:
            Path(f"{name}.failed").write_text(f"{type(error).__name__}: {error}")
            continue
        np.savez(f"{name}.npz", **found)
        norm = math.sqrt(sum(float(np.square(value.astype(float)).sum()) for value in found.values()))
        print(f"{name}: |values| = {norm:.6f}", flush=True)
