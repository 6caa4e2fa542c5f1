"""Settings from all sources: their order, and error messages."""

from __future__ import annotations

import itertools
import os
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.config import describe_settings, load_known, load_settings, to_toml
from agentloop.errors import SettingsError
from agentloop.serving.access import ServeSettings
from agentloop.training.plan.settings import TrainSettings


class Server(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    port: int = pydantic.Field(8000, ge=0, description="Where it listens.")
    cap: float | None = pydantic.Field(2.0, gt=0)
    names: list[str] = pydantic.Field(default_factory=list)
    token: pydantic.SecretStr | None = None

    @pydantic.model_validator(mode="after")
    def _no_port_13(self) -> Server:
        if self.port == 13:
            raise ValueError("13 brings bad luck")
        return self


class Inner(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    depth: float = 1.5


class Wing(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    inner: Inner = pydantic.Field(default_factory=Inner)
    flag: bool = False


class Everything(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    model: str | None = None
    servers: list[str] = pydantic.Field(default_factory=list)
    server: Server = pydantic.Field(default_factory=Server)
    wing: Wing = pydantic.Field(default_factory=Wing)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AGENTLOOP_")]:
        monkeypatch.delenv(name)


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def test_settings_without_sources_are_the_defaults() -> None:
    assert load_settings(Everything) == Everything()


def test_later_sources_win_and_sections_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTLOOP_MODEL", "from the environment")
    monkeypatch.setenv("AGENTLOOP_SERVER__PORT", "1")
    monkeypatch.setenv("AGENTLOOP_WING__INNER__DEPTH", "9")
    first = file(tmp_path, "1.toml", 'model = "first"\n[server]\nport = 2\nnames = ["a"]')
    second = file(tmp_path, "2.toml", "[server]\nport = 3\n[wing]\nflag = true")
    got = load_settings(Everything, [first, second], ["server.names=['b', 'c']"])
    assert got.model == "first"
    assert (got.server.port, got.server.names) == (3, ["b", "c"])
    assert (got.wing.flag, got.wing.inner.depth) == (True, 9)
    assert load_settings(Everything, [second, first]).server.port == 2
    assert load_settings(Everything, [first], ["server.port=4", "server.port=5"]).server.port == 5


@pytest.mark.parametrize(
    ("override", "model"),
    [
        ("model=Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ('model="quoted = text"', "quoted = text"),
        ("model=", ""),
        ("model=a=b", "a=b"),
        (" model = spaced ", "spaced"),
    ],
)
def test_override_needs_no_quotes(override: str, model: str) -> None:
    assert load_settings(Everything, overrides=[override]).model == model


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["server.prot=1"], r"^override 'server.prot=1': unknown .*did you mean 'server.port'\?"),
        (["zzz=1"], r"unknown setting 'zzz' \(known here: model, servers, server, wing\)"),
        (["server.ports=1"], "did you mean 'server.port'"),
        (["server.server=1"], r"unknown setting 'server.server' \(known here: server\.port, "),
        (["wing.inner.deep=1"], "did you mean 'wing.inner.depth'"),
        (["wing.depth=1"], "did you mean 'wing.inner.depth'"),
        (["depth=1"], "did you mean 'wing.inner.depth'"),
        (["server=1"], "'server' is a section: set server.KEY"),
        (["server.port"], "is not a setting: write section.key=value"),
        (["=1"], "is not a setting"),
        (["a b=1"], "is not a setting"),
        (["server.port=many"], r"server.port: .*not 'many' \(from override 'server.port=many'\)"),
        (["server.port=-1"], r"server.port: .*greater than or equal to 0, not -1"),
        (["server.port.x=1"], r"server.port: .*\(from override"),
        (["wing.flag=maybe", "server.port=x"], "server.port: .*; wing.flag: "),
    ],
)  # fmt: skip
def test_errors_name_the_setting_and_its_source(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(Everything, overrides=overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1", "bad.toml: unknown setting 'server.prot' .did you mean"),
        ("[server]\nport = 'x'", r"server.port: .*\(from .*bad.toml\)"),
        ("server = 3", "bad.toml: 'server' is a section"),
        ("[server", "bad.toml: Expected .]. at the end"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(Everything, [file(tmp_path, "bad.toml", text)])


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.toml: No such file"):
        load_settings(Everything, [tmp_path / "gone.toml"])
    (tmp_path / "latin.toml").write_bytes(b'model = "\xff"')
    with pytest.raises(SettingsError, match=r"latin\.toml: .*utf-8"):
        load_settings(Everything, [tmp_path / "latin.toml"])
    with pytest.raises(SettingsError, match=r"Is a directory"):
        load_settings(Everything, [tmp_path])


def test_file_stands_on_those_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    file(tmp_path / "base", "lowest.toml", 'model = "lowest"\n[server]\nport = 1\nnames = ["a"]')
    file(tmp_path / "base", "base.toml", 'extends = "lowest.toml"\n[server]\nport = 2')
    file(tmp_path, "other.toml", "wing.flag = true\nserver.port = 3")
    top = file(tmp_path, "top.toml", 'extends = ["base/base.toml", "other.toml"]\nmodel = "top"')
    got = load_settings(Everything, [top])
    assert (got.model, got.server.port, got.server.names) == ("top", 3, ["a"])
    assert got.wing.flag
    assert load_settings(Everything, [top], ["server.port=4"]).server.port == 4
    under = file(tmp_path, "under.toml", "server.port = 9")
    assert load_settings(Everything, [under, top]).server.port == 3
    assert load_settings(Everything, [top, under]).server.port == 9


def test_shared_base_is_overridden_by_both_files(tmp_path: Path) -> None:
    file(tmp_path, "base.toml", "server.port = 1")
    first = file(tmp_path, "first.toml", 'extends = "base.toml"\nserver.port = 2')
    second = file(tmp_path, "second.toml", 'extends = "base.toml"\nwing.flag = true')
    assert load_settings(Everything, [first, second]).server.port == 2
    extending = file(tmp_path, "both.toml", 'extends = ["first.toml", "second.toml"]')
    assert load_settings(Everything, [extending]).server.port == 2
    # What is named by itself lies where it is named.
    assert load_settings(Everything, [first, tmp_path / "base.toml"]).server.port == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends = 3", r"top\.toml: extends: expected a file name or a list of file names"),
        ('extends = [""]', r"top\.toml: extends: expected a file name or a list"),
        ("extends = {a = 1}", r"top\.toml: extends: expected a file name or a list"),
        ('extends = "gone.toml"', r"top\.toml: extends: .*gone\.toml: No such file"),
        ('extends = "top.toml"', r"top\.toml: extends: a cycle: .*top\.toml -> .*top\.toml"),
        ('extends = "around.toml"', r"around\.toml: extends: a cycle: .*top.* -> .*around.* -> "),
        ('extends = "bad.toml"', r"^[^:]*bad\.toml: unknown setting 'server\.prot'"),
        ('extends = "worse.toml"', r"server\.port: .*not 'x' \(from [^ ]*worse\.toml\)"),
        ('extends = "worst.toml"', r"top\.toml: extends: .*worst\.toml: Expected"),
        ('[server]\nextends = "bad.toml"', r"top\.toml: unknown setting 'server\.extends'"),
    ],
)
def test_error_in_an_extended_file_names_that_file(tmp_path: Path, text: str, message: str) -> None:
    file(tmp_path, "around.toml", 'extends = "./top.toml"')
    file(tmp_path, "bad.toml", "server.prot = 1")
    file(tmp_path, "worse.toml", 'server.port = "x"')
    file(tmp_path, "worst.toml", "[server")
    with pytest.raises(SettingsError, match=message):
        load_settings(Everything, [file(tmp_path, "top.toml", text)])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AGENTLOOP_SERVER__PORT", "x", r"server.port: .*\(from the environment\)"),
        ("AGENTLOOP_SERVER__PROT", "1", "the environment: unknown setting 'server.prot'"),
        ("AGENTLOOP_SERVERS", "http://127.0.0.1:1",
         "the environment: AGENTLOOP_SERVERS: expected JSON"),
        ("AGENTLOOP_SERVER", "{nope", "the environment: AGENTLOOP_SERVER: expected JSON"),
    ],
)  # fmt: skip
def test_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=message):
        load_settings(Everything)


