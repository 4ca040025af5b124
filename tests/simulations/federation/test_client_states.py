"""The states of clients: one counts, later ones wait, and a resumed run finds those of its snapshot."""

import numpy as np

from atoll.client.disk.client_state import KEEP
from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.simulations.federation.client_states import ClientStates

A = ClientId("a/../b")  # no name of a file
NUMBERS = {ClientId("other"): 0, A: 1}


def opened(folder, named=()):
    return ClientStates(folder, NUMBERS, named)


def accept(own, number):
    own.staged_residual(A, RoundId(number)).write_bytes(bytes([number]))
    own.settle_residual(A, RoundId(number), accepted=True)


def state(number):
    return {"c": np.full(3, number, np.float32)}


def test_what_counts_is_what_the_invitation_says(tmp_path):
    own = opened(tmp_path)
    assert own.find(A, RoundId(0)) is None
    for number in (1, 2, 3):
        own.store(A, RoundId(number), RoundId(0), state(number))
    assert own.find(A, RoundId(2))["c"].tolist() == [2, 2, 2]
    assert own.find(A, RoundId(4)) is None
    assert own.find(ClientId("other"), RoundId(2)) is None


def test_states_before_the_round_that_counted_and_the_oldest_of_many_go(tmp_path):
    own = opened(tmp_path)
    for number in range(1, 4):
        own.store(A, RoundId(number), RoundId(2 if number == 3 else 0), state(number))
    assert own.find(A, RoundId(1)) is None
    for number in range(4, 4 + KEEP):
        own.store(A, RoundId(number), RoundId(2), state(number))
    assert own.find(A, RoundId(2)) is not None
    assert own.find(A, RoundId(3)) is None
    assert len(list(tmp_path.iterdir())) == 1 + KEEP


def test_a_run_that_goes_on_from_a_state_has_what_that_state_names_and_nothing_else(tmp_path):
    own = opened(tmp_path)
    for number in (1, 2):
        own.store(A, RoundId(number), RoundId(0), state(number))
        accept(own, number)
    named = own.named()
    for number in (3, 4, 5):  # one after the other is accepted, and none of it is saved
        own.store(A, RoundId(number), RoundId(number - 1), state(number))
        accept(own, number)
    own.staged_residual(A, RoundId(6)).write_bytes(b"?")
    again = opened(tmp_path, named)
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


def test_files_stay_until_no_saved_state_names_them(tmp_path):
    own = opened(tmp_path)
    accept(own, 1)
    first = own.named()
    accept(own, 2)
    own.named()  # a process that ends now may find the state before
    assert opened_residual(tmp_path, first) == bytes([1])
    own = opened(tmp_path, first)
    for number in (3, 4, 5):
        accept(own, number)
        own.named()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.residual.4.safetensors", "1.residual.5.safetensors"]


def opened_residual(folder, named):
    return (folder / next(iter(named))).read_bytes()
