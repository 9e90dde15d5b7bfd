"""Encrypted texts: what is stored, what is read with a key, and what is shown without it."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horsies import (
    ConfigurationError,
    FernetCodec,
    PayloadCodec,
    PostgresConfig,
    TableStore,
    TaskError,
    TaskResult,
)
from horsies.codec.results import ResultCodec, encode_task_error
from horsies.encryption import Payloads, Plain, masked, masked_text, missing_key

OLD, NEW = FernetCodec.new_key(), FernetCodec.new_key()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


class Reversed:
    """A codec that hides nothing, so that tests see what it was given."""

    key_id, key_ids = "r1", ("r1",)

    def encode(self, data: bytes) -> str:
        return data[::-1].hex()

    def decode(self, key_id: str, text: str) -> bytes:
        return bytes.fromhex(text)[::-1]


PAYLOADS = Payloads(Reversed())
READABLE = Payloads(Reversed(), encrypt_errors=False)
OTHER = Payloads(FernetCodec(NEW))
MARKED = {"__horsies_encrypted__": "a:b"}
FAILED = '{"err":{"error_code":"BUSY","message":"no line for ada","data":{"name":"ada"},"exception":null}}'


@given(JSON)
def test_a_text_comes_back_unchanged(value: Any) -> None:
    text = json.dumps(value)
    stored = PAYLOADS.encrypt(text)
    assert PAYLOADS.decrypt(stored) == text
    json.loads(stored)


@given(st.lists(JSON), st.booleans())
def test_a_list_comes_back_unchanged_also_if_its_elements_are_encrypted_one_by_one(
    value: list[Any], by_element: bool
) -> None:
    text = f'{{"ok":{json.dumps(value)}}}'
    stored = PAYLOADS.encrypt_result(text, by_element=by_element)
    assert json.loads(PAYLOADS.decrypt(stored)) == json.loads(text)
    if by_element:
        assert len(json.loads(stored)["ok"]) == len(value)


@given(st.text(), st.text(), JSON)
def test_an_error_comes_back_unchanged_and_only_its_code_is_readable(
    code: str, message: str, data: Any
) -> None:
    error = {"error_code": code, "message": message, "data": data, "exception": None}
    text = f'{{"err":{json.dumps(error)}}}'
    stored = PAYLOADS.encrypt_result(text)
    assert PAYLOADS.decrypt(stored) == text
    shown = {"error_code": code, "message": "encrypted", "data": None, "exception": None}
    assert json.loads(masked(stored)) == {"err": shown}
    assert json.loads(READABLE.decrypt(READABLE.encrypt_result(text))) == {"err": error}


def test_the_message_of_an_error_stays_readable_if_the_configuration_says_so() -> None:
    stored = READABLE.encrypt_result(FAILED)
    assert "no line for ada" in stored
    assert missing_key(OTHER.decrypt(stored)) == "r1"
    assert json.loads(stored)["err"]["data"].keys() == {"__horsies_encrypted__"}
    assert READABLE.encrypt_message("no line") == "no line"


def test_an_error_of_the_applications_own_type_is_encrypted_as_a_whole() -> None:
    stored = PAYLOADS.encrypt_result('{"err":{"reason":"ada"}}')
    assert masked(stored) == '{"err":"encrypted"}'
    assert PAYLOADS.decrypt(stored) == '{"err":{"reason":"ada"}}'


@pytest.mark.parametrize("text", ["[]", "{}", "null", "", Plain('"id"')])
def test_an_empty_text_and_one_that_the_database_reads_stay_as_they_are(text: str) -> None:
    assert PAYLOADS.encrypt(text) == text


def test_an_encrypted_text_is_not_encrypted_again() -> None:
    for text in (PAYLOADS.encrypt("[1]"), OTHER.encrypt("[1]")):
        assert PAYLOADS.encrypt(text) == text
    for text in (PAYLOADS.encrypt_result(FAILED), PAYLOADS.encrypt_result('{"ok":1}')):
        assert PAYLOADS.encrypt_result(text) == text


@pytest.mark.parametrize("value", [MARKED, {"in": [MARKED]}, {**MARKED, "b": 1}, {'"': MARKED}])
def test_a_value_that_looks_like_an_encrypted_one_is_encrypted_and_read_like_any_other(
    value: Any,
) -> None:
    text = ResultCodec.of(Any, TaskError).encode(TaskResult(ok=value)).unwrap()
    assert json.loads(text) == {"ok": value}
    assert missing_key(text) is None
    for by_element in (False, True):
        stored = PAYLOADS.encrypt_result(text, by_element=by_element)
        assert "a:b" not in stored
        assert missing_key(stored) == "r1"
        assert missing_key(PAYLOADS.decrypt(stored)) is None
    error = TaskError(error_code="BUSY", message=json.dumps(MARKED), data=value, exception=MARKED)
    for payloads in (PAYLOADS, READABLE):
        read = payloads.decrypt(payloads.encrypt_result(encode_task_error(error)))
        assert json.loads(read)["err"]["data"] == value
        assert missing_key(read) is None
    message = PAYLOADS.encrypt_message('{"__horsies_encrypted__":"a:b"}')
    assert message is not None
    assert "a:b" not in message


class Unreachable(Reversed):
    """Its keys cannot be read now."""

    def decode(self, key_id: str, text: str) -> bytes:
        raise ConnectionError("no key service")


def test_a_text_that_the_codec_fails_to_decrypt_stays_encrypted() -> None:
    stored = PAYLOADS.encrypt("[1]")
    assert Payloads(Unreachable()).decrypt(stored) == stored


def test_the_element_that_a_map_adds_to_encrypted_arguments_stays_beside_them() -> None:
    head, element = PAYLOADS.encrypt('{"greeting":"Hi"}'), PAYLOADS.encrypt('"ada"')
    stored = f'{head[:-1]},"name":{element}}}'
    assert PAYLOADS.decrypt(stored) == '{"greeting":"Hi","name":"ada"}'
    assert masked(stored) == '{"encrypted":true,"name":"encrypted"}'


def test_without_the_key_a_text_stays_as_it_is_and_names_the_key() -> None:
    stored = OTHER.encrypt('["ada"]')
    old = Payloads(FernetCodec([OLD]))
    assert old.decrypt(stored) == stored
    assert missing_key("[]", old.decrypt(stored)) == FernetCodec(NEW).key_id
    assert missing_key("[1]", "{}") is None
    assert masked(stored) == '"encrypted"'
    assert masked_text(stored[:60]) == "encrypted"
    assert masked_text("a message") == "a message"


def test_a_changed_text_is_not_read() -> None:
    stored = OTHER.encrypt('["ada"]')
    changed = stored.replace(stored[60], "A" if stored[60] != "A" else "B")
    assert OTHER.decrypt(changed) == changed


def test_a_value_that_is_nested_too_deeply_to_be_taken_apart_is_encrypted_as_a_whole() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    for text in (f'{{"ok":{deep}}}', f'{{"err":{deep}}}'):
        stored = PAYLOADS.encrypt_result(text, by_element=True)
        assert "[[" not in stored
        assert PAYLOADS.decrypt(stored) == text


def test_all_keys_decrypt_and_the_first_one_encrypts() -> None:
    before, after = FernetCodec([OLD, NEW]), FernetCodec([NEW, OLD])
    assert before.key_id != after.key_id
    assert set(before.key_ids) == set(after.key_ids)
    assert Payloads(after).decrypt(Payloads(before).encrypt("[1]")) == "[1]"
    assert Payloads(before).decrypt(Payloads(after).encrypt("[1]")) == "[1]"


def test_a_codec_never_shows_its_keys() -> None:
    codec = FernetCodec([NEW, OLD])
    config = PostgresConfig(database_url="postgresql://db/shop", codec=codec)
    for text in (repr(codec), str(codec), repr(config)):
        assert NEW not in text
        assert OLD not in text
    assert isinstance(codec, PayloadCodec)


@pytest.mark.parametrize(
    ("keys", "words"),
    [([], "at least one key"), (["hunter2"], "key 1 of FernetCodec is not a Fernet key")],
)
def test_a_wrong_key_is_refused_and_not_quoted(keys: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        FernetCodec(keys)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__context__ is None


class Nameless(Reversed):
    key_id, key_ids = "a key", ("a key",)


@pytest.mark.parametrize(
    ("codec", "words"),
    [(object(), "key_id, key_ids, encode and decode"), (Nameless(), "1 to 32 letters")],
)
def test_a_wrong_codec_is_refused(codec: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        PostgresConfig(database_url="postgresql://db/shop", codec=codec)


class Memory:
    """Keeps large payload in this process; ``owners`` are the tasks of its objects."""

    above_bytes = 20
    store_ids: Collection[str] = ("table",)

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.owners: list[str] = []

    def put(self, owner_id: str, data: bytes) -> tuple[str, str]:
        self.owners.append(owner_id)
        name = f"o{len(self.owners)}"
        self.objects[name] = data
        return "table", name

    def get(self, store_id: str, name: str) -> bytes | None:
        return self.objects.get(name)


@pytest.mark.parametrize("codec", [None, Reversed()], ids=["plain", "encrypted"])
@pytest.mark.parametrize("by_element", [True, False])
def test_only_large_values_are_kept_elsewhere_and_come_back_unchanged(
    codec: Any, by_element: bool
) -> None:
    memory = Memory()
    payloads = Payloads(codec, keeper=memory)
    large, small = json.dumps("ä" * 50, ensure_ascii=False), '"b"'
    result = f'{{"ok":[{large},{small}]}}'
    stored = payloads.encrypt_result(result, "t1", by_element=by_element)
    assert payloads.decrypt(stored) == result
    assert json.loads(stored).keys() == {"ok"}
    lines = payloads.stored_lines(f"{large}\n{small}", "t1\nt2")
    assert payloads.decrypt(lines) == f"{large}\n{small}"
    assert set(memory.owners) == {"t1"} if codec is None else {"t1"} <= set(memory.owners)
    assert any("ä".encode() in data for data in memory.objects.values()) is (codec is None)
    assert payloads.key_ids == {"@table", *([] if codec is None else ["r1"])}


def test_a_lost_or_changed_object_is_not_read_and_masked() -> None:
    memory = Memory()
    payloads = Payloads(None, keeper=memory)
    stored = payloads.stored(json.dumps("a" * 50), "t1")
    assert missing_key(stored) == "@table"
    assert masked(f'{{"ok":{stored}}}') == '{"ok":"stored elsewhere"}'
    assert masked_text(stored) == "stored elsewhere"
    assert PAYLOADS.decrypt(stored) == stored  # without a store
    memory.objects["o1"] = b'"b"'
    assert payloads.decrypt(stored) == stored
    memory.objects.clear()
    assert payloads.decrypt(stored) == stored


class Store:
    """A store of the application, with a name that may be wrong."""

    def __init__(self, store_id: str) -> None:
        self.store_id = store_id

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes | None: ...

    def delete(self, names: Collection[str]) -> None: ...


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"store": object()}, "must be TableStore\\(\\), or have store_id, put, get and delete"),
        ({"store": TableStore}, "must be TableStore\\(\\)"),
        ({"store": Store("my store")}, "1 to 31 letters"),
        ({"store": Store("table")}, "or is 'table'"),
        ({"store": TableStore(), "store_above_bytes": 10}, "store_above_bytes"),
    ],
)
def test_a_wrong_store_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        PostgresConfig(database_url="postgresql://db/shop", **settings)
    assert PostgresConfig(database_url="postgresql://db/shop", store=Store("s3")).store is not None
