"""Flower's own aggregations get the replies that fit, code of the app's own gets all; stock Flower is the judge."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it once it is in constraints.txt")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as before_121
from flwr.serverapp import strategy as flower

from atoll.flower.hosted.fitting import only_fitting

NAN = float("nan")
USUAL = {"num-examples": 2, "loss": 0.5, "c": [1.0, 2.0]}


def reply(node, metrics=USUAL, *, shape=(2,), value=1.0, dtype=float, more=(), key="w"):
    arrays = ArrayRecord({key: Array(np.full(shape, value * node, dtype))})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics), **dict(more)})
    make = Message
    return make(metadata=Metadata(1, f"{node}", node, 1, "", "", 0.0, 9.0, "train"), content=content)


def train(replies, strategy=None):
    with only_fitting():
        return (strategy or flower.FedAvg()).aggregate_train(1, replies)


def numbers(aggregated):
    arrays, metrics = aggregated
    return {key: array.numpy().tolist() for key, array in arrays.items()}, dict(metrics)


ODD = {
    "another metric": reply(9, USUAL | {"extra": 1.0}),
    "a metric less": reply(9, {"num-examples": 2, "loss": 0.5}),
    "no weight": reply(9, {"loss": 0.5, "c": [1.0, 2.0]}),
    "another array": reply(9, key="v"),
    "another shape": reply(9, shape=(3,)),
    "a shape that would be broadcast": reply(9, shape=(1,)),
    "another kind of number": reply(9, dtype=complex),
    "an infinite array": reply(9, value=np.inf),
    "another length of a list": reply(9, USUAL | {"c": [1.0]}),
    "a list in place of a number": reply(9, USUAL | {"loss": [0.5]}),
    "a weight that is NaN": reply(9, USUAL | {"num-examples": NAN}),
    "two records of arrays": reply(9, more={"second": ArrayRecord({"w": Array(np.ones(2))})}.items()),
    "two records of metrics": reply(9, more={"second": MetricRecord({"x": 1})}.items()),
    "an array of another kind": reply(
        9, more={"arrays": ArrayRecord({"w": Array(dtype="x", shape=(2,), stype="own", data=b"1")})}.items()
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_a_reply_that_does_not_fit_is_an_error_of_its_node_alone(what):
    fitting = [reply(1), reply(2)]
    expected = numbers(flower.FedAvg().aggregate_train(1, fitting))
    assert numbers(train([ODD[what], *fitting])) == expected, "wherever it is"
    assert numbers(train([*fitting, ODD[what]])) == expected


FIT = {
    "another config": reply(3, more={"why": ConfigRecord({"x": 1})}.items()),
    "another dtype": reply(3, dtype=np.float32),
    "a metric that is NaN": reply(3, USUAL | {"loss": NAN}),
    "NaN in a list": reply(3, USUAL | {"c": [1.0, NAN]}),
}


@pytest.mark.parametrize("what", FIT)
def test_what_flower_adds_up_is_no_fault(what):
    replies = [reply(1), reply(2), FIT[what]]
    assert repr(numbers(train(replies))) == repr(numbers(flower.FedAvg().aggregate_train(1, replies)))


def test_it_holds_on_each_thread_of_main():
    with only_fitting(), ThreadPoolExecutor(1) as threads:
        found = threads.submit(flower.FedAvg().aggregate_train, 1, [reply(1), reply(2), reply(9, value=NAN)]).result()
    assert numbers(found) == numbers(flower.FedAvg().aggregate_train(1, [reply(1), reply(2)]))


def test_where_no_majority_says_what_is_right_flower_decides():
    replies = [reply(1, USUAL | {"a": 1.0}), reply(2, USUAL | {"b": 1.0})]
    with pytest.raises(Exception, match="must have the same keys"):
        train(replies)


def test_evaluations_are_compared_by_their_metrics_alone():
    replies = [reply(1), reply(2, shape=(7,), value=NAN), reply(3, USUAL | {"x": 1.0})]
    with only_fitting():
        found = flower.FedAvg().aggregate_evaluate(1, replies)
    assert dict(found) == {"loss": 0.5, "c": [1.0, 2.0]}


def test_a_function_of_the_apps_own_gets_what_stock_flower_gives_it():
    def gather(contents, weight):
        lists = [value for content in contents for value in content["metrics"]["c"]]
        return MetricRecord({"c": lists})

    replies = [reply(1, USUAL | {"c": [NAN]}), reply(2, USUAL | {"c": [2.0, 3.0]}), reply(3, USUAL | {"c": []})]
    strategy = flower.FedAvg(train_metrics_aggr_fn=gather)
    found = [
        dict(aggregated[1])["c"] for aggregated in (train(replies, strategy), strategy.aggregate_train(1, replies))
    ]
    assert repr(found[0]) == repr(found[1]) == "[nan, 2.0, 3.0]"


def test_an_aggregation_of_the_apps_own_gets_all_replies_and_flowers_those_that_fit():
    class Own(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            seen.append([message.has_content() for message in replies])
            return super().aggregate_train(server_round, replies)

    seen = []
    found = train([reply(1), reply(2), reply(3, {"num-examples": 2, "loss": NAN})], Own())
    assert seen == [[True, True, True]]
    assert dict(found[1])["loss"] == 0.5


@pytest.mark.parametrize("strategy", [flower.FedAdam, flower.FedMedian, flower.FedTrimmedAvg, flower.Krum])
def test_it_holds_for_strategies_that_call_each_others_aggregation(strategy):
    def found(given):
        made = strategy()
        made.current_arrays = {"w": np.zeros(2)}
        return numbers(given(made, [reply(node) for node in (1, 2, 3)]))

    expected = found(lambda made, replies: made.aggregate_train(1, replies))
    assert found(lambda made, replies: train([*replies, reply(4, shape=(5,))], made)) == expected


def test_a_wrapper_of_differential_privacy_skips_the_round_as_for_any_error():
    made = flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 0.0, 100.0, 3)
    made.current_arrays = ArrayRecord({"w": Array(np.zeros(2))})
    assert train([*map(reply, (1, 2, 3)), reply(4, shape=(5,))], made) == (None, None)


def test_trees_of_any_length_fit():
    def trees():
        lengths = enumerate((3, 3, 4), start=1)
        return [reply(node, {"num-examples": 1}, shape=(length,), dtype=np.uint8) for node, length in lengths]

    found, _ = train(trees()[2:] + trees()[:2], flower.FedXgbCyclic())
    assert [array.shape for array in found.values()] == [(4,)], "the first reply's, which is not that of most"


class Proxy:
    cid = "7"


def fitted(*values):
    parameters = ndarrays_to_parameters([np.array(value) for value in values])
    return Proxy(), FitRes(Status(Code.OK, ""), parameters, 2, {})


@pytest.mark.parametrize("odd", [fitted([1.0, NAN]), fitted([1.0]), fitted([1.0, 2.0], [1.0])])
def test_results_of_before_fit_or_are_failures(odd):
    fitting = [fitted([1.0, 2.0]), fitted([3.0, 5.0])]
    expected, _ = before_121.FedAvg().aggregate_fit(1, fitting, [])
    with only_fitting():
        found, _ = before_121.FedAvg().aggregate_fit(1, [odd, *fitting], [])
        none, _ = before_121.FedAvg(accept_failures=False).aggregate_fit(1, [*fitting, odd], [])
    assert np.array_equal(parameters_to_ndarrays(found), parameters_to_ndarrays(expected))
    assert none is None


def test_outside_of_a_hosted_main_flowers_classes_are_as_they_were():
    with only_fitting():
        pass
    with pytest.raises(Exception, match="must have the same keys"):
        flower.FedAvg().aggregate_train(1, [reply(1), reply(2), ODD["another metric"]])
