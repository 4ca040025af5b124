"""The decisions of the run machine in the referee's form, without details that the policy leaves open."""

from atoll.server.rounds import events as e
from tests.histories.referee.sampler_view import rounded

Decision = tuple[object, ...]


def decision_of(effect: e.Effect) -> Decision | None:
    """Return an effect in the referee's form; None: the referee does not judge it."""
    match effect:
        case e.Invite(client_id, round_id, base, deadline):
            return ("invite", client_id, round_id, base, round(deadline, 6))
        case e.Release(client_id, round_id, _, submit):
            return ("release", client_id, round_id, submit)
        case e.Accept(client_id, round_id, digest):
            return ("accept", client_id, round_id, digest)
        case e.Reject(client_id, round_id, digest, reason):
            return ("reject", client_id, round_id, digest, reason)
        case e.DrawCohort(round_id, count, candidates, number, relaxed):
            return ("draw", round_id, count, tuple(map(rounded, candidates)), number, relaxed)
        case e.Aggregate(round_id, base, contributions, "sync"):
            weights = tuple((c.client_id, c.digest, c.num_examples, round(c.scale, 9)) for c in contributions)
            return ("aggregate", round_id, base, weights)
        case e.Aggregate(round_id, base, contributions, mode):
            rows = ((c.client_id, c.digest, c.num_examples, round(c.scale, 9), c.base_version) for c in contributions)
            return ("aggregate", round_id, base, tuple(rows), mode)
        case e.Commit(round_id, version, _, used):
            return ("commit", round_id, version, used)
        case e.Abandon(round_id, reason):
            return ("abandon", round_id, reason)
        case _:
            return _progress(effect)


def _progress(effect: e.Effect) -> Decision | None:
    match effect:
        case e.EvaluateModel(version):
            return ("evaluate", version)
        case e.AskEvaluation(client_id, version, deadline):
            return ("ask", client_id, version, round(deadline, 6))
        case e.CloseEvaluation(version, answers, failures):
            return ("evaluated", version, tuple(sorted((*answers, *failures))))
        case e.ComputeMetrics(version, source):
            return ("compute", version, source)
        case e.OpenNextRound():
            return ("next round",)
        case e.PauseRun():
            return ("pause",)
        case e.ResumeRun():
            return ("resume",)
        case e.EndRun(state):
            return ("end", state)
        case _:
            return None  # an amended record is judged by the records on disk at the end
