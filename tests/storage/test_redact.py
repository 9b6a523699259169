"""Texts without secrets."""

from __future__ import annotations

from tplayout.storage.redact import Scrubber


def test_secrets_of_nested_options_are_hidden() -> None:
    options = {
        "key": "access-id",
        "client_kwargs": {"aws_secret_access_key": "top-secret", "region_name": "eu-north-1"},
        "headers": [{"Authorization": "bearer-xyz"}],
        "credentials": {"file": "/path/to/creds"},
        "endpoint_url": "http://host",
    }
    text = Scrubber(options)("access-id top-secret bearer-xyz /path/to/creds eu-north-1 http://host")
    assert text == "*** *** *** *** eu-north-1 http://host"


def test_a_secret_that_contains_another_is_hidden_whole() -> None:
    assert Scrubber({"key": "abcd", "secret": "abcdefgh"})("abcdefgh abcd") == "*** ***"


def test_parts_of_the_url_are_hidden() -> None:
    scrub = Scrubber({}, "sftp://some-user:some-pass@host/x?sig=signature")
    assert scrub("some-user some-pass signature host") == "*** *** *** host"


def test_short_values_hide_nothing() -> None:
    assert Scrubber({"key": "k", "secret": ""})("k is a key") == "k is a key"


def test_texts_are_one_line_and_not_endless() -> None:
    assert Scrubber({})("a\n  b\tc") == "a b c"
    assert len(Scrubber({})("x" * 10_000)) == 300


def test_a_scrubber_shows_nothing_of_its_own() -> None:
    assert "secret" not in repr(Scrubber({"secret": "secret-text"}))
