"""The typed readers: default, set, bad; and the refusal of what nobody reads."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from config import env
from config.settings_table import table
from tests.config.up import ROOT, manage


@pytest.fixture(autouse=True)
def _registry_unchanged(monkeypatch):
    monkeypatch.setattr(env, "SETTINGS", {})


class TestText:
    def test_default(self):
        assert env.text("ANDON_T", "d") == "d"

    def test_set(self, monkeypatch):
        monkeypatch.setenv("ANDON_T", " v ")
        assert env.text("ANDON_T", "d") == "v"

    def test_empty_is_not_set(self, monkeypatch):
        monkeypatch.setenv("ANDON_T", "")
        assert env.text("ANDON_T", "d") == "d"

    def test_from_a_file(self, monkeypatch, tmp_path):
        (tmp_path / "secret").write_text("from file\n")
        monkeypatch.setenv("ANDON_T_FILE", str(tmp_path / "secret"))
        assert env.text("ANDON_T", "d") == "from file"

    def test_a_missing_file_is_named(self, monkeypatch, tmp_path):
        monkeypatch.setenv("ANDON_T_FILE", str(tmp_path / "gone"))
        with pytest.raises(ImproperlyConfigured, match=r"ANDON_T_FILE: cannot read .*gone"):
            env.text("ANDON_T")

    def test_value_and_file_together_are_refused(self, monkeypatch, tmp_path):
        monkeypatch.setenv("ANDON_T", "v")
        monkeypatch.setenv("ANDON_T_FILE", str(tmp_path / "secret"))
        with pytest.raises(ImproperlyConfigured, match="set one of them"):
            env.text("ANDON_T")


class TestBoolean:
    def test_default(self):
        assert env.boolean("ANDON_B", True) is True
        assert env.boolean("ANDON_B", False) is False

    @pytest.mark.parametrize(
        ("value", "expected"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("No", False)]
    )
    def test_set(self, monkeypatch, value, expected):
        monkeypatch.setenv("ANDON_B", value)
        assert env.boolean("ANDON_B", not expected) is expected

    def test_bad(self, monkeypatch):
        monkeypatch.setenv("ANDON_B", "ja")
        with pytest.raises(ImproperlyConfigured, match="ANDON_B='ja': expected one of 1, 0, true"):
            env.boolean("ANDON_B", False)


class TestInteger:
    def test_default(self):
        assert env.integer("ANDON_I", 3, minimum=1, maximum=9) == 3

    @pytest.mark.parametrize("value", [1, 9])
    def test_set(self, monkeypatch, value):
        monkeypatch.setenv("ANDON_I", str(value))
        assert env.integer("ANDON_I", 3, minimum=1, maximum=9) == value

    @pytest.mark.parametrize(
        ("value", "said"), [("x", "a whole number"), ("0", "1 to 9"), ("10", "1 to 9"), ("2.5", "a whole")]
    )
    def test_bad(self, monkeypatch, value, said):
        monkeypatch.setenv("ANDON_I", value)
        with pytest.raises(ImproperlyConfigured, match=f"ANDON_I=.*{said}"):
            env.integer("ANDON_I", 3, minimum=1, maximum=9)


class TestChoice:
    def test_default(self):
        assert env.choice("ANDON_C", "a", ("a", "b")) == "a"

    def test_set(self, monkeypatch):
        monkeypatch.setenv("ANDON_C", "b")
        assert env.choice("ANDON_C", "a", ("a", "b")) == "b"

    def test_bad(self, monkeypatch):
        monkeypatch.setenv("ANDON_C", "c")
        with pytest.raises(ImproperlyConfigured, match="ANDON_C='c': expected one of a, b"):
            env.choice("ANDON_C", "a", ("a", "b"))


class TestWords:
    def test_default(self):
        assert env.words("ANDON_W", ["x"]) == ["x"]

    def test_set(self, monkeypatch):
        monkeypatch.setenv("ANDON_W", " a, ,b,")
        assert env.words("ANDON_W", ["x"]) == ["a", "b"]


class TestUnknown:
    def test_a_misspelt_variable_is_named_with_the_nearest_known_one(self):
        env.text("ANDON_DATABASE_URL")
        with pytest.raises(
            ImproperlyConfigured,
            match="ANDON_DATABSE_URL is not a setting of Andon: did you mean ANDON_DATABASE_URL",
        ):
            env.refuse_unknown({"ANDON_DATABSE_URL": "x", "HOME": "/"})

    def test_known_ones_their_files_and_other_programs_pass(self):
        env.text("ANDON_SECRET_KEY")
        env.refuse_unknown({"ANDON_SECRET_KEY_FILE": "/x", "ANDON_MODE": "act", "PATH": "/"}, {"ANDON_MODE"})

    def test_every_command_refuses_it(self, tmp_path):
        result = manage("check", ANDON_DATA_DIR=str(tmp_path), ANDON_PORTT="80")
        assert result.returncode != 0
        assert "ANDON_PORTT is not a setting of Andon: did you mean ANDON_PORT?" in result.stdout


def test_the_table_of_settings_is_the_one_in_the_docs(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert (ROOT / "docs" / "settings.md").read_text() == table()
    assert all(setting.about for setting in env.SETTINGS.values())


class TestProduction:
    def test_a_public_address_needs_a_secret_key(self, tmp_path):
        result = manage("check", ANDON_DATA_DIR=str(tmp_path), ANDON_PUBLIC_URL="https://andon.example.org")
        assert result.returncode != 0
        assert "ANDON_SECRET_KEY (or ANDON_SECRET_KEY_FILE) is required" in result.stdout

    def test_on_localhost_one_is_made_once_and_kept_private(self, tmp_path):
        assert manage("check", ANDON_DATA_DIR=str(tmp_path)).returncode == 0
        made = tmp_path / "secrets" / "secret-key"
        first = made.read_text()
        assert made.stat().st_mode & 0o777 == 0o600
        assert len(first.strip()) >= 50
        assert manage("check", ANDON_DATA_DIR=str(tmp_path)).returncode == 0
        assert made.read_text() == first

    @pytest.mark.parametrize("url", ["andon.example.org", "ftp://x", "https://x/andon"])
    def test_a_public_address_that_is_none_is_refused(self, tmp_path, url):
        result = manage("check", ANDON_DATA_DIR=str(tmp_path), ANDON_PUBLIC_URL=url)
        assert f"ANDON_PUBLIC_URL='{url}': expected http(s)://HOST" in result.stdout

    def test_a_bad_database_url_is_refused_without_printing_it(self, tmp_path):
        result = manage("check", ANDON_DATA_DIR=str(tmp_path), ANDON_DATABASE_URL="mysql://u:pa55@h/d")
        assert "ANDON_DATABASE_URL: expected postgresql://" in result.stdout
        assert "pa55" not in result.stdout

    def test_a_pool_below_the_threads_is_an_error(self, tmp_path):
        result = manage("check", ANDON_DATA_DIR=str(tmp_path), ANDON_DATABASE_POOL="3", ANDON_WEB_THREADS="8")
        assert result.returncode != 0
        assert "config.E001" in result.stdout