def test_list_in_the_environment_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTLOOP_SERVERS", '["http://127.0.0.1:1"]')
    assert load_settings(Everything).servers == ["http://127.0.0.1:1"]


def test_section_that_is_wrong_as_a_whole_shows_no_token() -> None:
    for overrides in itertools.permutations(["server.port=13", "server.token=hunter2"]):
        with pytest.raises(SettingsError, match="bad luck") as caught:
            load_settings(Everything, overrides=overrides)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("more", [[], ["serve.max_rollouts=7"]])
def test_error_of_a_section_blames_the_keys_that_it_names(more: list[str]) -> None:
    class Served(pydantic.BaseModel):
        serve: ServeSettings

    overrides = ["serve.port=8123", "serve.host=0.0.0.0", *more]
    with pytest.raises(SettingsError, match=r"\(from override 'serve\.host'\)$"):
        load_settings(Served, overrides=overrides)


def test_error_without_keys_blames_all_sources_of_the_section(tmp_path: Path) -> None:
    path = file(tmp_path, "one.toml", "[server]\ntoken = 'x'")
    with pytest.raises(SettingsError, match=r"\(from .*one\.toml, override 'server\.port'\)$"):
        load_settings(Everything, [path], ["server.port=13"])


def test_every_setting_is_described() -> None:
    described = {key: (default, text) for key, default, text in describe_settings(Everything)}
    assert described["server.port"] == ("8000", "Where it listens.")
    assert described["wing.inner.depth"] == ("1.5", "")
    assert described["model"][0] == ""
    assert described["servers"][0] == "[]"


