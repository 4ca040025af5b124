"""The host of a `ClientApp`: one call for each message, as in Flower's process, with modules that stay loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp

from atoll.flower.app import SERVER, UNNUMBERED, FlowerApp, node_id
from atoll.flower.secret_noise import NoisyContext, flower_noise
from atoll.task.errors import TaskBroken
from atoll.task.noise import Noise

TTL_S = 1e12
"""The time to live of a message [s]: it never expires, as the round has a deadline."""


ANSWERED = "the ClientApp answered"
_ERROR = re.compile(rf"{ANSWERED} \S+ with error (\d+): ")


def code_of(failure: str) -> int | None:
    """Return the code of an error with which a ClientApp itself answered; None: it failed in another way."""
    return int(found[1]) if (found := _ERROR.search(failure)) else None


@dataclass(frozen=True, slots=True)
class Envelope:
    """The metadata of a message to a ClientApp."""

    kind: str
    """`train`, `evaluate` or `query`, with an action as in `query.stats`; or one of the legacy kinds."""
    group: str = ""
    """The group of the message: empty in Flower's strategies; before 1.21 the round."""
    number: int = 0
    """The number of the message in its run, or of the round, or of the version to evaluate."""
    run_id: int = UNNUMBERED
    created_at: float = 0.0
    """The instant at which it was first sent [s since the epoch]; 0: unknown."""


class NodeConfig(dict[str, Any]):
    """The settings of a site, as an app reads them; the error of a missing setting has the way out."""

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(f"{key}: this site has no such setting; its agent takes --set task.{key}=VALUE")


class ClientHost:
    """The ClientApp of an app at one site.

    Args:
        app: the app.
        site: the owner of the data.
        node_config: the site's settings, as `--node-config` of a SuperNode.

    Raises:
        TaskBroken: the app's reference to its ClientApp names another object.
        Exception: any error while it is loaded.
    """

    def __init__(self, app: FlowerApp, site: str, node_config: Mapping[str, Any]) -> None:
        self._site, self._node_config = site, dict(node_config)
        flower_noise().load()
        self._client_app = app.load(app.clientapp)
        if not isinstance(self._client_app, ClientApp):
            raise TaskBroken(
                f"{app.clientapp} is a {type(self._client_app).__name__}: "
                "tool.flwr.app.components.clientapp must name a ClientApp"
            )

    def call(
        self,
        envelope: Envelope,
        content: RecordDict,
        *,
        state: RecordDict,
        run_config: Mapping[str, Any],
        noise: Noise | None = None,
    ) -> RecordDict:
        """Return the content of the reply to a message.

        Args:
            envelope: its metadata.
            content: records that the app may change; no other call may have them.
            state: the state of the context, which is updated by the app.
            run_config: the run config.
            noise: the noise of this call; None: there is no secret.

        Raises:
            TaskBroken: the reply is an error, or no message.
            Exception: any error that the app raises.
        """
        node, kind, run_id = node_id(self._site), envelope.kind, envelope.run_id
        context = NoisyContext(run_id, node, NodeConfig(self._node_config), state, dict(run_config))
        context.source = (noise or Noise()).generator
        metadata = Metadata(
            run_id=run_id,
            message_id=f"{self._site}-{kind}-{envelope.number}",
            src_node_id=SERVER,
            dst_node_id=node,
            reply_to_message_id="",
            group_id=envelope.group,
            created_at=envelope.created_at,
            ttl=TTL_S,
            message_type=kind,
        )
        reply = self._client_app(Message(metadata=metadata, content=content), context)  # type: ignore[call-overload]
        if not isinstance(reply, Message):
            raise TaskBroken(f"the ClientApp must return a Message for {kind}, got {type(reply).__name__}")
        if not isinstance(context.state, RecordDict):
            raise TaskBroken(f"context.state must be a RecordDict after {kind}, got {type(context.state).__name__}")
        if reply.has_error():
            raise TaskBroken(f"{ANSWERED} {kind} with error {reply.error.code}: {reply.error.reason}")
        if context.state is not state:
            state.clear()
            state.update(context.state)
        return reply.content


def config_record(config: Mapping[str, Any], server_round: int) -> ConfigRecord:
    """Return the config of a strategy's message: the run's config, and the round."""
    return ConfigRecord({**config, "server-round": server_round})
