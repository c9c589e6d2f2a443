"""The store contract, over every store."""

from __future__ import annotations

import pytest

from kserve.key import digest_of
from kserve.store.base import KINDS, MemoryStore, Store
from kserve.store.files import FileStore

KEY = "0a" * 32
CONTENTS = [b"", b"x", b"\0\xff\n\r\n" * 100, b"y" * (1 << 20)]


@pytest.fixture(params=["memory", "files"])
def store(request, own_place) -> Store:
    return MemoryStore() if request.param == "memory" else FileStore(own_place / "store", writable=True)


def name_of(kind: str, content: bytes) -> str:
    return f"{kind}/{KEY if kind == 'manifest' else digest_of(content)}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", CONTENTS, ids=len)
def test_what_was_put_is_what_comes_back(store, kind, content):
    store.put(name_of(kind, content), content)
    assert store.get(name_of(kind, content)) == content


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_was_never_put_is_none(store, kind):
    assert store.get(f"{kind}/{KEY}") is None


def test_a_manifest_is_replaced(store):
    store.put(f"manifest/{KEY}", b"one, and longer")
    store.put(f"manifest/{KEY}", b"two")
    assert store.get(f"manifest/{KEY}") == b"two"
    assert list(store.keys("manifest")) == [KEY]


def test_a_payload_may_be_put_again(store):
    for _ in range(2):
        store.put(name_of("payload", b"x"), b"x")
    assert store.get(name_of("payload", b"x")) == b"x"
    assert len(list(store.keys("payload"))) == 1


@pytest.mark.parametrize("kind", ["payload", "source"])
def test_content_under_another_digest_is_refused_and_not_kept(store, kind):
    name = name_of(kind, b"this")
    with pytest.raises(ValueError, match=digest_of(b"that")):
        store.put(name, b"that")
    assert store.get(name) is None
    assert list(store.keys(kind)) == []


def test_a_refused_put_leaves_the_record_that_was_there(store):
    name = name_of("payload", b"this")
    store.put(name, b"this")
    with pytest.raises(ValueError, match="digest"):
        store.put(name, b"that")
    assert store.get(name) == b"this"


@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_record_is_gone(store, kind):
    name = name_of(kind, b"x")
    store.put(name, b"x")
    store.delete(name)
    assert store.get(name) is None
    assert list(store.keys(kind)) == []


def test_deleting_what_is_not_there_is_no_error(store):
    store.delete(f"payload/{KEY}")


def test_a_deleted_record_can_be_put_again(store):
    name = name_of("payload", b"x")
    store.put(name, b"x")
    store.delete(name)
    store.put(name, b"x")
    assert store.get(name) == b"x"


def test_keys_lists_one_kind(store):
    contents = [bytes([i]) for i in range(20)]
    for content in contents:
        store.put(name_of("payload", content), content)
    store.put(name_of("source", b"source"), b"source")
    store.put(f"manifest/{KEY}", b"{}")
    assert sorted(store.keys("payload")) == sorted(digest_of(content) for content in contents)
    assert list(store.keys("source")) == [digest_of(b"source")]
    assert list(store.keys("manifest")) == [KEY]


def test_records_may_be_deleted_while_keys_are_listed(store):
    for i in range(20):
        store.put(name_of("payload", bytes([i])), bytes([i]))
    for key in store.keys("payload"):
        store.delete(f"payload/{key}")
    assert list(store.keys("payload")) == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "payload",
        "payload/",
        f"payload/{KEY[:-1]}",
        f"payload/{KEY}0",
        f"payload/{KEY.upper()}",
        f"payload/{KEY[:-1]}g",
        f"payload/{KEY}\n",
        f"payload//{KEY}",
        f"/payload/{KEY}",
        f"payload/../payload/{KEY}",
        f"../payload/{KEY}",
        f"other/{KEY}",
        f"Payload/{KEY}",
        f"payload/{KEY}.json",
        "payload/" + "../" * 21 + "x",
    ],
)
def test_a_name_of_another_form_is_refused_by_every_method(store, name):
    for call in (store.get, store.delete, lambda wrong: store.put(wrong, b"")):
        with pytest.raises(ValueError, match=r"record|kind"):
            call(name)


@pytest.mark.parametrize("kind", ["", "other", "../store/manifest", "manifest/0a", "*", "tmp", "quarantine"])
def test_an_unknown_kind_leads_nowhere(store, kind):
    store.put(f"manifest/{KEY}", b"{}")
    with pytest.raises(ValueError, match="kind"):
        list(store.keys(kind))
