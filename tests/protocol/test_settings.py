"""The reader of settings: all faults at once, each with its source, its key, the value and what is allowed."""

import tomllib
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_validator, model_validator

from atoll.ground.faults import Refused
from atoll.protocol.settings import STRICT, ConfigError, Folder, Plain, describe, effective, load, load_text


class Tides(BaseModel, **STRICT):
    """Settings of one table."""

    low: int = Field(default=1, ge=0, le=100)
    """The lower one,
    in metres."""

    high: int | Literal["never"] = 9
    """The upper one."""

    slack: float | None = None
    """Minutes of neither."""

    @field_validator("low")
    @classmethod
    def _low_is_odd(cls, low: int) -> int:
        if low % 2 == 0:
            raise ValueError("must be odd")
        return low

    @model_validator(mode="after")
    def _in_order(self) -> "Tides":
        if isinstance(self.high, int) and self.low > self.high:
            raise Refused(f"low {self.low} is more than high ({self.high})", "got ebb; allowed: flood")
        return self


class Lagoon(BaseModel, **STRICT):
    """Settings of one file."""

    name: str
    """Name of the lagoon."""

    state: Folder = Field(default="here", validate_default=True)
    """Folder of its state."""

    tides: Tides = Tides()
    """Table of its tides."""

    fish: dict[str, bool | int | float | str | list[int]] = {}
    """Fish, by name."""


def faults(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refusal:
        load_text(Lagoon, text, overrides, name="run.toml")
    assert str(refusal.value) == "\n".join(refusal.value.faults)
    return refusal.value.faults


def test_overrides_stand_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "a"\n[tides]\nlow = 3\nhigh = 5\n', encoding="utf-8")
    lagoon = load(Lagoon, path, ["tides.high=7", "fish.cod=0.5", "fish.eels=[1, 2]", "fish.kind=gold", "state=/a/b"])
    assert (lagoon.name, lagoon.tides.low, lagoon.tides.high, lagoon.tides.slack) == ("a", 3, 7, None)
    assert lagoon.fish == {"cod": 0.5, "eels": [1, 2], "kind": "gold"}
    assert lagoon.state == Path("/a/b")
    assert load(Lagoon, None, ["name=b"]) == Lagoon(name="b")
    numbers = {"a": ".2", "b": "-1.", "c": "1.e-3", "d": "+.5E2"}
    assert load(Lagoon, None, ["name=c", *(f"fish.{name}={text}" for name, text in numbers.items())]).fish == {
        name: float(text) for name, text in numbers.items()
    }
    assert load(Lagoon, None, ["name=c", "fish.a=.", "fish.b=1.2.3", "fish.c=.gitignore"]).fish == {
        "a": ".",
        "b": "1.2.3",
        "c": ".gitignore",
    }


def test_all_faults_are_told_at_once() -> None:
    assert faults('nam = "a"\n[tides]\nlow = "six"\nhigh = "evr"\nlwo = 1\n[fish]\ncod = [true]\n') == (
        "run.toml: name: missing; allowed: string",
        "run.toml: tides.low: got 'six'; allowed: integer >= 0, <= 100",
        "run.toml: tides.high: got 'evr'; allowed: integer | \"never\"",
        "run.toml: tides.lwo: unknown key (did you mean low? known: low, high, slack)",
        "run.toml: fish.cod: got [True]; allowed: true | false | integer | number | string | list of (integer)",
        "run.toml: nam: unknown key (did you mean name? known: name, state, tides, fish)",
    )


def test_a_value_out_of_range_and_a_table_that_contradicts_itself_say_why() -> None:
    assert faults("name='a'\ntides.low = 101") == ("run.toml: tides.low: got 101; allowed: integer >= 0, <= 100",)
    assert faults("name='a'\ntides.low = 4") == ("run.toml: tides.low: got 4: must be odd",)
    assert faults("name='a'\ntides.high = 0") == (
        "run.toml: tides: low 1 is more than high (0)",
        "run.toml: tides: got ebb; allowed: flood",
    )


@pytest.mark.parametrize("text", ["tides = 3", "name = true", "name = 1979-05-27", "state = 1", "tides.low = 1.0"])
def test_no_type_is_turned_into_another(text: str) -> None:
    assert any("; allowed: " in fault and "missing" not in fault for fault in faults(text))


def test_faults_of_overrides_say_that_they_come_from_there() -> None:
    assert faults("", "name=a", "tides.low=7.5", "tides.lo=1", "lagoon=2") == (
        "--set: tides.low: got 7.5; allowed: integer >= 0, <= 100",
        "--set: tides.lo: unknown key (did you mean low? known: low, high, slack)",
        "--set: lagoon: unknown key (known: name, state, tides, fish)",
    )


def test_a_table_as_an_override_keeps_the_other_settings_of_the_file() -> None:
    found = load_text(Lagoon, "name = 'a'\n[tides]\nlow = 3\nhigh = 7\n", ["tides={high=5}"], name="")
    assert (found.tides.low, found.tides.high) == (3, 5)


@pytest.mark.parametrize("text", ["null", "none", "false", '""', "[]"])
def test_no_override_takes_a_table_away(text: str) -> None:
    """A guarantee would vanish by an option of a command."""
    shown = repr(text)
    what = f"--set: tides: got {shown}, and a table is not taken away by an option; allowed: a table; a new run"
    assert faults("name = 'a'\n[tides]\nlow = 3\nhigh = 7\n", f"tides={text}") == (
        f"{what}, from settings without [tides], has none",
    )


class Reef(BaseModel, **STRICT):
    """Settings with values by dotted names, one table of them short for a text and the rest."""

    short_tables: ClassVar = {"task": ("reference", "options")}
    dotted_names: ClassVar = {"options": 0, "sites": 1}

    task: str = "t"
    """Text."""

    options: dict[str, Plain] = {}
    """Values by name."""

    sites: dict[str, dict[str, Plain]] = {}
    """Values by site and name."""


def test_names_of_values_may_be_dotted_as_tables_or_in_overrides() -> None:
    text = 'task = "a"\n[options]\n"optimizer.lr" = 0.1\nseed = 3\n[sites."x.y".db]\nhost = "h"\n'
    found = load_text(Reef, text, ["task.optimizer={name='sgd'}", "task.optimizer.lr=0.5"], name="")
    assert found.task == "a"
    assert found.options == {"optimizer.lr": 0.5, "seed": 3, "optimizer.name": "sgd"}
    assert found.sites == {"x.y": {"db.host": "h"}}
    assert load_text(Reef, effective(found), name="") == found
    with pytest.raises(ConfigError) as refused:
        load_text(Reef, text, ["task.optimizer.rates=[1]"], name="run.toml")
    plain = "true | false | integer | number | string"
    assert refused.value.faults == (f"--set: task.optimizer.rates: got [1]; allowed: {plain}",)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("tides.low", "--set: got 'tides.low'; allowed: key=value, with a key such as round.quorum"),
        ("=3", "--set: got '=3'; allowed: key=value"),
        ("a..b=3", "--set: got 'a..b=3'; allowed: key=value"),
        ("name.first=a", "--set: name.first: name is not a table"),
        ("name=", "--set: name: got ''; allowed: a TOML value or a bare word"),
        ("name='a", '--set: name: got "\'a"; allowed: a TOML value or a bare word'),
        ("name=1\nstate='x'", "--set: name: got "),
    ],
)
def test_an_override_that_cannot_be_read_is_a_fault(override: str, fault: str) -> None:
    [found] = faults("name = 'a'", override)
    assert found.startswith(fault)


