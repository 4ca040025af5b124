"""The secret of the noise in a state directory."""

from pathlib import Path

import pytest

from atoll.protocol.identity.noise_secret import noise_secret


def test_a_directory_keeps_its_secret_and_another_has_another(tmp_path: Path) -> None:
    first = noise_secret(tmp_path)
    assert noise_secret(tmp_path) == first
    assert len(first) == 32
    assert (tmp_path / "noise.key").stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other"
    other.mkdir()
    assert noise_secret(other) != first


@pytest.mark.parametrize("content", ["", "12", "g" * 64, "a" * 65])
def test_a_damaged_secret_is_not_replaced(tmp_path: Path, content: str) -> None:
    """Else work that is repeated would draw other noise, without a word."""
    (tmp_path / "noise.key").write_text(content)
    with pytest.raises(OSError, match=r"noise\.key is damaged: put it back from a backup, or delete it"):
        noise_secret(tmp_path)
    assert (tmp_path / "noise.key").read_text() == content
