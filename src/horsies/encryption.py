"""Payload as it is stored: the texts of arguments, results, steps, signals and logs, encrypted or plain.

An encrypted text is still JSON, because functions in the database combine texts without parsing them:
the value of a signal becomes an argument, the results of items become a list. Decryption therefore
replaces encrypted values at any place in a text. A value without a known key stays encrypted.

Encrypted values are recognized by a mark. ``unmarked`` escapes the mark in the values of users, so every
value with the mark is encrypted.

A large text may be kept in a store. The row then has a reference with the same mark and the name of the
store in place of a key, so that code that copies, masks or holds encrypted values treats references in
the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from hashlib import sha256
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

# These types annotate the parameters and columns of a statement that contain payload; see ``Statement``.
# With ``PayloadLines``, each line is the payload of one row. Columns for display (JSON and other
# texts) are masked if they cannot be decrypted. Columns that a search compares are masked too, but
# if their store does not respond, the search fails, because it would miss rows.
Payload: TypeAlias = str
PayloadLines: TypeAlias = str
ShownPayload: TypeAlias = str
SearchedPayload: TypeAlias = str
ShownText: TypeAlias = str

# These types annotate the id of the task or run that owns a statement's payload, if large payload
# may be kept in a store. With ``OwnerLines``, each line is the id for one row.
Owner: TypeAlias = str
OwnerLines: TypeAlias = str

ENCRYPTED: Final = "encrypted"
STORED_ELSEWHERE: Final = "stored elsewhere"
# The prefix of a store's name in a reference. In an encrypted value, a key's id is in the same place;
# such an id never starts with this character.
_STORE = "@"
_MARK = "__horsies_encrypted__"
_MEMBER = f'"{_MARK}":"'
_HEAD = "{" + _MEMBER
# The same member in another spelling, for JSON readers; its text does not contain the mark.
_ESCAPED_MEMBER = _MEMBER.replace("_", "\\u005f", 1)
# Matches the text before the mark in an encrypted error, whose code is readable.
_ERROR = re.compile(
    r'\{"error_code":(?P<code>"(?:[^"\\]|\\.)*"|\{[^{}]*\}|null),"message":"[^"]*","data":null,'
    r'"exception":null,\Z'
)
_ERROR_HEAD = '{"error_code":'
_PLAIN = frozenset({"[]", "{}", "null", ""})
_PLAIN_CHARACTERS_MAX = 4
_KEY_ID_CHARACTERS_MAX = 32
# The maximum number of bytes of a character in UTF-8.
_BYTES_MAX = 4
_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
_OK, _ERR = '{"ok":', '{"err":'
# The prefix of a keyed digest, and the length of any digest: keyed digests are shortened to the
# length of SHA-256.
_KEYED, _DIGEST_CHARACTERS = "k", 64


@runtime_checkable
class PayloadCodec(Protocol):
    """Encrypts and decrypts payload. ``FernetCodec`` is built in; write your own for keys in a key service.

    Its methods are called in producers, workers and their children, from several threads. A codec may
    also have ``digest(key_id, data)``, which returns at least 16 bytes. The bytes must depend only on
    the key and the data, and reveal neither. Repeated requests are then recognised by this digest,
    otherwise by SHA-256. With SHA-256, anyone who can read the tables can test guesses of small
    arguments.

    Example:
        class Reversed:
            key_id, key_ids = "r1", ("r1",)

            def encode(self, data: bytes) -> str:
                return data[::-1].hex()

            def decode(self, key_id: str, text: str) -> bytes:
                return bytes.fromhex(text)[::-1]
    """

    @property
    def key_id(self) -> str:
        """The id of the key that ``encode`` uses: 1 to 32 letters, digits, ``-``, ``_`` or ``.``."""

    @property
    def key_ids(self) -> Collection[str]:
        """The ids of all keys that ``decode`` has. A worker holds a task that needs another key."""

    def encode(self, data: bytes) -> str:
        """Return the encrypted text, in printable ASCII without quotes and backslashes."""

    def decode(self, key_id: str, text: str) -> bytes:
        """Return the data that was passed to ``encode``; raise ValueError if the text was changed."""


@runtime_checkable
class _MakesDigests(Protocol):
    """A codec that can make keyed digests."""

    @property
    def key_id(self) -> str: ...

    @property
    def key_ids(self) -> Collection[str]: ...

    def digest(self, key_id: str, data: bytes) -> bytes: ...


class CodecFailed(Exception):
    """The application's codec raised an exception, which is the cause of this exception. The message
    does not quote the cause, because it may contain payload.
    """

    def __init__(self, method: str, cause: Exception) -> None:
        super().__init__(
            f"The payload cannot be encrypted: {method} of the codec in PostgresConfig raised "
            f"{type(cause).__name__}; nothing was stored."
        )
        self.__cause__ = cause


class HasCodec(Protocol):
    """A configuration with an optional codec."""

    @property
    def codec(self) -> PayloadCodec | None:
        """The codec, or None if payload is not encrypted."""

    @property
    def encrypt_errors(self) -> bool:
        """Whether the codec also encrypts the messages of errors."""

    @property
    def store(self) -> object:
        """The store that keeps large payload, or None."""


class Keeper(Protocol):
    """Keeps large payload outside the task rows."""

    above_bytes: int
    store_ids: Collection[str]

    def put(self, owner_id: str, data: bytes) -> tuple[str, str]:
        """Keep an object that belongs to a task or run, and return the store's id and the object's name.
        Raises OperationalError if the store does not accept the object.
        """

    def get(self, store_id: str, name: str) -> bytes | None:
        """Return an object, or None if the store does not have it. Raises OperationalError if the store
        does not respond.
        """


class Plain(str):
    """A payload text that is stored in readable form, because the database reads it."""

    __slots__ = ()


class Payloads:
    """Converts the texts of one installation to and from their stored form."""

    __slots__ = ("_codec", "_encrypts_errors", "_keeper", "key_ids")

    def __init__(
        self,
        codec: PayloadCodec | None,
        *,
        encrypt_errors: bool = True,
        keeper: Keeper | None = None,
    ) -> None:
        self._codec = codec
        self._encrypts_errors = encrypt_errors and codec is not None
        self._keeper = keeper
        keys = () if codec is None else codec.key_ids
        stores = () if keeper is None else [f"{_STORE}{one}" for one in keeper.store_ids]
        # The ids of the keys and stores with which this process can read payload.
        self.key_ids: Final = frozenset([*keys, *stores])

    @classmethod
    def of(cls, config: HasCodec, keeper: Keeper | None = None) -> Payloads | None:
        """Return the object for a configuration, or None if it has neither a codec nor a store."""
        if config.codec is None and config.store is None:
            return None
        return cls(config.codec, encrypt_errors=config.encrypt_errors, keeper=keeper)

    @property
    def has_store(self) -> bool:
        """Whether reading or storing a text may need a request to an object store."""
        return self._keeper is not None

    def encrypt(self, text: str) -> str:
        """Return the text to store; return empty arguments, null and encrypted texts unchanged."""
        # Cache only short texts, because hashing a long text would take as long as authenticating
        # it.
        is_plain = len(text) <= _PLAIN_CHARACTERS_MAX and text in _PLAIN
        if self._codec is None or is_plain or type(text) is Plain or text.startswith(_HEAD):
            return text
        return f'{_HEAD}{self._token(self._codec, text)}"}}'

    def encrypt_lines(self, text: str) -> str:
        """Return the texts to store for several rows, one in each line."""
        return "\n".join([self.encrypt(line) for line in text.split("\n")])

    def stored(self, text: str, owner_id: str) -> str:
        """Return the text to store in a row of this task or run; a large text is kept in the store and
        becomes a reference.
        """
        text = self.encrypt(text)
        if not self._may_be_large(text) or type(text) is Plain or self._keeper is None:
            return text
        data = text.encode("utf-8", "surrogatepass")
        if len(data) <= self._keeper.above_bytes:
            return text
        store_id, name = self._keeper.put(owner_id, data)
        return f'{_HEAD}{_STORE}{store_id}:{name}.{sha256(data).hexdigest()}"}}'

    def stored_lines(self, text: str, owner_ids: str) -> str:
        """Return the texts to store in several rows; texts and owners have one line for each row."""
        lines, owners = text.split("\n"), owner_ids.split("\n")
        return "\n".join(
            [self.stored(line, owner) for line, owner in zip(lines, owners, strict=True)]
        )

    def _may_be_large(self, text: str) -> bool:
        return self._keeper is not None and len(text) * _BYTES_MAX > self._keeper.above_bytes

    def encrypt_result(
        self, text: str, owner_id: str | None = None, *, by_element: bool = False
    ) -> str:
        """Return a result in its stored form.

        Its value is encrypted, or all of its error except the code. A large value is kept in the store.
        With ``by_element``, the elements of a list are stored one by one, for a map that creates a task
        per element.
        """
        stored = self.encrypt if owner_id is None else partial(self.stored, owner_id=owner_id)
        if self._codec is None and not self._may_be_large(text):
            return text
        if text.startswith(_OK):
            value = text[len(_OK) : -1]
            if by_element and (elements := _elements(value)) is not None:
                return f"{_OK}[{','.join([stored(one) for one in elements])}]}}"
            return f"{_OK}{stored(value)}}}"
        if text.startswith(_ERR) and self._codec is not None:
            return f"{_ERR}{self._encrypted_error(self._codec, text[len(_ERR) : -1])}}}"
        return text

    def encrypt_message(self, text: str | None) -> str | None:
        """Return an error's message in its stored form."""
        return self.encrypt(unmarked(text)) if text and self._encrypts_errors else text

    def decrypt(self, text: str) -> str:
        """Return a stored text with all its values decrypted; values with unknown keys stay encrypted."""
        return _replaced(text, self._decrypted) if _MARK in text else text

    @staticmethod
    def _token(codec: PayloadCodec, text: str) -> str:
        try:
            encrypted = codec.encode(text.encode("utf-8", "surrogatepass"))
        except Exception as error:  # The application's codec may raise any exception.
            raise CodecFailed("encode()", error) from error
        return f"{codec.key_id}:{encrypted}"

    def _encrypted_error(self, codec: PayloadCodec, text: str) -> str:
        if next(_encrypted_values(text), None) is not None:
            return text
        try:
            error = json.loads(text)
        except RecursionError:  # The text is nested too deeply for this reader.
            return self.encrypt(text)
        if not isinstance(error, dict) or "error_code" not in error:
            return self.encrypt(text)  # The error is a value of the application's own type.
        if self._encrypts_errors:
            return (
                f'{{"error_code":{_written(error["error_code"])},"message":"{ENCRYPTED}","data":null,"exception":null,'
                f'"{_MARK}":"{self._token(codec, text)}"}}'
            )
        if error.get("data") is None:
            return text
        parts = {name: unmarked(_written(value)) for name, value in error.items()}
        parts["data"] = self.encrypt(parts["data"])
        members = [f"{_written(name)}:{part}" for name, part in parts.items()]
        return f"{{{','.join(members)}}}"

    def _decrypted(self, found: _Found) -> str | None:
        if found.key_id not in self.key_ids:
            return None
        if found.key_id.startswith(_STORE):
            return self._fetched(found)
        try:
            data = b"" if self._codec is None else self._codec.decode(found.key_id, found.text)
            return data.decode("utf-8", "surrogatepass")
        except Exception:  # The text was changed, or the application's codec failed.
            return None

    def _fetched(self, found: _Found) -> str | None:
        """Return the decrypted text of a reference, or None if the store does not have it unchanged."""
        name, _, digest = found.text.partition(".")
        keeper = self._keeper
        data = None if keeper is None else keeper.get(found.key_id.removeprefix(_STORE), name)
        if data is None or sha256(data).hexdigest() != digest:
            return None
        return self.decrypt(data.decode("utf-8", "surrogatepass"))