def test_what_is_no_toml_is_refused_with_its_line() -> None:
    [fault, other] = faults("name = 'a'\n\noops\n", "abc")
    assert fault.startswith("run.toml: not TOML: ")
    assert "line 3" in fault
    assert other.startswith("--set: ")


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*/no\.toml$"):
        load(Lagoon, tmp_path / "no.toml")
    (tmp_path / "latin.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match=r"latin\.toml: line 1 is not UTF-8; save the file as UTF-8"):
        load(Lagoon, tmp_path / "latin.toml")


@given(
    st.dictionaries(st.text(max_size=5), st.text() | st.floats(-9, 9) | st.integers(-9, 9) | st.booleans(), max_size=3)
)
@settings(deadline=None)
def test_the_effective_settings_load_to_an_equal_model(fish: dict[str, str | float | int | bool]) -> None:
    lagoon = Lagoon.model_validate({"name": 'a "quoted"\n\x7f\\ 🐟', "tides": {"slack": 1e-7}, "fish": fish})
    assert load_text(Lagoon, effective(lagoon), name="") == lagoon


def test_every_key_is_described() -> None:
    described = {setting.key: setting for setting in describe(Lagoon)}
    assert list(described) == ["name", "state", "tides.low", "tides.high", "tides.slack", "fish"]
    low = described["tides.low"]
    assert (low.type, low.default, low.doc) == ("integer >= 0, <= 100", "1", "The lower one, in metres.")
    assert described["name"].is_required
    assert described["tides.slack"].default == ""
    assert tomllib.loads(f"x = {described['state'].default}") == {"x": "here"}


def test_an_integer_of_thousands_of_digits_is_a_fault_as_any_other() -> None:
    """Read a fuzzer's finding, which Python refuses to convert with another error than TOML's."""
    for text, overrides in ((f"a = {'9' * 5000}", []), ("", [f"round.quorum={'9' * 5000}"])):
        with pytest.raises(ConfigError):
            load_text(Lagoon, text, overrides, name="f.toml")
    huge = f"0x1{'9' * 5000}"
    with pytest.raises(ConfigError, match="got an integer of 20001 bits"):
        load_text(Lagoon, "", [f"tides.low={huge}"], name="")
    with pytest.raises(ConfigError, match=r"got \[an integer of 20001 bits\]"):
        load_text(Lagoon, "", [f"tides.low=[{huge}]"], name="")


def test_a_byte_order_mark_at_the_beginning_of_a_file_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf" + b"high = 12\n")
    assert load(Tides, path).high == 12
