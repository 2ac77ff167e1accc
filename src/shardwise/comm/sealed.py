"""Values in a store that anybody may reach: only those that a rank of the job has written are taken for such."""

from __future__ import annotations

import hashlib
import hmac


def seal(text: str, secret: str, key: str) -> str:
    """Return what `unsealed` takes, and only under the same key.

    Args:
        text: the value.
        secret: of the job.
        key: under which the value will be stored.
    """
    return _code(text, secret, key) + text


def unsealed(data: bytes, secret: str, key: str) -> str | None:
    """Return the text of a value, or None if nobody who knows the secret has written it.

    >>> unsealed(seal("here", "secret", "a").encode(), "secret", "a")
    'here'
    >>> unsealed(seal("here", "secret", "a").encode(), "secret", "b")
    """
    found = data.decode(errors="replace")
    code, text = found[:_LETTERS], found[_LETTERS:]
    return text if hmac.compare_digest(code.encode(), _code(text, secret, key).encode()) else None


_LETTERS = 32


def _code(text: str, secret: str, key: str) -> str:
    return hmac.digest(secret.encode(), f"{key}\n{text}".encode(), hashlib.sha256).hex()[:_LETTERS]
