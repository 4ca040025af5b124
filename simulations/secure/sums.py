"""The secure sums of a simulated run: cryptography, encoded updates, and the coordinator's side of its sessions."""

import hashlib
from pathlib import Path

from atoll.client.session.events import Invitation
from atoll.client.work.encoding import encoding_of
from atoll.client.work.noise_share import share_of
from atoll.ground.noise.key import BYTES, key_of
from atoll.protocol.secure.messages import MemberKeys
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.server.config.run import RunConfig
from atoll.server.files.versions import Versions
from atoll.server.hosting.secure_sums import SecureSums
from atoll.server.rounds.events import Aggregate, AskEvaluation
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.secure_evaluation import SecureEvaluation
from atoll.server.rounds.secure_round import SecureRound
from atoll.server.rounds.session_events import SumPlace
from atoll.simulations.attacks.lying_coordinator import LyingCoordinator
from atoll.simulations.secure.cryptography import Cryptography, NoMasks, RealMasks
from atoll.simulations.secure.encoded_updates import EncodedUpdates
from atoll.task.arrays import Arrays
from atoll.task.metrics import Statistics
from atoll.tensors.layout import Layout
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.secure.masked_layout import exponents_of
from atoll.tensors.secure.plan import Encoding


class SimulatedSums:
    """Secure sums of a simulated run.

    Args:
        config: the settings of the run, with `[secure]`.
        is_real: whether sessions have the deployed cryptography.
        folder: of the files of encoded updates.
        may_forge: whether clients may replace their updates (`EncodedUpdates.forge`).
        liar: changes what members are asked; None: the coordinator is honest.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        is_real: bool,
        may_forge: bool = False,
        liar: LyingCoordinator | None = None,
    ) -> None:
        self.config, self.liar = config, liar
        self.cryptography: Cryptography = RealMasks() if is_real else NoMasks()
        self.updates = EncodedUpdates(folder, may_forge=may_forge)

    def encode(
        self,
        client_id: ClientId,
        invitation: Invitation,
        digest: Digest,
        update: Arrays,
        layout: Layout,
        num_examples: float,
        statistics: Statistics,
    ) -> int:
        """Encode a client's update once, as its agent does; return the size of its masked form [bytes].

        The numbers that round its values follow from the run's seed, where an agent draws secret ones.

        Raises:
            NotFinite: a value is NaN or infinite.
        """
        terms = invitation.secure
        assert terms is not None
        plan = encoding_of(terms, invitation.ranges, layout).plan(num_examples, statistics)
        purpose = f"atoll simulated rounding {self.config.seed} {self.config.name} {terms.round} {client_id}"
        return self.updates.add(digest, update, layout, plan, hashlib.sha256(purpose.encode()).digest())

    def seen(self, effect: Aggregate, layout: Layout) -> dict[str, Arrays]:
        """Return what the coordinator reads of each client's masked update in a fold, by client.

        Args:
            effect: the fold.
            layout: of the base version's tensors.
        """
        rules = self.config.secure_rules
        assert rules is not None
        encoding = Encoding(
            bits=rules.bits,
            clip_norm=rules.clip_norm,
            exponents=exponents_of(effect.ranges, layout),
            metrics=rules.metrics,
            is_private=rules.is_private,
        )
        return {str(each.client_id): self.updates.seen(each.digest, encoding, layout) for each in effect.contributions}

    def share_of(self, client_id: ClientId, terms: Terms) -> GridNoise | None:
        """Return a client's share of the noise of an attempt, as its agent draws it, but from the run's seed.

        With the id of the session, which has its members' new keys, no run would have the same noise again.
        """
        secret = key_of(bytes(BYTES), "simulated share", self.config.seed, self.config.name, client_id)
        return share_of(secret, terms, b"")


class CoordinatorSums(SecureSums):
    """Coordinator's side of a simulated run's sums: the deployed one, with the terms of each sum made once.

    Args:
        sums: of the run.
        run_id: the run.
        task: its name, as sites list it.
        versions: of the model.
        machine: of the run.
    """

    def __init__(self, sums: SimulatedSums, run_id: RunId, task: str, versions: Versions, machine: RunMachine) -> None:
        cryptography = sums.cryptography
        super().__init__(run_id, task, lambda: sums.config, versions, machine, lambda: cryptography.authorities)
        self._are_certified = bool(cryptography.authorities)
        self._made: dict[tuple[RoundId, SumPlace], Terms] = {}

    def terms(self, round_id: RoundId, base_version: Version, place: SumPlace) -> Terms:
        """Return the terms of one sum of an open round."""
        if (round_id, place) not in self._made:
            self._made = {key: terms for key, terms in self._made.items() if key[0] == round_id}
            self._made[round_id, place] = super().terms(round_id, base_version, place)
        return self._made[round_id, place]

    def terms_of_request(self, effect: AskEvaluation) -> Terms:
        """Return the terms of the sum that a client is asked to evaluate a version for."""
        assert effect.sum is not None
        return self.terms_of_evaluation(effect.version, effect.sum)

    def check_keys(
        self, sums: SecureRound | SecureEvaluation, of: SessionName, client_id: ClientId, keys: MemberKeys
    ) -> None:
        """Check a client's keys before they are in a roster; without masks nothing depends on them."""
        if self._are_certified:
            super().check_keys(sums, of, client_id, keys)
