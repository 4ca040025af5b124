"""The client: logistic regression by scikit-learn on a part of the digits, counted calls, and a query of its labels."""

import time
import warnings

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

TIMED = "seconds"


def timed(message, context, call_next):
    """Add the seconds of a call to the state of the client."""
    begun = time.perf_counter()
    reply = call_next(message, context)
    before = context.state[TIMED]["sum"] if TIMED in context.state else 0.0
    context.state[TIMED] = MetricRecord({"sum": before + time.perf_counter() - begun})
    return reply


app = ClientApp(mods=[timed])


@app.lifespan()
def lifespan(context):
    """Keep scikit-learn from telling that a few steps are no convergence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


@app.train()
def train(message, context):
    """Go a few steps from the weights of the server."""
    images, labels = _partition(context)
    model = LogisticRegression(C=1 / context.run_config["penalty"] / len(images), max_iter=5, warm_start=True)
    model.classes_ = np.arange(10)
    model.coef_, model.intercept_ = (array.numpy() for array in message.content["arrays"].values())
    model.fit(images, labels)
    calls = context.state["calls"]["n"] + 1 if "calls" in context.state else 1
    context.state["calls"] = MetricRecord({"n": calls})
    arrays = ArrayRecord({"coef": Array(model.coef_), "intercept": Array(model.intercept_)})
    metrics = MetricRecord({"num-examples": len(images), "calls": calls})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    """Measure the weights of the server."""
    images, labels = _partition(context)
    weights, bias = (array.numpy() for array in message.content["arrays"].values())
    hits = int(np.sum((images @ weights.T + bias).argmax(1) == labels))
    return Message(RecordDict({"metrics": MetricRecord({"hits": hits, "of": len(images)})}), reply_to=message)


@app.query("labels")
def labels(message, context):
    """Tell how many images of each digit the client has."""
    counts = np.bincount(_partition(context)[1], minlength=10).tolist()
    told = ConfigRecord({"asked": message.content["question"]["text"]})
    return Message(RecordDict({"counts": MetricRecord({"of_digit": counts}), "told": told}), reply_to=message)


def _partition(context):
    images, labels = load_digits(return_X_y=True)
    part = slice(context.node_config["partition-id"], None, context.node_config["num-partitions"])
    return images[part] / 16, labels[part]