class Digests:
    """Computes the digests that identify repeated requests, with SHA-256 or with the codec's keyed
    digest.
    """

    __slots__ = ("_codec",)

    def __init__(self, codec: PayloadCodec | None = None) -> None:
        self._codec = codec if isinstance(codec, _MakesDigests) else None

    def of(self, data: bytes) -> str:
        """Return the digest to store with a request."""
        codec = self._codec
        return sha256(data).hexdigest() if codec is None else _keyed(codec, codec.key_id, data)

    def of_each(self, requests: Iterable[bytes]) -> list[str]:
        """Return the digests to store with several requests."""
        if self._codec is None:
            return [sha256(data).hexdigest() for data in requests]
        return [self.of(data) for data in requests]

    def known(self, data: bytes) -> tuple[str, ...]:
        """Return the digest to store with a request, then all other digests with which an equal request
        may have been stored: under another key, without a codec, or by a send from SQL.
        """
        codec = self._codec
        if codec is None:
            return (self.of(data),)
        others = [one for one in codec.key_ids if one != codec.key_id]
        keyed = [_keyed(codec, one, data) for one in (codec.key_id, *others)]
        return (*keyed, sha256(data).hexdigest())


def _keyed(codec: _MakesDigests, key_id: str, data: bytes) -> str:
    try:
        return f"{_KEYED}{codec.digest(key_id, data).hex()}"[:_DIGEST_CHARACTERS]
    except Exception as error:  # the application's code may raise anything
        raise CodecFailed("digest()", error) from error


