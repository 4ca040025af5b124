"""The host of a ClientApp: the state that an app leaves, and what is told of a mistake in it or in the settings."""

import sys

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it once it is in constraints.txt")

from flwr.app import MetricRecord, RecordDict

from atoll.flower.app import FlowerApp
from atoll.flower.client_host import ClientHost, Envelope
from atoll.task.errors import TaskBroken

SOURCE = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()

@app.query("replaces")
def replaces(message, context):
    seen = context.state["calls"]["n"] if "calls" in context.state else 0
    context.state = RecordDict({"calls": MetricRecord({"n": seen + 1})})
    return Message(RecordDict(), reply_to=message)

@app.query("loses")
def loses(message, context):
    context.state = None
    return Message(RecordDict(), reply_to=message)

@app.query("reads")
def reads(message, context):
    return Message(RecordDict({"of": MetricRecord({"id": context.node_config["partition-id"]})}), reply_to=message)
"""


@pytest.fixture
def host(tmp_path):
    (tmp_path / "hosted_client.py").write_text(SOURCE)

    def made(attribute="app", node_config=()):
        app = FlowerApp(tmp_path, "tests", "hosted", "1.0.0", "", f"hosted_client:{attribute}", {})
        return ClientHost(app, "north", dict(node_config))

    yield made
    sys.path.remove(str(tmp_path))
    del sys.modules["hosted_client"]


def asked(host, action, state):
    return host.call(Envelope(f"query.{action}"), RecordDict(), state=state, run_config={})


def test_a_state_that_the_app_replaces_is_the_state(host):
    client, state = host(), RecordDict({"old": MetricRecord({"x": 1})})
    for number in (1, 2):
        asked(client, "replaces", state)
        assert {name: dict(record) for name, record in state.items()} == {"calls": {"n": number}}
    with pytest.raises(TaskBroken, match=r"context\.state must be a RecordDict after query\.loses, got NoneType"):
        asked(client, "loses", state)


def test_a_setting_that_a_site_lacks_is_told_with_the_way_out(host):
    assert dict(asked(host(node_config={"partition-id": 3}), "reads", RecordDict())["of"]) == {"id": 3}
    with pytest.raises(KeyError, match=r"its agent takes --set task\.partition-id=VALUE"):
        asked(host(), "reads", RecordDict())


def test_a_reference_to_another_object_is_no_client_app(host):
    with pytest.raises(TaskBroken, match=r"hosted_client:reads is a function: .*clientapp must name a ClientApp"):
        host("reads")
