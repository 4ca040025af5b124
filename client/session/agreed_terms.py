"""The agreement of a sum's terms with the request that brings them, and with the model that it is about. Pure."""

from atoll.client.session.events import Invitation, ModelRequest
from atoll.protocol.secure.terms import Terms, ranges_digest


def fault_of_terms(request: ModelRequest, terms: Terms) -> str:
    """Return why terms are not those of a request; empty: they are.

    Peers check that their terms are the same as this site's, and this site that its terms are what it works on: so no
    member adds the update of another model, task or encoding, or the metrics of another version.
    """
    what = "invitation" if isinstance(request, Invitation) else "request"
    for name, here, there in (
        ("run", request.run_id, terms.run),
        *_of_work(request, terms),
        ("model", request.model_digest, terms.model),
        ("task", request.task, terms.task),
        ("local", request.local, terms.local),
    ):
        if here != there:
            return f"terms.{name} is {there!r:.200}; the {what} says {here!r:.200}"
    if isinstance(request, Invitation) and request.codec:
        return f"the codec {request.codec!r} in a secure sum; allowed: none"
    return ""


def _of_work(request: ModelRequest, terms: Terms) -> tuple[tuple[str, object, object], ...]:
    """Return the terms that depend on the work: name, the request's value, the terms' value."""
    if isinstance(request, Invitation):
        return (
            ("round", request.round_id, terms.round),
            ("purpose", "update", terms.purpose),
            ("base", request.base_version, terms.base),
            ("algorithm", request.algorithm, terms.algorithm),
            ("ranges", ranges_digest(request.ranges), terms.ranges),
        )
    return (
        ("round", request.version, terms.round),
        ("purpose", "evaluation", terms.purpose),
        ("base", request.version, terms.base),
        ("algorithm", "", terms.algorithm),
        ("ranges", ranges_digest(()), terms.ranges),
        ("bits", 64, terms.bits),
        ("receivers", (), terms.receivers),
    )
