"""The settings of example-level privacy: faults, all at once."""

import pytest

from atoll.training.private.config import PrivacyConfig

SOUND = {"unit": "example", "sample_rate": 0.1, "clip_norm": 1.0, "epsilon": 8.0, "delta": 1e-5}


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        ({"unit": "client"}, ['privacy.unit: got "client", which is for a federation']),
        ({"unit": "row"}, ["privacy.unit: got 'row': allowed are example, none"]),
        ({"epsilon": 8.0, "delta": 1e-5}, ["privacy.epsilon: got 8.0: without", "privacy.delta: got 1e-05: without"]),
        (
            {"unit": "example"},
            [
                "privacy.sample_rate: missing",
                "privacy.clip_norm: missing",
                "privacy.delta: missing",
                "both are missing",
            ],
        ),
        (
            {**SOUND, "sample_rate": 1.1, "clip_norm": 0.0, "noise_multiplier": -1.0, "epsilon": 0.0, "delta": 1.0},
            [
                "sample_rate: got 1.1",
                "clip_norm: got 0.0",
                "noise_multiplier: got -1",
                "epsilon: got 0",
                "delta: got 1",
            ],
        ),
        ({**SOUND, "epsilon": float("nan")}, ["privacy.epsilon: got nan"]),
        ({**SOUND, "clip_norm": float("inf")}, ["privacy.clip_norm: got inf"]),
        ({**SOUND, "delta": "small"}, ["privacy.delta: expected float or none, got 'small'"]),
    ],
)
def test_faults_are_listed_all_at_once(given: dict[str, object], faults: list[str]) -> None:
    with pytest.raises(ValueError, match=r"privacy\.") as caught:
        PrivacyConfig(**given)  # type: ignore[arg-type]
    said = str(caught.value).split("; ")
    assert len(said) == len(faults)
    for words in faults:
        assert words in str(caught.value)


def test_sound_settings_are_taken() -> None:
    assert PrivacyConfig().is_on is False
    changed = PrivacyConfig().with_overrides({name: str(value) for name, value in SOUND.items()})
    assert changed == PrivacyConfig(**SOUND)  # type: ignore[arg-type]
    assert changed.is_on
