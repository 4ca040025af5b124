"""The Python blocks of every page, executed one after another as one module, after what the page takes for granted."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import distributed as dist

from tests.pages.blocks import PAGES, blocks_of
from tests.parallel.forked import run_ranks

LANGUAGE = "python"
BLOCKS = {
    page: found
    for page in PAGES
    if (found := [block for block in blocks_of(page) if block.language == LANGUAGE and not block.reason])
}

NETWORK = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

TAKEN_FOR_GRANTED = {
    "docs/communication.md": NETWORK,
    "docs/data.md": """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from atoll import Task
dataset = TensorDataset(torch.zeros(4096, 2), torch.zeros(4096))
make_model = lambda: nn.Linear(1, 1)
""",
    "docs/parallel.md": """
import torch
from torch import nn
from tests.parallel.engine.cases import small
from tests.parallel.engine.reference import token_loss as loss
model = small()
styles = lambda sequence_parallel, loss_parallel: {}
make_optimizer = lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
tokens = torch.arange(8 * 17).reshape(8, 17) % 64
inputs, targets, count = tokens[:, :-1], tokens[:, 1:], 8.0 * 16
""",
    "docs/populations.md": "from examples.digits import task",
}
"""The names that the text of a page introduces before its blocks use them."""

ON_RANKS = {"docs/parallel.md": 8}
"""The pages whose blocks are one rank's, with the number of their ranks; "cuda" in them becomes "cpu"."""


def execute(page: str, code: str) -> dict[str, Any]:
    """Execute the blocks of a page after what it takes for granted, and return all names; errors have the page's lines.

    Raises:
        Exception: what the code raises.
    """
    module = ModuleType("page")
    exec(compile(TAKEN_FOR_GRANTED.get(page, ""), f"<before {page}>", "exec"), vars(module))
    exec(compile(code, page, "exec"), vars(module))
    return vars(module)


def code_of(page: str) -> str:
    """Return the blocks of a page as one module in which each line has the number that it has on the page."""
    lines: list[str] = []
    for block in BLOCKS[page]:
        lines += [""] * (block.line - len(lines))
        lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


def on_a_rank(page: str, code: str) -> float:
    """Execute the blocks on one rank, on which the process group is up; return the loss that the page measures."""
    return float(execute(page, code)["measured"].loss)


@pytest.fixture(autouse=True)
def public_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clinics with ten visits each, where `ATOLL_DATA` points."""
    rows = [f"{clinic},{k},{k % 7},{k % 3}" for clinic in ("hill", "lake", "port") for k in range(10)]
    (tmp_path / "clinics").mkdir()
    (tmp_path / "clinics" / "visits.csv").write_text("\n".join(["clinic,visit_id,age,outcome", *rows]) + "\n")
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if page == "docs/python.md" else [])  # as the notebooks do
        for page in BLOCKS
        if page not in ON_RANKS
    ],
)
def test_the_blocks_of_a_page_run(page: str) -> None:
    try:
        assert execute(page, code_of(page))
    finally:
        if dist.is_initialized():  # `hvd.init()` of a page: a process of its own would end with it
            dist.destroy_process_group()


@pytest.mark.real
@pytest.mark.parametrize("page", ON_RANKS)
def test_the_blocks_of_a_page_run_on_its_ranks(page: str) -> None:
    losses = run_ranks(on_a_rank, ON_RANKS[page], page, code_of(page).replace('"cuda"', '"cpu"'))
    assert len({round(loss, 6) for loss in losses}) == 1
    assert 0 < losses[0] < 10


def test_a_block_that_fails_is_named_with_its_line() -> None:
    with pytest.raises(NameError) as failure:
        execute("docs/configuration.md", code_of("docs/configuration.md").replace("least = Least()", "least = Lest()"))
    [block] = BLOCKS["docs/configuration.md"]
    line = block.line + 1 + block.text.splitlines().index('least = Least()                   # rule = "task.py:least"')
    assert str(failure.traceback[-1].path).endswith("configuration.md")
    assert failure.traceback[-1].lineno + 1 == line


def test_each_page_with_names_taken_for_granted_has_blocks() -> None:
    assert TAKEN_FOR_GRANTED.keys() | ON_RANKS.keys() <= BLOCKS.keys()
