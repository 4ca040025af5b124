"""An agent that lies in the secure sums of the first round.

With `ATOLL_BENCH_LIE=shares` it reveals other numbers than the shares that it was given, with `words` it adds another
stream to its update, which nothing takes off the sum: `python -m benchmarks.lying_member agent TASK --site north ...`.
"""

import os
from typing import Any

from atoll.cli.main import run
from atoll.client.work.secure_sums import SecureSums
from atoll.protocol.secure.messages import Reveal
from atoll.protocol.secure.terms import Terms

VARIABLE = "ATOLL_BENCH_LIE"
"""The environment variable with the kind of the lie."""


_say, _mask = SecureSums._say, SecureSums._mask


def _lies_in(terms: Terms) -> bool:
    return terms.purpose == "update" and terms.round == 1


def _say_other_shares(self: SecureSums, terms: Terms, message: Any) -> None:
    if isinstance(message, Reveal) and _lies_in(terms):
        message = Reveal(tuple(share ^ 1 for share in message.shares))
    _say(self, terms, message)


async def _mask_other_words(self: SecureSums, membership: Any, streams: list[tuple[bytes, int]], share: Any) -> None:
    more = [(b"\1" * 32, 1)] if _lies_in(membership.member.terms) else []
    await _mask(self, membership, [*streams, *more], share)


if __name__ == "__main__":
    if os.environ[VARIABLE] == "shares":
        SecureSums._say = _say_other_shares  # type: ignore[method-assign]
    else:
        SecureSums._mask = _mask_other_words  # type: ignore[method-assign]
    run()
