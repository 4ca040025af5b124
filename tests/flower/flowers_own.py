"""Flower's own strategies on the replies of the same ClientApp, in this process: the values to agree with."""

import time

from flwr.app import Context, Message, Metadata, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from atoll.flower.client_host import ClientHost, Envelope
from atoll.flower.records import from_content, to_content


class GridHere(Grid):
    """A grid whose nodes are calls of the app, each with a context of its own."""

    def __init__(self, app, nodes, run_config):
        self._run_config, self._states = run_config, [RecordDict() for _ in range(nodes)]
        self._hosts = [ClientHost(app, f"node-{n}", {"partition-id": n, "num-partitions": nodes}) for n in range(nodes)]

    def get_node_ids(self):
        return range(1, len(self._hosts) + 1)

    def send_and_receive(self, messages, *, timeout=None):
        return [self._reply(message) for message in sorted(messages, key=lambda m: m.metadata.dst_node_id)]

    def _reply(self, message):
        asked = message.metadata
        place = asked.dst_node_id - 1
        content = self._hosts[place].call(
            Envelope(asked.message_type),
            from_content(to_content(message.content)),
            state=self._states[place],
            run_config=self._run_config,
        )
        told = Metadata(1, "", asked.dst_node_id, 1, "", "", time.time(), asked.ttl, asked.message_type)
        return Message(metadata=told, content=content)

    set_run = create_message = push_messages = pull_messages = run = None


def result_of(app, nodes, **given):
    """The result of the app's main() with Flower's own loop."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    config = app.run_config(given)
    app.load(app.serverapp)(GridHere(app, nodes, config), Context(1, 1, {}, RecordDict(), config))
