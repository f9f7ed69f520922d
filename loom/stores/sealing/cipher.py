"""AES-256-GCM over the JSON of one value, and the envelope that stands in its place (system.md 0, 2).

A field's envelope is ``{"__loomEnc": "loom/aes-256-gcm", "kid": ..., "iv": ..., "ct": ...}``; a whole state's has
``aad`` beside, which names the context it is bound to (system.md 3.1). ``kid`` is the key's opaque id; ``iv`` and ``ct``
(with its tag) are base64.
"""

from __future__ import annotations

import base64
import binascii
from binascii import b2a_base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from cryptography.exceptions import InvalidTag

from loom.errors import DecodeError
from loom.kernel.guard import SEALED_KEY
from loom.schemas.payload import dump, load
from loom.stores.sealing.nonces import NONCE_BYTES

if TYPE_CHECKING:
    from loom.schemas.envelope import Json
    from loom.stores.keys.contract import DataKey, KeySet

CIPHER: Final = "loom/aes-256-gcm"
_FIELDS: Final = frozenset({SEALED_KEY, "kid", "iv", "ct"})
_BOUND_FIELDS: Final = _FIELDS | {"aad"}
_TAG_BYTES: Final = 16
_NONCE_TEXT: Final = NONCE_BYTES // 3 * 4


class NotOpened(Exception):  # noqa: N818 - a signal between the parts of this package, never a caller's
    """A value was not opened; says nothing of why but whether the key of its id was at hand (then it was changed)."""

    def __init__(self, *, had_key: bool) -> None:
        super().__init__()
        self.had_key = had_key


def seal_value(
    key: DataKey, value: Json, nonce: bytes, *, aad: tuple[str, str] | None = None
) -> dict[str, Json]:
    """Return the envelope of a value. ``aad`` is the name and the content of what it is bound to.

    Raises:
        InvalidInputError: the value is no JSON.
    """
    bound = None if aad is None else aad[1].encode()
    sealed = key.aead.encrypt(nonce, dump(value, "a sealed field"), bound)
    # Twelve bytes fill their base64 without padding, so both can be written at once.
    text = b2a_base64(nonce + sealed, newline=False).decode()
    envelope: dict[str, Json] = {
        SEALED_KEY: CIPHER,
        "kid": key.id,
        "iv": text[:_NONCE_TEXT],
        "ct": text[_NONCE_TEXT:],
    }
    if aad is not None:
        envelope["aad"] = aad[0]
    return envelope


def is_ours(value: Json, *, bound: bool = False) -> bool:
    """Whether a value is an envelope of this cipher, in shape."""
    fields = _BOUND_FIELDS if bound else _FIELDS
    return (
        isinstance(value, Mapping)
        and value.keys() == fields
        and value[SEALED_KEY] == CIPHER
        and all(isinstance(part, str) for part in value.values())
    )


def open_value(keys: KeySet | None, envelope: Json, *, aad: tuple[str, str] | None = None) -> Json:
    """Return the value of an envelope.

    Raises:
        NotOpened: it is none of ours, the key of its id is not among these, or it was changed or moved.
    """
    if not is_ours(envelope, bound=aad is not None) or (aad is not None and envelope["aad"] != aad[0]):
        raise NotOpened(had_key=False)
    key = None if keys is None else keys.find(envelope["kid"])
    if key is None:
        raise NotOpened(had_key=False)
    try:
        nonce = base64.b64decode(envelope["iv"], validate=True)
        sealed = base64.b64decode(envelope["ct"], validate=True)
        if len(nonce) != NONCE_BYTES or len(sealed) < _TAG_BYTES:
            raise NotOpened(had_key=True)
        return load(
            key.aead.decrypt(nonce, sealed, None if aad is None else aad[1].encode()),
            "a sealed field",
        )
    except (InvalidTag, binascii.Error, ValueError, DecodeError):
        raise NotOpened(had_key=True) from None
