"""The values of a run come back from the run config of an app, which Flower flattens."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.flower.app import flattened
from atoll.flower.exported.run_values import RunValues

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
PLAIN = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
GIVEN = st.builds(
    lambda local, options, tables: {**local, **{f"task.{name}": value for name, value in options.items()}, **tables},
    st.dictionaries(NAMES, PLAIN),
    st.dictionaries(NAMES, PLAIN),
    st.dictionaries(NAMES, st.dictionaries(NAMES, st.one_of(PLAIN, st.lists(PLAIN)), min_size=1)),
)


@given(GIVEN, st.integers(1), st.integers(0), st.sampled_from(["", "/models/a.safetensors"]), st.booleans())
def test_what_is_written_is_read(given, rounds, seed, start, is_strict):
    values = RunValues("digits", rounds, seed, given, start, is_strict or not start)
    assert RunValues.read(dict(flattened(values.config))) == values


def test_a_digest_of_frozen_tensors_has_a_key_of_its_own():
    values = RunValues("digits", 1, 0, {"lr": 0.5, "model.frozen": "ab" * 32})
    assert values.config["frozen"] == "ab" * 32
    assert RunValues.read(dict(flattened(values.config))) == values


@given(st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()))
def test_every_value_of_the_config_is_one_that_flower_takes(value):
    config = RunValues("digits", 1, 0, {"a": value, "b": [value], "task.c": value}).config
    assert all(isinstance(found, bool | int | float | str) for _, found in flattened(config))
