import pytest

from atoll import Local


def test_overrides_give_a_changed_copy() -> None:
    local = Local(epochs=2)
    assert local.with_overrides({"lr": 0.05, "batch_size": None}) == Local(epochs=2, lr=0.05, batch_size=None)
    assert local == Local(epochs=2)


def test_overrides_are_read_from_the_text_of_a_command_line() -> None:
    given = {
        "lr": "5e-2",
        "epochs": "3",
        "shuffle": "false",
        "max_steps": "none",
        "optimizer": "adam",
        "batch_size": "8",
    }
    assert Local(max_steps=4).with_overrides(given) == Local(
        lr=0.05, epochs=3, shuffle=False, max_steps=None, optimizer="adam", batch_size=8
    )


def test_a_whole_number_serves_as_a_float() -> None:
    assert Local().with_overrides({"lr": 1}).lr == 1


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="epochs") as caught:
        Local().with_overrides({"lrr": 0.1, "epochs": "many", "momentum": True, "lr": -1.0, "optimizer": "lion"})
    message = str(caught.value)
    for part in (
        "local.lrr: unknown key, got 0.1 (known: epochs, batch_size,",
        "local.epochs: expected int, got 'many'",
        "local.momentum: expected float, got True",
        "local.lr: must be positive and finite, got -1.0",
        "local.optimizer: must be one of sgd, adam, adamw, or a name that one installed package declares (`atoll",
        "plugins`), or in the task a class or function, got 'lion'",
    ):
        assert part in message


@pytest.mark.parametrize(
    "fault",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"lr": float("nan")},
        {"momentum": 1.0},
        {"weight_decay": -1.0},
        {"max_steps": 0},
        {"clip_norm": 0.0},
        {"prox_mu": -0.1},
        {"optimizer": "adam", "momentum": 0.9},
        {"batch_size": 1.5},
        {"shuffle": 1},
    ],
)
def test_values_out_of_range_are_refused(fault: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"local.{list(fault)[-1]}"):
        Local(**fault)  # type: ignore[arg-type]
