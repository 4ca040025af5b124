"""The text of files that people have saved with any editor."""

import codecs

import pytest

from atoll.ground.text_files import NotText, text_of

TEXT = 'name = "Zürich"\r\nrounds = 3\r\n'


def test_a_byte_order_mark_is_dropped_and_the_ends_of_lines_stay() -> None:
    assert text_of(TEXT.encode(), "run.toml") == TEXT
    assert text_of(codecs.BOM_UTF8 + TEXT.encode(), "run.toml") == TEXT
    for content in (b"", b"a", b"ab", b"\x00", b"a\x00b\x00c"[:1]):
        assert text_of(content, "f") == content.decode()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_a_wide_encoding_is_named_with_the_way_out(encoding: str) -> None:
    mark = {"utf-32-le": codecs.BOM_UTF32_LE}.get(encoding, b"")
    with pytest.raises(NotText) as refused:
        text_of(mark + TEXT.encode(encoding), "run.toml")
    assert str(refused.value) == f"run.toml: is {encoding[:6].upper()}; save it as UTF-8"


def test_a_byte_that_is_not_utf_8_is_named_by_its_line() -> None:
    with pytest.raises(NotText) as refused:
        text_of(b"rounds = 3\n" + 'name = "Zürich"\n'.encode("latin-1"), "run.toml")
    assert str(refused.value) == "run.toml: line 2 is not UTF-8; save the file as UTF-8"
