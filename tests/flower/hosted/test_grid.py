"""Flower's own strategies over the grid of a run of messages, with a real coordinator and real agents."""

import json
from pathlib import Path

import numpy as np
import pytest

from atoll.task.content import Content
from atoll.task.programs.link import LATE
from tests.federation.processes import federation

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it once it is in constraints.txt")

HERE = Path(__file__).parents[2] / "messages"
TASK, APP = f"{HERE / 'flower_client_task.py'}:task", f"{HERE / 'flower_server_app.py'}:app"


def run(folder, *sites, strategy="fedavg", kill_at=""):
    with federation(folder, task=TASK) as it:

        def start():
            of_all = {"round__min_available": len(sites)}  # a majority of the replies needs all of them
            it.coordinator(name="flower", program__main=APP, task__strategy=strategy, **of_all)

        start()
        for site in sites:
            it.agent(site)
        if kill_at:
            it.wait_for(lambda: kill_at in it.log("coordinator"))
            it.kill("coordinator")
            start()
        assert it.wait_for_end() == 0, it.log("coordinator")
        found = json.loads((it.state / "runs" / "flower-1" / "program" / "result.json").read_text())
        return found, it.log("coordinator")


def test_fedavg_averages_as_flower_does_and_survives_a_kill(tmp_path):
    found, _ = run(tmp_path, "east", "north", kill_at="exchange 3: ")
    mean = np.zeros((3, 2))
    for _ in range(3):
        mean = ((mean + 1.0) * 1 + (mean + 2.0) * 2) / 3
    np.testing.assert_allclose(found["w"], mean, rtol=1e-12)
    assert found["losses"][-1] == pytest.approx(float(np.abs(mean).sum()))


@pytest.mark.long
def test_a_node_whose_replies_do_not_fit_is_left_out_and_the_run_goes_on(tmp_path):
    found, _ = run(tmp_path, "east", "north", "odd", strategy="fedadam")
    assert np.isfinite(found["w"]).all()


def reply(number, metrics, shape=(2,), value=0.0, kind="train", dtype=float):
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    from atoll.flower.records import to_content
    from atoll.task.programs.grid import Reply

    arrays = ArrayRecord({"w": Array(np.full(shape, value, dtype))})
    records = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
    return Reply(number, f"node-{number}", kind, "1", to_content(records))


def test_replies_are_handed_over_as_they_are_whatever_the_others_have():
    """Stock Flower gives a loop of the app's own all of these."""
    from atoll.flower.hosted.replies import records_of
    from atoll.flower.records import from_content

    for kind in ("train", "evaluate", "query", "query.s"):
        replies = [
            reply(1, {"acc": 1.0}, shape=(4,), kind=kind),
            reply(2, {"auc": 1.0}, shape=(4,), kind=kind),
            reply(3, {"acc": float("nan")}, shape=(2,), value=np.inf, kind=kind),
        ]
        expected = [from_content(one.content) for one in replies]
        assert records_of(replies) == expected


def spoilt(number, spoil):
    """Return a reply whose array, as [bytes, row], a function has changed."""
    from dataclasses import replace

    good = reply(number, {"loss": 0.5})
    data, rows = good.content.arrays["0"].tobytes(), good.content.plain[0][2]
    data, good.content.plain[0][2] = spoil(data, rows)
    return replace(good, content=replace(good.content, arrays={"0": np.frombuffer(data, np.uint8)}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data, rows: (data[:-8], rows), "shape (2,) in 8 bytes"),
        (lambda data, rows: (data.replace(b"(2,)", b"(1,)"), rows), "shape (1,) that states shape (2,)"),
        (lambda data, rows: (data.replace(b"(2,), ", b"(-1,),"), rows), "shape (-1,)"),
        (lambda data, rows: (data.replace(b"(2,)", b"((2,"), rows), "cannot be read"),
        (lambda data, rows: (data[:4], rows), "cannot be read"),
        (lambda data, rows: (data, rows * 2), "a name occurs twice"),
        (lambda data, rows: (data, [*rows, ["w", "float64", "x", "numpy.ndarray", "0"]]), "a name occurs twice"),
    ],
)
def test_a_reply_with_an_array_that_is_not_sound_is_an_error_of_its_node(spoil, says):
    from atoll.flower.hosted.replies import records_of

    found = records_of([reply(1, {"loss": 0.5}), spoilt(2, spoil), reply(3, {"loss": 0.5})])
    assert says in found[1]
    assert not isinstance(found[0], str)
    assert not isinstance(found[2], str)


def test_a_legacy_client_without_parameters_is_sound():
    from flwr.common import Code, FitRes, Parameters, Status
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict, recorddict_to_fitres

    from atoll.flower.hosted.replies import records_of
    from atoll.flower.records import to_content
    from atoll.task.programs.grid import Reply

    answer = FitRes(Status(Code.OK, ""), Parameters([], "numpy.ndarray"), 3, {"loss": 0.5})
    content = to_content(fitres_to_recorddict(answer, keep_input=True))
    found = records_of([Reply(number, f"node-{number}", "train", "1", content) for number in (1, 2)])
    assert [recorddict_to_fitres(one, keep_input=True) for one in found] == [answer, answer]


def test_an_array_without_elements_is_sound():
    from atoll.flower.hosted.replies import records_of

    found = records_of([reply(n, {"loss": 0.5}, shape=shape) for n, shape in enumerate([(0,), (0, 3), ()])])
    assert not any(isinstance(one, str) for one in found)


class Nowhere:
    """A grid whose nodes answer nothing in time, but to the second message of each call."""

    run_number = 1

    def send(self, messages, timeout=None):
        from atoll.task.programs.grid import Reply

        return [Reply(7, each.node, each.kind, "", Content([], {}), "", place) for place, each in enumerate(messages)][
            1:2
        ]

    def push(self, messages):
        return [*range(1, len(messages) + 1)]

    def pull(self, numbers):
        from atoll.task.programs.grid import Reply

        return [Reply(number, "node 5", "train", "", None, LATE) for number in numbers]


@pytest.mark.parametrize(("timeout", "replied"), [(None, [True, False, True]), (9.0, [False, True]), (3.0, [False])])
def test_the_end_of_a_messages_own_time_is_an_error_and_that_of_the_timeout_is_none(timeout, replied):
    """As in stock Flower: code 3 for a time to live that is over."""
    from flwr.app import Message, RecordDict

    from atoll.flower.hosted.grid import FlowerGrid, _identify

    _identify(1)
    sent = [Message(RecordDict(), 5, "train", ttl=ttl) for ttl in (9.0, 9.0, 4.0)]
    replies = list(FlowerGrid(Nowhere()).send_and_receive(sent, timeout=timeout))
    assert [reply.has_error() for reply in replies] == replied
    assert {reply.error.code for reply in replies if reply.has_error()} <= {3}
    assert replies[-1].metadata.reply_to_message_id == sent[1 if timeout == 3.0 else 2].metadata.message_id


def test_a_pull_of_other_ids_than_those_that_were_pushed_has_no_replies():
    from flwr.app import Message, RecordDict

    from atoll.flower.hosted.grid import FlowerGrid, _identify

    _identify(1)
    grid = FlowerGrid(Nowhere())
    (number,) = grid.push_messages([Message(RecordDict(), 5, "train")])
    (late,) = grid.pull_messages([number, "99", "nonsense"])
    assert (late.error.code, late.metadata.reply_to_message_id) == (3, number)
    assert list(grid.pull_messages([number])) == [], "it was pulled before"
