"""The spans of an agent's own work: sent only where the environment of its process names a receiver of OTLP."""

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.telemetry.agent_spans import AgentSpans

logger = logging.getLogger(__name__)

RECEIVER = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def sender_of(site: str) -> "AbstractContextManager[AgentSpans | None]":
    """Return the sender of a site's spans, by OpenTelemetry's variables; without them nothing is imported.

    A machine may set them for other programs, so nothing about them ends the agent.
    """
    named = [name for name in RECEIVER if os.environ.get(name)]
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not named or is_off or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return nullcontext()
    try:
        from atoll.telemetry.agent_spans import AgentSpans

        return AgentSpans(site, os.environ)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        why = "opentelemetry-exporter-otlp-proto-http is not installed: pip install 'atoll[telemetry]', or unset it"
    except ValueError as error:  # of another variable
        why = f"OpenTelemetry does not accept its variables: {error}"
    logger.warning("%s is set, but no spans are sent: %s", named[0], why)
    return nullcontext()
