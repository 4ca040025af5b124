"""The account of a private training's steps: charges never fall, and an account that cannot be read allows nothing."""

import json
import random
from pathlib import Path

import pytest

from atoll.parallel.private.account import FILE, Account, AccountBroken

MECHANISM = {"privacy.noise_multiplier": 1.0}


def test_charges_never_fall_over_kills_and_lost_checkpoints(tmp_path: Path) -> None:
    draw, kept, done = random.Random(0), [0], 0
    for _ in range(1000):
        account = Account(tmp_path, MECHANISM)
        assert account.steps >= done
        step = draw.choice(kept[-3:])  # the newest checkpoint, or an older one if that is damaged
        account.begin(step)
        for _ in range(draw.randrange(3)):
            step += draw.randrange(1, 5)
            before = account.steps
            account.charge(step)  # and then what follows from it is told
            done += account.steps - before
            assert account.steps == Account(tmp_path, MECHANISM).steps == done
            if draw.random() < 0.8:
                kept.append(step)
    assert done > 1000


def test_a_step_that_was_told_and_is_done_again_is_charged_again(tmp_path: Path) -> None:
    account = Account(tmp_path, MECHANISM)
    account.begin(0)
    account.charge(10)
    account.charge(10)
    again = Account(tmp_path, MECHANISM)
    again.begin(10)
    again.charge(12)
    assert again.steps == 12
    restored = Account(tmp_path, MECHANISM)
    restored.begin(4)
    restored.charge(12)
    assert restored.steps == 20


def test_an_account_that_is_not_sound_allows_nothing(tmp_path: Path) -> None:
    with pytest.raises(AccountBroken, match="is missing beside a checkpoint of step 5"):
        Account(tmp_path, MECHANISM).begin(5)
    account = Account(tmp_path, MECHANISM)
    account.begin(0)
    account.charge(3)
    with pytest.raises(AccountBroken, match="ends at step 3, and the checkpoint is of step 5"):
        Account(tmp_path, MECHANISM).begin(5)
    with pytest.raises(AccountBroken, match="3 steps of another mechanism"):
        Account(tmp_path, {"privacy.noise_multiplier": 2.0})
    sound = json.loads((tmp_path / FILE).read_text())
    for text in ("", "{", "[]", "{}", json.dumps({**sound, "steps": -1}), json.dumps({**sound, "steps": 1})):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(AccountBroken):
            Account(tmp_path, MECHANISM)
