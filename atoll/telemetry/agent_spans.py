"""The spans of a site's own work, which its agent sends to the receiver that its environment names.

They are parts of the coordinator's trace of the round: their ids follow from the run's number, as those of
`atoll export otlp` do, so none is on the wire. Each is sent when it ends: a killed agent loses those that are open. A
receiver that is away costs one warning, and spans beyond the queue.
"""

import logging
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from threading import Condition, Thread
from typing import Self
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from atoll.client.phases import Phase
from atoll.ground.backoff import delay
from atoll.ground.bounded_mapping import BoundedMapping
from atoll.ground.printable import count_of
from atoll.protocol.trace_ids import INVITATION, span_id, trace_id
from atoll.telemetry.instruments import RUN
from atoll.telemetry.otlp import SPANS_MAX, TIMEOUT_S, about, readable
from atoll.telemetry.spans import Span

logger = logging.getLogger(__name__)

QUEUE_MAX = 2000
"""Largest number of spans that wait; the oldest ones are dropped."""

AGAIN_S, AGAIN_MAX_S = 2.0, 60.0
"""Shortest and longest wait before another attempt at a receiver that is away [s]."""

LAST_S = 2.0
"""Longest wait for the last request, when the agent ends [s]."""

ROUNDS_MAX = 1000
"""Number of rounds whose attempts are counted."""


class _Reason(logging.Filter):
    """Filter that keeps OpenTelemetry's newest line out of the log, as the reason of one line of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the message; drop the record."""
        self.text = record.getMessage()
        return False


class AgentSpans:
    """Sender of one agent's spans, on a thread of its own with a bounded queue.

    Args:
        site: the name of the site.
        environment: the environment variables, of which OpenTelemetry's name the receiver.
    """

    def __init__(self, site: str, environment: Mapping[str, str]) -> None:
        self._site, self._place = site, place_of(environment)
        self._resource, self._scope = about("atoll.agent", {"service.instance.id": site})
        self._exporter, self._reason = OTLPSpanExporter(timeout=TIMEOUT_S), _Reason()
        self._attempts: BoundedMapping[tuple[str, int], Counter[str]] = BoundedMapping(ROUNDS_MAX)
        self._queue: deque[Span] = deque(maxlen=QUEUE_MAX)
        self._changed, self._is_ending, self._num_dropped, self._is_away = Condition(), False, 0, False
        self._logger = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        self._logger.addFilter(self._reason)
        self._thread = Thread(target=self._run, name="spans by OTLP", daemon=True)
        self._thread.start()
        logger.info("the spans of this site's work are sent to %s", self._place)

    def note(self, phase: Phase) -> None:
        """Queue the span of a phase; returns at once."""
        attempts = self._attempts.setdefault((phase.run_id, phase.round_id), Counter())
        attempts[phase.name] += 1
        span = span_of(self._site, phase, attempts[phase.name])
        with self._changed:
            self._num_dropped += len(self._queue) == QUEUE_MAX
            self._queue.append(span)
            self._changed.notify()

    def close(self) -> None:
        """Send what waits, for `LAST_S` at most, and end."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(LAST_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        try:
            self._send()
        finally:
            self._logger.removeFilter(self._reason)

    def _send(self) -> None:
        num_failures = 0
        rng = random.Random(self._site)
        while batch := self._next(delay(num_failures, AGAIN_S, AGAIN_MAX_S, rng) if num_failures else 0.0):
            if self._takes(batch):
                num_failures = 0
                self._sent(batch)
            elif self._is_ending:
                return
            else:
                num_failures += 1

    def _next(self, wait: float) -> Sequence[Span]:
        """Return the oldest spans, at most `SPANS_MAX`, after a wait; none: the agent ends.

        Spans that end during a request are gathered by it, and are the next one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_ending)
            self._changed.wait_for(lambda: self._is_ending, wait)
            return [span for span, _ in zip(self._queue, range(SPANS_MAX), strict=False)]

    def _sent(self, batch: Sequence[Span]) -> None:
        """Take spans out of the queue that the receiver has, of which the oldest may have been dropped meanwhile."""
        with self._changed:
            taken = {span.id for span in batch}
            while self._queue and self._queue[0].id in taken:
                self._queue.popleft()

    def _takes(self, batch: Sequence[Span]) -> bool:
        """Send spans; the first failure of several, and their end, are a line of the log each."""
        try:
            found = self._exporter.export([readable(span, self._resource, self._scope) for span in batch])
            takes, why = found is SpanExportResult.SUCCESS, self._reason.text
        except Exception as error:  # a receiver ends no round
            takes, why = False, str(error) or type(error).__name__
        if not takes and not self._is_away:
            logger.warning("%s does not take this site's spans, and rounds continue without it: %s", self._place, why)
        if takes and self._is_away:
            lost = f"; {count_of(self._num_dropped, 'span')} were dropped" if self._num_dropped else ""
            logger.info("%s takes this site's spans again%s", self._place, lost)
            self._num_dropped = 0
        self._is_away = not takes
        return takes


def span_of(site: str, phase: Phase, attempt: int = 1) -> Span:
    """Return the span of a phase, a part of the site's invitation.

    Args:
        site: the site, by which the coordinator knows this client.
        phase: the phase.
        attempt: number of the phase in its round; the ids of later ones have it behind the name.
    """
    place, name = (phase.run_number, phase.run_id, phase.round_id), f"agent.{phase.name}"
    own = span_id(*place, name if attempt == 1 else f"{name}.{attempt}", site)
    facts: dict[str, str | int | float] = {RUN: phase.run_id, "atoll.round.number": phase.round_id}
    facts |= {"atoll.client.name": site, "atoll.attempt": attempt}
    parent, instants = span_id(*place, INVITATION, site), (phase.begun, max(phase.begun, phase.ended))
    return Span(name, trace_id(*place), own, parent, *instants, facts, phase.fault or None)


def place_of(environment: Mapping[str, str]) -> str:
    """Return the receiver as host:port: its address may have a password."""
    url = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return urlsplit(url).netloc.rpartition("@")[2] or "a receiver without a host"
