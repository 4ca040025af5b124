"""The client of each case: what a node adds follows from its place and the round, so that nothing else changes a value.

A query tells a node the case; it is in the state of its context, and chooses the app that answers what comes next.
"""

import zlib

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client import ClientApp as LegacyApp
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod


def place_of(context):
    return context.node_config["partition-id"]


def moved(values, place, number):
    """Values after a training: another step for each place, round and element."""
    values = np.asarray(values)
    elements = np.arange(values.size, dtype=np.float64).reshape(values.shape)
    step = 0.1 * np.sin(elements + 3 * place + number) * (5 if place == 6 else 1)
    return np.asarray(values + step, values.dtype)


def train(message, context):
    place, config = place_of(context), message.content["config"]
    number = config["server-round"] - config.get("proximal-mu", 0.0)
    arrays = {key: Array(moved(array.numpy(), place, number)) for key, array in message.content["arrays"].items()}
    metrics = {"num-examples": 10 + 3 * place, "train_loss": 1.0 / (1 + place), "by_class": [float(place), 1.0]}
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}), reply_to=message)


def evaluate(message, context):
    norm = float(sum(np.abs(array.numpy().astype(float)).sum() for array in message.content["arrays"].values()))
    metrics = {"num-examples": 1 + place_of(context), "loss": norm}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def app_with(*mods):
    """A client of the form of today, with mods around its training."""
    made = ClientApp()
    made.train(mods=list(mods))(train)
    made.evaluate()(evaluate)
    made.query("place")(tell_place)
    return made


def tell_place(message, context):
    told = {"place": place_of(context), "asked": message.content["question"]["for"], "data": bytes([place_of(context)])}
    return Message(RecordDict({"told": ConfigRecord(told)}), reply_to=message)


class Client(NumPyClient):
    """A client of the form before Flower 1.21."""

    def __init__(self, place):
        self.place = place

    def get_parameters(self, config):
        return [np.zeros(3), np.ones((2, 2), np.float32)]

    def fit(self, parameters, config):
        number = config.get("round", 1)
        return [moved(values, self.place, number) for values in parameters], 10 + 3 * self.place, {"place": self.place}

    def evaluate(self, parameters, config):
        return float(sum(np.abs(values).sum() for values in parameters)), 1 + self.place, {"first": 1.0}


def numpy_app(*mods):
    return LegacyApp(client_fn=lambda context: Client(place_of(context)).to_client(), mods=list(mods))


def boosted(message, context):
    """One more tree on the node's own rows, on top of the trees of before."""
    import xgboost

    place, before = place_of(context), message.content["arrays"]["0"].numpy().tobytes()
    rng = np.random.default_rng(place)
    inputs = rng.normal(size=(60, 4))
    rows = xgboost.DMatrix(inputs, label=(inputs[:, 0] + 0.1 * place > 0).astype(int))
    terms = {"objective": "binary:logistic", "max_depth": 2, "nthread": 1, "seed": 0}
    if before:
        booster = xgboost.Booster(terms)
        booster.load_model(bytearray(before))
        begun = booster.num_boosted_rounds()
        booster.update(rows, begun)
    else:
        booster, begun = xgboost.train(terms, rows, num_boost_round=1), 0
    sent = booster[begun:] if message.content["config"]["kind"] == "bagging" else booster
    trees = np.frombuffer(sent.save_raw("json"), np.uint8)
    metrics = MetricRecord({"num-examples": len(inputs), "trees": booster.num_boosted_rounds()})
    return Message(RecordDict({"arrays": ArrayRecord([trees]), "metrics": metrics}), reply_to=message)


def boosting_app():
    made = ClientApp()
    made.train()(boosted)
    made.evaluate()(tell_bytes)
    return made


def tell_bytes(message, context):
    metrics = {"num-examples": 1 + place_of(context), "bytes": len(message.content["arrays"]["0"].numpy())}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


APPS = {
    "plain": app_with(arrays_size_mod),
    "fixed": app_with(fixedclipping_mod),
    "adaptive": app_with(adaptiveclipping_mod),
    "local": app_with(LocalDpMod(clipping_norm=0.5, sensitivity=0.1, epsilon=2.0, delta=1e-5)),
    "legacy": numpy_app(),
    "secagg": numpy_app(secaggplus_mod),
    "boosted": boosting_app(),
}


def of_the_case(message, context):
    """Let the app of the case answer, with generators whose seed follows from the message."""
    seed = f"{place_of(context)} {message.metadata.message_type} {message.metadata.group_id}"
    np.random.seed(zlib.crc32(seed.encode()))
    return APPS[context.state["case"]["app"]](message, context)


app = ClientApp()
app.train()(of_the_case)
app.evaluate()(of_the_case)
app.query("place")(of_the_case)


@app.query("case")
def begin(message, context):
    """Begin a case without what the last one left."""
    context.state.clear()
    context.state["case"] = message.content["case"]
    return Message(RecordDict({"told": ConfigRecord({"app": message.content["case"]["app"]})}), reply_to=message)
