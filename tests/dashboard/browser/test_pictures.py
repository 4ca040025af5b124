"""The pictures of `docs/dashboard.md`: taken of real pages; written where `ATOLL_PICTURES` names a folder."""

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from benchmarks.views import build
from tests.dashboard.browser.conftest import looked_at
from tests.dashboard.browser.looking import until

pytestmark = pytest.mark.long

PICTURES = {"dashboard-run": "/runs/1/many-1", "dashboard-round": "/runs/1/many-1/rounds/40"}
BYTES_MAX = 120_000


def test_a_picture_is_small_and_shows_the_page(chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.environ.get("ATOLL_PICTURES", "")
    target = Path(folder).absolute() if folder else None
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "atoll-state", 12, 50)
    with looked_at(chromium, "atoll-state", home=tmp_path, has_forms=False) as look:
        with look.context(viewport={"width": 1000, "height": 720}, color_scheme="light") as context:
            page = context.new_page()
            for name, address in PICTURES.items():
                page.goto(look.base + address, wait_until="load")
                until(page, "document.querySelector('.live').textContent.includes('live')")
                assert str(tmp_path.parent) not in page.content(), "a picture has no path of this machine"
                path = tmp_path / f"{name}.png"
                path.write_bytes(page.screenshot())
                assert struct.unpack(">II", path.read_bytes()[16:24]) == (1000, 720)
                assert path.stat().st_size <= BYTES_MAX
                if target is not None:
                    shutil.copy(path, target)
