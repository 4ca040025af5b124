import threading

import pytest

from atoll.tensors import numba_support
from atoll.tensors.numba_support import COMPILED_FROM, Meter
from tests.waiting import BOUND_S

needs_compiler = pytest.mark.skipif(not numba_support.has_compiler(), reason="needs numba: make setup installs it")

PART = COMPILED_FROM // 64


@needs_compiler
def test_loops_are_loaded_once_and_only_when_it_pays():
    loads = []
    meter = Meter(lambda: loads.append(1) or "loops")
    assert [meter.loops(PART) for _ in range(63)] == [None] * 63
    assert loads == []
    assert meter.loops(PART) == "loops"
    assert meter.loops(1) == "loops"
    assert loads == [1]


@needs_compiler
def test_while_a_thread_compiles_the_others_go_on_without():
    go, begun = threading.Event(), threading.Event()
    meter = Meter(lambda: begun.set() or (go.wait(BOUND_S) and "loops"))
    thread = threading.Thread(target=meter.loops, args=(COMPILED_FROM,))
    thread.start()
    assert begun.wait(BOUND_S)
    assert meter.loops(PART) is None
    go.set()
    thread.join()
    assert meter.loops(1) == "loops"


def test_without_a_compiler_nothing_is_loaded(monkeypatch):
    meter = Meter(lambda: pytest.fail("there is none"))
    monkeypatch.setattr(numba_support, "has_compiler", lambda: False)
    assert [meter.loops(COMPILED_FROM) for _ in range(3)] == [None] * 3
