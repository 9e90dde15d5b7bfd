"""FernetCodec: the built-in encryption of payload, with the package ``cryptography``."""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

_KEY_ID_CHARACTERS = 8
_DIGEST_PURPOSE = b"digests of requests"


class FernetCodec:
    """Encrypts payload with Fernet: AES-128 in CBC mode, authenticated by HMAC-SHA256.

    The first key encrypts; all keys decrypt. To rotate keys, first add the new key behind the old one in
    every process. Then move the new key to the first position. Remove the old key when no stored task is
    encrypted with it any more. Needs the package ``cryptography``: ``pip install
    '/path/to/horsies[encryption]'``. Make a key with ``FernetCodec.new_key()``.

    Example:
        codec = FernetCodec(os.environ["PAYLOAD_KEYS"].split(","))
        app = Horsies(AppConfig(broker=PostgresConfig.from_env(codec=codec)))
    """

    __slots__ = ("_digest_keys", "_first", "_keys", "key_id")

    def __init__(self, keys: Sequence[str]) -> None:
        keys = [keys] if isinstance(keys, str) else list(keys)
        if not keys:
            raise ValueError(
                "FernetCodec needs at least one key; make one with FernetCodec.new_key()"
            )
        self._keys: Mapping[str, Fernet] = {
            _key_id(key): _fernet(key, place) for place, key in enumerate(keys, 1)
        }
        self.key_id: str = next(iter(self._keys))
        self._first = self._keys[self.key_id]
        self._digest_keys = {_key_id(key): _digest_key(key) for key in keys}

    @property
    def key_ids(self) -> Collection[str]:
        """The ids of all keys. An id is the start of the key's SHA-256 digest."""
        return self._keys.keys()

    @staticmethod
    def new_key() -> str:
        """Return a new random key, as text for an environment variable or a secret store."""
        return _class().generate_key().decode()

    def encode(self, data: bytes) -> str:
        """Encrypt with the first key."""
        return self._first.encrypt(data).decode()

    def decode(self, key_id: str, text: str) -> bytes:
        """Decrypt with the key that has this id; raise ValueError if the text was changed."""
        try:
            return self._keys[key_id].decrypt(text)
        except Exception as error:
            raise ValueError(f"the payload was not encrypted with key {key_id}") from error

    def digest(self, key_id: str, data: bytes) -> bytes:
        """Return the HMAC-SHA256 of the data, with a key derived from the key that has this id."""
        return hmac.digest(self._digest_keys[key_id], data, "sha256")

    def __repr__(self) -> str:
        return f"FernetCodec(<{len(self._keys)} keys, the first is {self.key_id}>)"


def _key_id(key: str) -> str:
    return sha256(key.strip().encode()).hexdigest()[:_KEY_ID_CHARACTERS]


def _digest_key(key: str) -> bytes:
    return hmac.digest(urlsafe_b64decode(key.strip()), _DIGEST_PURPOSE, "sha256")


def _fernet(key: str, place: int) -> Fernet:
    try:
        return _class()(key.strip())
    except ValueError:
        pass  # the package's message does not contain the key, but the cause of the error might
    raise ValueError(
        f"key {place} of FernetCodec is not a Fernet key, 32 bytes in URL-safe base64; make one with "
        "FernetCodec.new_key()"
    )


def _class() -> type[Fernet]:
    try:
        from cryptography.fernet import Fernet
    except ImportError as error:
        raise ImportError(
            "FernetCodec needs the package cryptography: pip install '/path/to/horsies[encryption]'"
        ) from error
    return Fernet
