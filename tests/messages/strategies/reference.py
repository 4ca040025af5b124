"""Flower's own loop in this process: messages are copied, each goes to the app at once, replies have their order."""

import copy
import threading
import time

from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from atoll.task.randomness import seeded

FAILED, AWAY = 2, 5


class Loop(Grid):
    """A grid whose nodes are calls of a ClientApp, with a context for each, without our wire and records.

    Args:
        client_app: of all nodes.
        nodes: the id of each node by its partition.
        run_config: of the run.
    """

    def __init__(self, client_app, nodes, run_config):
        self._app, self._run, self._lock = client_app, Run.create_empty(1), threading.Lock()
        self._contexts = {
            node: Context(1, node, {"partition-id": place, "num-partitions": len(nodes)}, RecordDict(), run_config)
            for place, node in enumerate(nodes)
        }
        self._num_sent, self._replies = 0, {}

    def set_run(self, run):
        self._run = run

    @property
    def run(self):
        return self._run

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self):
        return list(self._contexts)

    def push_messages(self, messages):
        sent = list(messages)
        for message in sent:
            with self._lock:
                self._num_sent += 1
                message.metadata.__dict__["_message_id"] = str(self._num_sent)
        with self._lock:
            self._replies |= {message.metadata.message_id: self._reply(message) for message in sent}
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids):
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message):
        of = message.metadata
        node = of.dst_node_id
        told = Metadata(1, f"to {of.message_id}", node, 1, of.message_id, of.group_id, time.time(), of.ttl,
                        of.message_type)  # fmt: skip
        context = self._contexts.get(node)
        if context is None:
            return Message(metadata=told, error=Error(AWAY, "no such node"))
        try:
            with seeded(0):  # the generators of main() are another process's
                reply = self._app(copy.deepcopy(message), context)
        except Exception as error:
            return Message(metadata=told, error=Error(FAILED, repr(error)))
        if reply.has_error():
            return Message(metadata=told, error=reply.error)
        return Message(metadata=told, content=copy.deepcopy(reply.content))


def run(server_app, client_app, nodes, run_config):
    """Run the main() of a ServerApp on the loop."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    server_app(Loop(client_app, nodes, run_config), Context(1, 1, {}, RecordDict(), run_config))