def is_keyed(digest: str | None) -> bool:
    """Return whether a stored digest is keyed, so that a comparison needs its key."""
    return digest is not None and digest.startswith(_KEYED)


def unmarked(text: str) -> str:
    """Return the JSON text of a user's value with the mark escaped; JSON readers get the same value."""
    return text.replace(_MEMBER, _ESCAPED_MEMBER)


def is_opaque(config: HasCodec) -> bool:
    """Return whether the database cannot search an application's stored payload."""
    return config.codec is not None or config.store is not None


def store_of(key_id: str) -> str | None:
    """Return the name of the store if this is the id of a store in a reference, or None for the id of a
    key.
    """
    return key_id.removeprefix(_STORE) if key_id.startswith(_STORE) else None


def missing_key(*texts: str) -> str | None:
    """Return the id of a key or store that is missing to read these texts, or None if they are readable."""
    for text in texts:
        if _MARK in text and (found := next(_encrypted_values(text), None)) is not None:
            return found.key_id
    return None


def is_encrypted(text: str) -> bool:
    """Return whether a text, or the beginning of a text, is encrypted as a whole.

    For a reference, return False, because the reference does not show whether its object is encrypted.
    """
    return text.startswith(_HEAD) and not text.startswith(_STORE, len(_HEAD))