def test_setting_without_a_default_is_described_as_required() -> None:
    class Strict(pydantic.BaseModel):
        steps: int

    assert list(describe_settings(Strict)) == [("steps", "(required)", "")]


def test_our_own_words_about_a_value_stand_alone() -> None:
    class Addressed(pydantic.BaseModel):
        url: str

        @pydantic.field_validator("url")
        @classmethod
        def _is_a_url(cls, url: str) -> str:
            raise ValueError(f"{url!r} is no address" if "." in url else "no address")

    with pytest.raises(SettingsError) as caught:
        load_settings(Addressed, overrides=["url=a.b"])
    assert str(caught.value) == "url: 'a.b' is no address (from override 'url=a.b')"
    with pytest.raises(SettingsError) as caught:
        load_settings(Addressed, overrides=["url=ab"])
    assert str(caught.value) == "url: no address, not 'ab' (from override 'url=ab')"


def test_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(Everything, overrides=["server.port='http://me:hunter2@there:1/'"])
    assert "hunter2" not in str(caught.value)
    assert "http://...@there:1/" in str(caught.value)


texts = st.text(st.characters(codec="utf-8"), max_size=12)
made = st.builds(
    Everything,
    model=st.none() | texts,
    servers=st.lists(texts, max_size=3),
    server=st.builds(
        Server,
        port=st.integers(14, 99999),
        cap=st.none() | st.floats(1, 9),
        names=st.lists(texts, max_size=2),
    ),
    wing=st.builds(
        Wing, inner=st.builds(Inner, depth=st.floats(allow_nan=False)), flag=st.booleans()
    ),
)


@settings(max_examples=80, deadline=None)
@given(made)
def test_settings_survive_being_written_and_read(value: Everything) -> None:
    with pytest.MonkeyPatch.context() as patch:
        text = to_toml(value)
        patch.setattr("agentloop.config._read_toml", lambda file, where: tomllib.loads(text))
        assert load_settings(Everything, ["unused.toml"]) == value


