"""The codec of an invitation: the run's, if both the client and the receiver of its update have it."""

import logging
from collections.abc import Callable

from atoll.protocol.vocabulary import ClientId, RunId
from atoll.tensors.codecs.installed import is_installed, other_version
from atoll.tensors.codecs.names import family_of

logger = logging.getLogger(__name__)


class OfferedCodec:
    """Codec that one run offers; a process that lacks an installed package's codec is reported once.

    Args:
        run_id: the run.
        codecs_of: returns the codecs that a client supports.
        codecs_of_rank: returns the codecs of an aggregation rank, None while it is away; if this argument is None, this
            process receives the updates.
    """

    def __init__(
        self,
        run_id: RunId,
        codecs_of: Callable[[ClientId], frozenset[str]],
        codecs_of_rank: Callable[[int], frozenset[str] | None] | None,
    ) -> None:
        self._run_id, self._codecs_of, self._codecs_of_rank = run_id, codecs_of, codecs_of_rank
        self._reported = set[tuple[str, str]]()

    def of(self, name: str, client_id: ClientId, rank: int) -> str:
        """Return the codec of a client's next update; empty: plain values.

        Args:
            name: the name of the run's codec; empty: none.
            client_id: the client.
            rank: the rank that will receive the update.
        """
        family = family_of(name)
        if not self._has(family, self._codecs_of(client_id), f"client {client_id}"):
            return ""
        if self._codecs_of_rank is None or not is_installed(family):
            return name
        return name if self._has(family, self._codecs_of_rank(rank), f"aggregation rank {rank}") else ""

    def may_spread(self, offered: str) -> bool:
        """Return whether the parts of an update with this codec may go to several ranks: each decodes its parts.

        An installed package's codec is known to exist at one rank, so all parts go there.
        """
        return self._codecs_of_rank is not None and not is_installed(family_of(offered))

    def _has(self, family: str, codecs: frozenset[str] | None, who: str) -> bool:
        if codecs is None:
            return False
        if family in codecs:
            return True
        other = other_version(family, codecs)
        if is_installed(family) and (who, other) not in self._reported:
            self._reported.add((who, other))
            has = f"has {other}" if other else "does not have it"
            way_out = "install the same version of its package there, and start that process again"
            logger.warning(
                "%s: updates are sent without a codec: the codec is %s, and %s %s: %s",
                self._run_id,
                family,
                who,
                has,
                way_out,
            )
        return False
