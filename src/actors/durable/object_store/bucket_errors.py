"""Converts errors of object stores to ours, using only text that is known to be harmless.

Error texts of the libraries and stores may contain signed URLs, keys or signed contents, so only
their numbers and codes are passed on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from actors.runtime.errors import StorageError, StoreBusy, storage_error

_STATUS: Final = re.compile(r"status code(?:\x1b\[\d+m|\D)*?(\d{3})\b")
"""Allows for escape sequences, because some libraries color their errors."""
_CREDENTIALS: Final = re.compile(r"Missing\w+|metadata|[Cc]redential")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_TOO_OFTEN: Final = "429"
_ALLOWED: Final = "the service's credentials do not allow it"
_TAKEN: Final = "the store rejected the service's credentials"
_NONE: Final = "the service's environment has no credentials for the store"


@contextmanager
def translate_errors(
    what: str, where: str, *, determinate: bool, once: bool = False
) -> Iterator[None]:
    """Convert errors of the library to `StorageError`, without their texts.

    `once` means that a single request was sent, so that a refusal is determinate: nothing was done.
    With retries, a refusal only concerns the last request; an earlier one, whose answer was lost,
    may have been executed.
    """
    from obstore import exceptions

    try:
        yield
    except TimeoutError:
        text = f"could not {what} {where}: the store did not respond"
        raise StorageError(text, determinate=determinate) from None
    # `from None` here and below, because a chained error would carry the secrets into logs.
    except (exceptions.BaseError, FileNotFoundError, ValueError) as error:
        refused = isinstance(
            error,
            exceptions.PermissionDeniedError
            | exceptions.UnauthenticatedError
            | exceptions.UnknownConfigurationKeyError
            | FileNotFoundError,
        )
        text = f"could not {what} {where}: {reason(error)}"
        if _status(str(error)) == _TOO_OFTEN:
            raise StoreBusy(text, determinate=determinate or once) from None
        raise StorageError(text, determinate=determinate or (once and refused)) from None
    except OSError as error:
        raise storage_error(f"{what} {where}", error, determinate=determinate) from None


def _status(text: str) -> str | None:
    found = _STATUS.search(text)
    return None if found is None else found[1]


def reason(error: BaseException) -> str:
    """Return the reason for an error, with only numbers and codes of the store. Also works for
    other libraries that access stores."""
    from obstore import exceptions

    # Searched, but never shown.
    text = str(error)
    code = _CODE.search(text)
    found = [each for each in (_status(text), code and code[1]) if each is not None]
    said = f" ({' '.join(found)})" if found else ""
    match error:
        case exceptions.PermissionDeniedError():
            return f"{_ALLOWED}{said}"
        case exceptions.UnauthenticatedError():
            return f"{_TAKEN}{said}"
        case FileNotFoundError():
            return f"the bucket does not exist{said}"
        case exceptions.NotSupportedError():
            return "this store does not support it"
    if "403" in found:  # some requests fail with a generic error
        return f"{_ALLOWED}{said}"
    if "401" in found:
        return f"{_TAKEN}{said}"
    if "NoSuchBucket" in found:
        return f"the bucket does not exist{said}"
    if _TOO_OFTEN in found:
        return f"too many requests to the store{said}"
    if found:
        return f"the store failed{said}"
    if "kind: Timeout" in text:
        return "the store did not respond"
    if "kind: Connect" in text:
        return "the store cannot be reached"
    if "BadScheme" in text:
        return (
            "the URL of the store does not use https (…_ALLOW_HTTP=true in its environment allows "
            "http)"
        )
    # Last, because its pattern is the least specific.
    if _CREDENTIALS.search(text) is not None:
        return _NONE
    return f"the store failed ({type(error).__name__})"


def hint_for(text: str, needed: str) -> str:
    """Return what to do about a bucket's error, by its text. `needed` names the permissions that
    the credentials need."""
    if _ALLOWED in text:
        return f"grant the service's credentials the permission to {needed}"
    if _TAKEN in text or _NONE in text:
        return "check the credentials in the service's environment, and restart the service"
    if "the bucket does not exist" in text:
        return "create the bucket, or name another one"
    return "check that the service can reach the store; the service will retry"