def test_none_is_nothing_where_nothing_can_be(tmp_path: Path) -> None:
    path = file(tmp_path, "1.toml", 'model = "none"\nserver.cap = "none"')
    got = load_settings(Everything, [path])
    assert (got.model, got.server.cap) == ("none", None)
    assert load_settings(Everything, [path], ["server.cap=3"]).server.cap == 3
    assert load_settings(Everything, overrides=["server.cap=none"]).server.cap is None
    with pytest.raises(SettingsError, match=r"server\.port: .*not 'none'"):
        load_settings(Everything, overrides=["server.port=none"])


def test_token_is_not_written_out_nor_replaced_by_asterisks() -> None:
    text = to_toml(Everything(server=Server(token=pydantic.SecretStr("hunter2"))))
    assert "hunter2" not in text
    assert "token" not in text


def test_stages_name_can_be_said_on_the_command_line(tmp_path: Path) -> None:

    file = tmp_path / "run.toml"
    file.write_text('[stages."warm up"]\nsteps = 1\n', "utf-8")
    with pytest.raises(SettingsError, match=r"stages\.warm up"):
        load_settings(TrainSettings, [file])


class Item(pydantic.BaseModel):
    SHORT_FORM: ClassVar = "name"
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = ""
    weight: float | None = pydantic.Field(1.0, gt=0)
    args: dict[str, Any] = pydantic.Field(default_factory=dict)


class WithItems(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    items: list[Item] = pydantic.Field(default_factory=list, description="Items.")


def test_list_of_tables_is_read_from_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[[items]]\nname = "a"\nweight = "none"\n[items.args]\nx = [1, "y"]\n'
    text += '[[items]]\nname = "b"\n'
    path = file(tmp_path, "items.toml", text)
    first, second = load_settings(WithItems, [path]).items
    assert (first.name, first.weight, first.args) == ("a", None, {"x": [1, "y"]})
    assert (second.name, second.weight) == ("b", 1)
    assert load_settings(WithItems, [path], ["items=['c']"]).items == [Item(name="c")]
    assert load_settings(WithItems, [], ["items=[{name='c', weight=2}]"]).items[0].weight == 2
    monkeypatch.setenv("AGENTLOOP_ITEMS", '["d", {"name": "e", "args": {"x": null}}]')
    settings = load_settings(WithItems)
    assert [item.name for item in settings.items] == ["d", "e"]
    assert [*describe_settings(WithItems)] == [("items", "[]", "Items.")]


def test_list_of_tables_can_be_written_and_read_back(tmp_path: Path) -> None:
    items = [Item(name="a", args={"x": {"y": [1, "z"]}}), Item(weight=0.5)]
    path = file(tmp_path, "items.toml", to_toml(WithItems(items=items)))
    assert load_settings(WithItems, [path]).items == items


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("items=[{nmae='a'}]", "unknown setting 'items.0.nmae' .did you mean 'items.0.name'"),
        ("items=[{}, {weight=0}]", r"items\.1\.weight: .*greater than 0.*from override"),
        ("items=a", r"'items' is a list of tables: write \[\[items\]\]"),
        ("items=[3]", r"'items' is a list of tables"),
        ("items.name=a", r"'items' is a list of tables"),
    ],
)
def test_errors_name_the_item_of_a_list(override: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(WithItems, overrides=[override])


def test_older_run_may_name_removed_settings(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[weights]\npause = "retract"\n[ranks]\nport = 29500\n')
    assert load_settings(TrainSettings, [config]) == load_settings(TrainSettings)
    assert load_settings(TrainSettings, base=load_known(TrainSettings, config)) == TrainSettings()
    config.write_text('[weights]\npause = "in_place"\n')
    with pytest.raises(SettingsError, match=r"'weights\.pause' was removed and is now always"):
        load_settings(TrainSettings, [config])
    with pytest.raises(SettingsError, match=r"'ranks\.port' was removed$"):
        load_settings(TrainSettings, overrides=["ranks.port=29500"])
