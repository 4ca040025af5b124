"""The agreement of a sum's terms with the invitation that brings them, and with the model that is trained. Pure."""

from atoll.client.session.events import Invitation
from atoll.protocol.secure.terms import Terms, ranges_digest


def fault_of_terms(invitation: Invitation, terms: Terms) -> str:
    """Return why terms are not those of an invitation; empty: they are.

    Peers check that their terms are the same as this site's, and this site that its terms are what it works on: so no
    member adds the update of another model, task or encoding.
    """
    for name, here, there in (
        ("run", invitation.run_id, terms.run),
        ("round", invitation.round_id, terms.round),
        ("purpose", "update", terms.purpose),
        ("base", invitation.base_version, terms.base),
        ("model", invitation.model_digest, terms.model),
        ("task", invitation.task, terms.task),
        ("algorithm", invitation.algorithm, terms.algorithm),
        ("local", invitation.local, terms.local),
        ("ranges", ranges_digest(invitation.ranges), terms.ranges),
    ):
        if here != there:
            return f"terms.{name} is {there!r:.200}; the invitation says {here!r:.200}"
    if invitation.codec:
        return f"the codec {invitation.codec!r} in a secure sum; allowed: none"
    return ""