def masked(text: str) -> str:
    """Return a text for display, with "encrypted" or "stored elsewhere" in place of encrypted or
    separately stored values.
    """
    return _replaced(text, _mask) if _MARK in text else text


def masked_text(text: str) -> str:
    """Mask a text that is not JSON and may have been cut off; see ``masked``."""
    if text.startswith(f"{_HEAD}{_STORE}"):
        return STORED_ELSEWHERE
    return ENCRYPTED if is_encrypted(text) else text


def _mask(found: _Found) -> str:
    if found.is_open:
        return f'{{"{ENCRYPTED}":true}}'
    if found.key_id.startswith(_STORE):
        return f'"{STORED_ELSEWHERE}"'
    if found.code is None:
        return f'"{ENCRYPTED}"'
    return f'{{"error_code":{found.code},"message":"{ENCRYPTED}","data":null,"exception":null}}'


class _Found(NamedTuple):
    """An encrypted value in a text: a whole value, the start of an object to which a map has added its
    element (``is_open``), or an error with a readable code.
    """

    start: int
    end: int
    key_id: str
    text: str
    is_open: bool
    code: str | None


def _encrypted_values(text: str) -> Iterator[_Found]:
    """Yield the encrypted values in a text.

    They are found by searching for fixed strings, because a regular expression would read megabytes of
    text character by character.
    """
    done = 0
    while (place := text.find(_MEMBER, done)) > 0:
        first = place + len(_MEMBER)
        last = text.find('"', first)
        following = text[last + 1 : last + 2]
        colon = text.find(":", first, first + _KEY_ID_CHARACTERS_MAX + 1)
        start, code = place - 1, None
        if text[start] == ",":
            start = max(text.rfind(_ERROR_HEAD, done, place), done)
            error = _ERROR.match(text[start:place])
            code = None if error is None else error["code"]
        if last < 0 or not first < colon < last or (code is None and text[start] != "{"):
            done = first
            continue
        done = last + 2
        token = text[colon + 1 : last]
        yield _Found(start, done, text[first:colon], token, following == ",", code)


def _replaced(text: str, change: Callable[[_Found], str | None]) -> str:
    """Replace the encrypted values of a text by the function's return values; None keeps a value."""
    parts: list[str] = []
    done = 0
    for found in _encrypted_values(text):
        value = change(found)
        if value is not None:
            parts += (text[done : found.start], value[:-1] + "," if found.is_open else value)
            done = found.end
    return "".join([*parts, text[done:]]) if parts else text


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _elements(text: str) -> list[str] | None:
    """Return the JSON texts of a list's elements exactly as written, or None for a value that is not a
    list.
    """
    if not text.startswith("["):
        return None
    try:
        return list(_each_element(text))
    except RecursionError:  # nested too deeply for this reader
        return None


def _each_element(text: str) -> Iterator[str]:
    start = _skipped(text, 1)
    while text[start] != "]":
        _, end = _DECODER.raw_decode(text, start)
        yield text[start:end]
        start = _skipped(text, end)
        if text[start] == ",":
            start = _skipped(text, start + 1)


def _skipped(text: str, start: int) -> int:
    while text[start] in _SPACE:
        start += 1
    return start
