"""The agreement of a sum's terms with the request that brings them, and with the model that it is about. Pure."""

from atoll.client.session.events import EvaluationRequest, Invitation, Request, StatisticsRequest
from atoll.protocol.secure.terms import Terms, data_digest, ranges_digest


def fault_of_terms(request: Request, terms: Terms) -> str:
    """Return why terms are not those of a request; empty: they are.

    Peers check that their terms are the same as this site's, and this site that its terms are what it works on: so no
    member adds the update of another model, task or encoding, the metrics of another version, or other statistics.
    """
    what = "invitation" if isinstance(request, Invitation) else "request"
    for name, here, there in (
        ("run", request.run_id, terms.run),
        *_of_work(request, terms),
        ("model", _model_of(request), terms.model),
        ("task", request.task, terms.task),
        ("local", request.local, terms.local),
    ):
        if here != there:
            return f"terms.{name} is {there!r:.200}; the {what} says {here!r:.200}"
    if isinstance(request, Invitation) and request.codec:
        return f"the codec {request.codec!r} in a secure sum; allowed: none"
    return ""


def _model_of(request: Request) -> str:
    """Return what the terms have as the digest of a model: of statistics, that of what stands for the data."""
    return data_digest(request.task) if isinstance(request, StatisticsRequest) else request.model_digest


def _of_work(request: Request, terms: Terms) -> tuple[tuple[str, object, object], ...]:
    """Return the terms that depend on the work: name, the request's value, the terms' value."""
    if isinstance(request, Invitation):
        return (
            ("round", request.round_id, terms.round),
            ("purpose", "update", terms.purpose),
            ("base", request.base_version, terms.base),
            ("algorithm", request.algorithm, terms.algorithm),
            ("ranges", ranges_digest(request.ranges), terms.ranges),
        )
    if isinstance(request, EvaluationRequest):
        return (
            ("round", request.version, terms.round),
            ("purpose", "evaluation", terms.purpose),
            ("base", request.version, terms.base),
            *_of_exact_words(terms),
        )
    return (*_of_statistics(request, terms), *_of_exact_words(terms))


def _of_statistics(request: StatisticsRequest, terms: Terms) -> tuple[tuple[str, object, object], ...]:
    question = request.question
    return (
        ("round", request.number, terms.round),
        ("purpose", "statistics", terms.purpose),
        ("base", 0, terms.base),
        ("layout", "" if question is None else question.digest, terms.layout),
        ("seed", request.model_seed, request.model_seed if question is None else question.seed),
        ("metrics", (), terms.metrics),
    )


def _of_exact_words(terms: Terms) -> tuple[tuple[str, object, object], ...]:
    """Return the terms of a sum without tensors."""
    return (
        ("algorithm", "", terms.algorithm),
        ("ranges", ranges_digest(()), terms.ranges),
        ("bits", 64, terms.bits),
        ("receivers", (), terms.receivers),
    )
