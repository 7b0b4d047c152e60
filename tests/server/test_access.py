"""Keys, hosts and salts."""

import contextlib
import hmac
import itertools

import pytest
from umbel.lang.errors import ParameterError
from umbel.server.access import Access, Caller
from umbel.server.errors import HttpError

KEYS = {"team": "sk-one", "other": "sk-two"}


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer sk-one"}, {"authorization": "bearer  sk-one "}, {"x-api-key": "sk-one"}]
)
def test_a_key_is_taken_from_either_header(headers: dict[str, str]) -> None:
    assert Access(KEYS).caller(headers) == Caller("team")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Basic sk-one"},
        {"authorization": "Bearer sk-on"},
        {"x-api-key": "sk-oneé"},
        {"authorization": "Bearer sk-one", "x-api-key": "sk-two"},
    ],
)
def test_a_missing_or_wrong_key_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(HttpError) as caught:
        Access(KEYS).caller(headers)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_a_key_that_was_not_sent_is_told_from_one_that_is_wrong() -> None:
    with pytest.raises(HttpError, match="the request has no API key; send it as 'Authorization: Bearer KEY'"):
        Access(KEYS).caller({})
    with pytest.raises(HttpError, match="no such API key; send yours as"):
        Access(KEYS).caller({"x-api-key": "sk-three"})


@pytest.mark.parametrize("key", ["sk-one", "sk-two", "sk-admin", "sk-none", ""])
def test_every_key_is_compared_whichever_matches(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time of an answer does not tell which of the keys was met, and how far."""
    access = Access(KEYS, "sk-admin")
    compared: list[int] = []
    compare = hmac.compare_digest

    def counted(known: bytes, given: bytes) -> bool:
        compared.append(len(given))
        return compare(known, given)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    with contextlib.suppress(HttpError):
        access.caller({"x-api-key": key})
    assert compared == [32] * (len(KEYS) + 1), "digests of one length, one for each key"


def test_without_keys_every_caller_is_served_and_may_administer() -> None:
    assert Access().caller({}) == Caller(admin=True)
    assert Access().caller({"authorization": "Bearer whatever"}).name == ""


def test_without_keys_other_machines_are_served_and_nobody_administers() -> None:
    access = Access(loopback=False)
    assert access.caller({}) == Caller()
    assert not access.administered
    assert Access(admin_key="sk-admin", loopback=False).administered


def test_an_admin_key_alone_protects_the_administration_only() -> None:
    access = Access(admin_key="sk-admin")
    assert not access.caller({}).admin
    assert access.caller({"x-api-key": "sk-admin"}).admin


def test_with_keys_and_no_admin_key_there_is_no_administration() -> None:
    assert not Access(KEYS).administered
    assert Access(KEYS, "sk-admin").administered
    assert Access().administered


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"a": ""}, "empty"),
        ({"a": "with blank"}, "blanks"),
        ({"a": "x", "b": "x"}, "another name"),
        ({"a b": "x"}, "names no key"),
    ],
)
def test_keys_that_are_none_are_refused(keys: dict[str, str], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        Access(keys)


def test_no_tenant_has_the_name_of_the_admin() -> None:
    with pytest.raises(ParameterError, match="'admin' is the name of the admin key"):
        Access({"admin": "sk-tenant"}, "sk-admin")
    assert not Access({"admin": "sk-tenant"}).caller({"x-api-key": "sk-tenant"}).admin


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:30000", "127.0.0.1:1", "[::1]:30000", "[::1]", "10.0.0.7:80"])
def test_names_of_this_machine_and_addresses_are_served(host: str) -> None:
    Access().check_host(host)


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:30000", "localhost.evil.example", "127.0.0.1.evil"])
def test_another_name_in_the_host_header_is_refused(host: str) -> None:
    with pytest.raises(HttpError) as caught:
        Access().check_host(host)
    assert caught.value.status == 403
    Access(hosts=["*"]).check_host(host)


def test_a_page_of_another_site_is_refused_and_our_own_is_not() -> None:
    access = Access(hosts=["box.example"])
    for origin in (None, "http://localhost:30000", "https://box.example"):
        access.check_origin(origin)
    for origin in ("https://evil.example", "null"):
        with pytest.raises(HttpError, match="the Origin header names"):
            access.check_origin(origin)


def test_salts_of_different_pairs_differ_and_of_equal_ones_do_not() -> None:
    """Among them the pairs whose joined texts are equal, and an empty salt next to none."""
    access = Access(KEYS)
    pairs = [(Caller(name), salt) for name in ("a", "ab", "") for salt in (None, "", "c", "bc", "b")]
    salts = [access.salt(caller, salt) for caller, salt in pairs]
    assert salts == [access.salt(caller, salt) for caller, salt in pairs]
    for (one, first), (other, second) in itertools.combinations(zip(pairs, salts, strict=True), 2):
        assert first != second, (one, other)
    assert all(len(salt) == 43 for salt in salts if salt)
    assert access.salt(Caller(), None) == ""


def test_salts_follow_the_secret() -> None:
    one, two, three = Access(secret=b"1" * 32), Access(secret=b"1" * 32), Access()
    assert one.salt(Caller("a"), "x") == two.salt(Caller("a"), "x") != three.salt(Caller("a"), "x")


@pytest.mark.parametrize("salt", ["a b", "x" * 129, "ä", "../x", "a\n"])
def test_a_salt_that_is_none_is_refused(salt: str) -> None:
    with pytest.raises(ParameterError, match="cache_salt"):
        Access().salt(Caller(), salt)
