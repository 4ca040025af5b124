"""The rules of a run: its straggler policy, its length, its evaluations. Pure values."""

from dataclasses import dataclass

from atoll.server.rounds.policy import StragglerPolicy


@dataclass(frozen=True, slots=True)
class RunRules:
    """The rules of a run: its straggler policy, its length, its evaluations."""

    policy: StragglerPolicy
    rounds: int  # number of commits after which the run is finished
    seed: int = 0
    evaluate_server_every: int = 0  # versions; 0: never; otherwise the last version is always evaluated
    evaluate_clients_every: int = 0
    evaluate_clients_max: int = 0  # 0: all connected clients
    evaluation_deadline: float = 60.0  # seconds for the clients' answers
    pacer_window: int = 0  # commits; 0: the sampler uses no pacer
