"""Options are refused by name, and what is accepted is converted."""

import os
from pathlib import Path
from typing import Any

import pytest

from tplayout.errors import ConfigError
from tplayout.key_files import ENCRYPTION_KEY_ENV, SECRET_ENV
from tplayout_vllm.options import _NAMES, parse_options


def parse(**extra: Any) -> Any:
    return parse_options({"url": "file:///kv", **extra}, {})


def test_defaults() -> None:
    options = parse()
    assert (options.url, options.chunk_tokens, options.load_deadline) == ("file:///kv", None, 3.0)
    assert (options.staging_bytes, options.secret, options.strict) == (None, None, False)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"urll": "x"}, r"'urll' is no option.*did you mean 'url'"),
        ({"spam": 1}, r"'spam' is no option.*known are url"),
        ({"url": ""}, r"'url' is required"),
        ({"url": 3}, r"'url' is required"),
        ({"url": "file://var/cache/kv"}, r"kv_connector_extra_config: url .* write file:///var/cache/kv"),
        ({"url": "s3 ://bucket"}, r"kv_connector_extra_config: url .* is no scheme"),
        ({"chunk_tokens": 0}, r"'chunk_tokens' must be a whole number from 16"),
        ({"chunk_tokens": True}, r"'chunk_tokens' must be a whole number"),
        ({"chunk_tokens": "256"}, r"'chunk_tokens' must be a whole number"),
        ({"staging_bytes": "lots"}, r"'staging_bytes' must be a number of bytes"),
        ({"staging_bytes": -5}, r"'staging_bytes' must be a number of bytes"),
        ({"max_bytes": "lots"}, r"'max_bytes' must be a number of bytes"),
        ({"max_bytes": 1, "url": "s3://bucket/p"}, r"max_bytes holds for file:// stores only: leave it out, and bound"),
        ({"load_deadline_ms": 1.5}, r"'load_deadline_ms' must be a whole number"),
        ({"strict": "yes"}, r"'strict' must be true or false"),
        ({"storage_options": "a=b"}, r"'storage_options' must be an object"),
        ({"weights_label": " "}, r"'weights_label' must be a non-empty string"),
        ({"weights_label": "a\ud800"}, r"'weights_label' is no text"),
        ({"secret_key_file": "/nonexistent/key"}, r"'secret_key_file': key file /nonexistent/key cannot be read"),
        ({"secret_key_file": "/a\0b"}, r"'secret_key_file': .* that is no path"),
        ({"staging_bytes": "9" * 400 + "GiB"}, r"'staging_bytes' must be a number of bytes"),
        ({"staging_bytes": "\u0663GiB"}, r"'staging_bytes' must be a number of bytes"),
    ],
)
def test_wrong_options_are_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse(**extra)
    assert "\n" not in str(caught.value)


ODD = [
    [],
    {},
    0,
    -1,
    2**80,
    1.5,
    float("nan"),
    "",
    " ",
    "x",
    "\0",
    "\ud800",
    "a" * 5000,
    True,
    False,
    b"x",
    ["x"],
    {"a": 1},
]


@pytest.mark.parametrize("name", _NAMES)
def test_whatever_an_option_is_set_to_a_refusal_names_it_in_one_line(name: str) -> None:
    refusals = []
    for value in ODD:
        try:
            parse_options({"url": "file:///kv", name: value}, {})
        except ConfigError as error:
            refusals.append(str(error))
    assert len(refusals) >= len(ODD) // 2
    for line in refusals:
        assert line.startswith("kv_connector_extra_config: ")
        assert name in line
        assert "\n" not in line
        line.encode()  # as a log does


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        (4096, 4096),
        ("2GB", 2 * 10**9),
        ("80G", 80 << 30),
        ("8 g", 8 << 30),
    ],
)
def test_sizes(text: Any, nbytes: int) -> None:
    assert parse(staging_bytes=text, max_bytes=text).staging_bytes == nbytes
    assert parse(staging_bytes=text, max_bytes=text).max_bytes == nbytes


def test_secret_comes_from_a_file_or_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("file-secret-0123456789\n")
    options = parse(secret_key_file=str(tmp_path / "key"))
    assert options.secret == b"file-secret-0123456789"
    assert "secret-0123" not in repr(options)
    from_env = parse_options({"url": "memory://"}, {SECRET_ENV: "env-secret-0123456789"})
    assert from_env.secret == b"env-secret-0123456789"


def test_a_short_secret_is_refused_by_the_name_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("five!\n")
    with pytest.raises(ConfigError, match="'secret_key_file' holds a secret of 5 bytes, must have 16 or more") as one:
        parse(secret_key_file=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="TPLAYOUT_SECRET_KEY holds a secret of 5 bytes, must have 16 or more") as two:
        parse_options({"url": "memory://"}, {SECRET_ENV: "five!"})
    assert "five!" not in str(one.value) + str(two.value)


@pytest.mark.parametrize("name", ["secret_key_file", "encryption_key_file"])
def test_a_key_file_that_others_can_read_is_a_warning(tmp_path: Path, name: str) -> None:
    file = tmp_path / "key"
    file.write_text("ab" * 32)
    file.chmod(0o600)
    assert parse(**{name: str(file)}).warnings == ()
    file.chmod(0o644)
    (line,) = parse(**{name: str(file)}).warnings
    assert line.startswith(f"{name}: key file {file} has mode 0644")
    assert "abab" not in line


def test_an_empty_secret_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        parse(secret_key_file=str(tmp_path / "key"))


def test_the_encryption_key_comes_from_a_file_or_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    """[M46]"""
    text = "c0ffee" + "0123456789" * 5 + "00000000"
    (tmp_path / "key").write_text(f"{text}\n")
    from_file = parse(encryption_key_file=str(tmp_path / "key"))
    from_env = parse_options({"url": "memory://"}, {ENCRYPTION_KEY_ENV: text})
    for options in (from_file, from_env):
        assert options.encryption_key is not None
        assert options.encryption_key.reveal() == text
        assert "c0ffee" not in repr(options)
    assert parse_options({"url": "memory://"}, {ENCRYPTION_KEY_ENV: ""}).encryption_key is None


@pytest.mark.parametrize("text", ["", "c0ffee", "c0ffee" * 20, "x" * 64])
def test_what_is_no_encryption_key_is_refused_unseen(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(
        ConfigError, match=r"^kv_connector_extra_config: 'encryption_key_file'(: key file .* is empty| holds no)"
    ) as one:
        parse(encryption_key_file=str(tmp_path / "key"))
    assert not text or text not in str(one.value)
    with pytest.raises(ConfigError, match=r"'encryption_key_file': key file .* cannot be read"):
        parse(encryption_key_file=str(tmp_path / "none"))
    if text:
        with pytest.raises(ConfigError, match="TPLAYOUT_ENCRYPTION_KEY holds no encryption key") as one:
            parse_options({"url": "memory://"}, {ENCRYPTION_KEY_ENV: text})
        assert text not in str(one.value)


def test_credentials_in_the_wrong_place_are_not_repeated() -> None:
    for wrong in ("key=AKIAEXAMPLE", [["secret", "AKIAEXAMPLE"]]):
        with pytest.raises(ConfigError, match="'storage_options' must be an object") as raised:
            parse(storage_options=wrong)
        assert "AKIAEXAMPLE" not in str(raised.value)


def test_a_secret_of_the_environment_may_be_any_bytes() -> None:
    secret = b"sixteen bytes or more \xff\xfe"
    assert parse_options({"url": "file:///kv"}, {SECRET_ENV: os.fsdecode(secret)}).secret == secret
