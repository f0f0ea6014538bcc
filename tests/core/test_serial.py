"""What a user names is read in one way: whole text in UTF-8 from a regular file, or one sentence that says what is in
the way."""

import os

import pytest

from workbench.core import Cluster, Job
from workbench.core.errors import ConfigError
from workbench.core.serial import from_builtins, from_json, read_text, read_toml, shown

DEEP = "[" * 100_000


def make(folder, name, data=b""):
    path = folder / name
    if name == "pipe":
        os.mkfifo(path)
    elif name == "loop":
        path.symlink_to(path)
    elif name == "folder":
        path.mkdir()
    elif data:
        path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("absent", b"", "no such file"),
        ("/dev/zero", b"", "It is a device"),
        ("pipe", b"", "It is a pipe"),
        ("folder", b"", "It is a folder"),
        ("loop", b"", "Too many levels of symbolic links"),
        ("n" * 300, b"", "File name too long"),
        ("zero\0byte", b"", "embedded null byte"),
        ("latin", b"a = '\xe9'", "not UTF-8 text: byte 5 is 0xe9"),
        ("large", b" " * 101, "larger than 100 bytes"),
    ],
)
def test_what_is_no_text_file_is_refused_and_named(tmp_path, name, data, found):
    with pytest.raises(ConfigError, match="Asked to read the plan '") as caught:
        read_text(make(tmp_path, name, data), "the plan", most_bytes=100)
    assert found in caught.value.found
    assert str(caught.value).isprintable()


def test_a_byte_order_mark_is_left_out(tmp_path):
    assert read_toml(make(tmp_path, "toml", b"\xef\xbb\xbfa = 1")) == {"a": 1}
    assert from_json(read_text(make(tmp_path, "json", b'\xef\xbb\xbf{"epochs": 2}'), "the job"), Job).epochs == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [("a = " + DEEP, "nested too deep"), ("a = 1" + 5000 * "0", "thousands of digits"), ("a = [1\n", "malformed")],
)
def test_toml_that_cannot_be_parsed(tmp_path, text, found):
    with pytest.raises(ConfigError, match=found):
        read_toml(make(tmp_path, "toml", text.encode()))


DEVICE = '{"name": "a", "flops_per_s": 1e9, "memory_bytes": %s, "link": {"bytes_per_s": 1e6}}'


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ('{"epochs": "six"}', Job, "epochs = 'six': Expected `int`, got `str`"),
        ('{"epochs": 1.5}', Job, "epochs = 1.5"),
        ('{"epochs": 1' + 5000 * "0" + "}", Job, "epochs: Integer value out of range"),
        ('{"learning_rate": 1e400}', Job, "learning_rate: Number out of range"),
        ('{"options": ' + DEEP, Job, "options: Expected `object`"),
        ('{"options": {"a": ' + DEEP, Job, "nested too deep"),
        ('{"name": "c", "devices": [' + DEVICE % '"much"' + "]}", Cluster, "devices[0].memory_bytes = 'much'"),
        ('{"epochs": 1', Job, "truncated"),
        (b'{"model": "\xe9\xe9"}', Job, "can't decode"),
        ("[]", Job, "Expected `object`, got `array`"),
    ],
)
def test_json_that_is_not_of_its_kind_quotes_what_was_found(text, kind, found):
    with pytest.raises(ConfigError, match=r"Asked to read 'mine\.json' as a ") as caught:
        from_json(text, kind, source="'mine.json'")
    assert found in caught.value.found


def test_builtins_are_answered_alike():
    with pytest.raises(ConfigError, match="epochs = 'six'"):
        from_builtins({"epochs": "six"}, Job, source="the widget")


def test_a_value_is_quoted_on_one_short_line():
    assert shown(10**400) == "a number of 401 digits"
    assert shown("red\x1b[31m\n") == r"red\x1b[31m\n"
    assert shown("n" * 300) == "n" * 80 + "... (300 characters)"


def test_a_field_that_a_part_does_not_have_is_refused():
    known = (
        '{"name": "two", "devices": [{"name": "a", "flops_per_s": 1e9, "memory_bytes": 1000, "link": {"bytes_per_s": '
        "1e6}}]}"
    )
    assert from_json(known, Cluster).devices[0].name == "a"
    for wrong, found in (("bytes_per_s", "byte_per_s"), ("flops_per_s", "flops"), ("devices", "device")):
        with pytest.raises(ConfigError) as caught:
            from_json(known.replace(f'"{wrong}": ', f'"{found}": 1, "{wrong}": '), Cluster)
        assert caught.value.found == f"This version knows no field '{found}' there." and wrong in caught.value.todo
