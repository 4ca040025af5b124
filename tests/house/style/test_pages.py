"""The prose of pages, and the turns in it."""

from pathlib import Path

import pytest

from tests.house.style.pages import faults, pages, prose

PAGE = """# A page

Prose that nobody reads.

```python
whoever = 1
```

    indented whoever

- an item

    of which nobody reads the second paragraph

Text at last.

    more whoever

~~~
somebody
```
nobody
~~~

> ```
> whoever
> ```

`whoever` and so
many.
"""


def test_turns_in_prose_are_reported_with_their_lines() -> None:
    found = [(fault.line, fault.text.split(":")[0]) for fault in faults("docs/page.md", PAGE)]
    assert found == [(3, '"nobody"'), (13, '"nobody"'), (29, '"so many"')]
    assert {fault.path for fault in faults("docs/page.md", PAGE)} == {"docs/page.md"}


def test_lines_stay_where_they_are() -> None:
    assert len(prose(PAGE).split("\n")) == len(PAGE.split("\n"))


@pytest.mark.parametrize("text", ["", "A page without code.", "1. one\n2. two\n   still two"])
def test_prose_without_code_stays_as_it_is(text: str) -> None:
    assert prose(text) == text


def test_pages_are_those_of_docs_and_the_root(tmp_path: Path) -> None:
    for name in ("README.md", "docs/b.md", "docs/a.md", "docs/decisions/c.md", "docs/x.txt", "other/d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# A page\n")
    found = [page.relative_to(tmp_path).as_posix() for page in pages(tmp_path)]
    assert found == ["README.md", "docs/a.md", "docs/b.md", "docs/decisions/c.md"]
