from pathlib import Path

import pytest

from benchmarks.papers import codecs, robustness
from benchmarks.papers.pages import write_parts

PAGE = """a
<!-- begin measured: one -->
old
<!-- end measured -->
b
<!-- begin measured: two -->
<!-- end measured -->
"""


def test_a_part_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    write_parts(page, {"one": "| new \\1 |"})
    assert page.read_text() == PAGE.replace("old", "| new \\1 |")
    write_parts(page, {"two": "x"})
    assert "two -->\nx\n<!-- end" in page.read_text()


def test_a_page_without_the_part_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(KeyError, match="no measured part three"):
        write_parts(page, {"three": "x"})
    assert page.read_text() == PAGE


def test_the_pages_have_the_parts_that_are_measured() -> None:
    for split in robustness.SPLITS:
        assert f"<!-- begin measured: robustness {split} -->" in robustness.PAGE.read_text("utf-8")
    assert "<!-- begin measured: codecs -->" in codecs.PAGE.read_text("utf-8")
