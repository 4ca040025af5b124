"""The readings of an agent."""

from collections import Counter

from atoll.client.agent import Agent
from atoll.client.session.events import Event, Key
from atoll.ground.bounded_mapping import BoundedMapping
from atoll.telemetry import instruments
from atoll.telemetry.instruments import BY_NAME, DROPPED, RUNS_MAX, Buckets, Reading
from atoll.telemetry.process import certificate_end, free_bytes


class AgentReadings:
    """Readings of one agent; all methods run on its event loop.

    Args:
        agent: the agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._trainings: BoundedMapping[str, Buckets] = BoundedMapping(RUNS_MAX)
        agent.slot.listeners.append(self._worked)

    def _worked(self, key: Key, event: Event, seconds: float) -> None:
        kind, run_id, _ = key
        if kind != "round":
            return
        if run_id not in self._trainings:
            self._trainings[run_id] = Buckets(BY_NAME["atoll.agent.training.duration"].bounds)
        self._trainings[run_id].add(seconds)

    def read(self) -> Reading:
        """Return the values of now."""
        agent, session = self._agent, self._agent.session
        jobs = Counter(str(run_id) for run_id in session.waiting)
        if session.job is not None:
            jobs[str(session.job.request.key[1])] += 1
        newest = dict(list(jobs.items())[:RUNS_MAX])
        spooled = sum(agent.stores.spool[key].num_bytes for key in agent.stores.spool.entries())
        found: Reading = {
            "atoll.agent.connected": [({}, int(session.is_connected))],
            "atoll.agent.work": [({instruments.RUN: run_id}, number) for run_id, number in newest.items()],
            "atoll.agent.spool.usage": [({}, spooled)],
            "atoll.agent.training.duration": [
                ({instruments.RUN: run_id}, self._trainings[run_id].copy()) for run_id in [*self._trainings]
            ],
            "atoll.agent.policy.decisions": [
                ({instruments.POLICY_OUTCOME: str(one.outcome), instruments.POLICY_RULE: str(one.rule)}, number)
                for one, number in agent.gate.decisions.items()
            ],
            DROPPED: [({instruments.LEFT_OUT: "run"}, len(jobs) - len(newest))],
        }
        return found | certificate_end(agent.membership.keeper)

    def read_elsewhere(self) -> Reading:
        """Return the values that are read from the disk; on any thread."""
        return free_bytes(self._agent.config.state)
