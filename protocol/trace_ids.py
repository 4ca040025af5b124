"""The ids of the traces and spans of a round, which every process derives by itself: none is on the wire. Pure.

trace id   first 16 bytes of SHA-256("atoll", run number, run, round), separated by zero bytes
span id    first 8 bytes of SHA-256("atoll", run number, run, round, span, client)

The run number is a function of the coordinator's directory and the run, and is in each invitation. So a repeated export
makes the same spans, and a site's spans and log lines are in the coordinator's trace.
"""

import hashlib

ROUND, INVITATION = "round", "invitation"
"""Spans whose ids lines of the log have: of a round, and of a client's part in it."""


def trace_id(number: int, run_id: str, round_id: int) -> int:
    """Return the 128-bit id of the trace of a round."""
    return _id(16, number, run_id, round_id)


def span_id(number: int, run_id: str, round_id: int, span: str, client_id: str = "") -> int:
    """Return the 64-bit id of a span of a round.

    Args:
        number: the run number.
        run_id: the run.
        round_id: the round.
        span: name of the span, unique in the round and client.
        client_id: the client whose part it is; empty: of the whole round.
    """
    return _id(8, number, run_id, round_id, span, client_id)


def _id(num_bytes: int, *parts: object) -> int:
    text = "\0".join(map(str, ("atoll", *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:num_bytes], "big") or 1  # 0 is no id
