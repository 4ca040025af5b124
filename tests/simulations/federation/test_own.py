"""What a simulated client keeps: one outcome counts, others wait, and a run begun again finds the right ones."""

import numpy as np

from atoll.client.personal import KEEP
from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.simulations.federation.own import OwnStates

A = ClientId("a/../b")  # no name of a file
NUMBERS = {ClientId("other"): 0, A: 1}


def opened(folder, next_round=10**6):
    return OwnStates(folder, NUMBERS, RoundId(next_round))


def state(number):
    return {"c": np.full(3, number, np.float32)}


def test_what_counts_is_what_the_invitation_says(tmp_path):
    own = opened(tmp_path)
    assert own.find(A, RoundId(0)) is None
    for number in (1, 2, 3):
        own.keep(A, RoundId(number), RoundId(0), state(number))
    assert own.find(A, RoundId(2))["c"].tolist() == [2, 2, 2]
    assert own.find(A, RoundId(4)) is None
    assert own.find(ClientId("other"), RoundId(2)) is None


def test_what_came_before_the_round_that_counted_goes_and_so_do_the_oldest_of_too_many(tmp_path):
    own = opened(tmp_path)
    for number in range(1, 4):
        own.keep(A, RoundId(number), RoundId(2 if number == 3 else 0), state(number))
    assert own.find(A, RoundId(1)) is None
    for number in range(4, 4 + KEEP):
        own.keep(A, RoundId(number), RoundId(2), state(number))
    assert own.find(A, RoundId(2)) is not None
    assert own.find(A, RoundId(3)) is None
    assert len(list(tmp_path.iterdir())) == 1 + KEEP


def test_a_run_that_is_begun_again_at_a_round_forgets_what_came_after(tmp_path):
    own = opened(tmp_path)
    for number in (1, 2, 3):
        own.keep(A, RoundId(number), RoundId(0), state(number))
        own.staged_residual(A, RoundId(number)).write_bytes(bytes([number]))
        own.settle_residual(A, RoundId(number), accepted=True)
    own.staged_residual(A, RoundId(4)).write_bytes(b"?")
    again = opened(tmp_path, next_round=3)
    assert again.find(A, RoundId(3)) is None
    assert again.find(A, RoundId(2))["c"].tolist() == [2, 2, 2]
    assert again.residual(A).read_bytes() == bytes([2])
    assert not list(tmp_path.glob("*.staged"))


def test_a_residual_counts_when_its_update_was_accepted(tmp_path):
    own = opened(tmp_path)
    for number, accepted in ((1, True), (2, False)):
        own.staged_residual(A, RoundId(number)).write_bytes(bytes([number]))
        own.settle_residual(A, RoundId(number), accepted=accepted)
    assert own.residual(A).read_bytes() == bytes([1])
    assert own.residual(ClientId("other")) is None
