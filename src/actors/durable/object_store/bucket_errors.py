"""Converts errors of object stores to ours, in words that are known to be harmless.

Texts of the libraries and the stores may hold signed URLs, keys, or signed contents: only numbers
and codes of them are passed on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from actors.runtime.errors import StorageError, StoreBusy, storage_error

_STATUS: Final = re.compile(r"status code(?:\x1b\[\d+m|\D)*?(\d{3})\b")
"""Some libraries color their errors, hence the escape sequences."""
_CREDENTIALS: Final = re.compile(r"Missing\w+|metadata|[Cc]redential")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_TOO_OFTEN: Final = "429"
_ALLOWED: Final = "the service's credentials do not allow it"
_TAKEN: Final = "the store does not take the service's credentials"
_NONE: Final = "the service's environment has no credentials for it"


@contextmanager
def translate_errors(
    what: str, where: str, *, determinate: bool, once: bool = False
) -> Iterator[None]:
    """Convert errors of the library to `StorageError`, without their texts.

    `once`: a single request was sent, so a refusal is determinate: nothing was done. With retries a
    refusal concerns the last request alone: an earlier one, whose answer was lost, may have been
    done.
    """
    from obstore import exceptions

    try:
        yield
    except TimeoutError:
        text = f"could not {what} {where}: the store did not answer"
        raise StorageError(text, determinate=determinate) from None
    # `from None` here and below: a chained error would carry the secrets into logs.
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
    """Return the reason of an error, with the store's numbers and codes only; also for other
    libraries that access stores."""
    from obstore import exceptions

    # Searched, never shown.
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
            return f"there is no such bucket{said}"
        case exceptions.NotSupportedError():
            return "this store cannot do it"
    if "403" in found:  # some requests fail with a generic error
        return f"{_ALLOWED}{said}"
    if "401" in found:
        return f"{_TAKEN}{said}"
    if "NoSuchBucket" in found:
        return f"there is no such bucket{said}"
    if _TOO_OFTEN in found:
        return f"the store is asked too often{said}"
    if found:
        return f"the store failed{said}"
    if "kind: Timeout" in text:
        return "the store did not answer"
    if "kind: Connect" in text:
        return "the store cannot be reached"
    if "BadScheme" in text:
        return (
            "the store is not reached by https (…_ALLOW_HTTP=true in its environment allows http)"
        )
    # Last, as its pattern is the loosest.
    if _CREDENTIALS.search(text) is not None:
        return _NONE
    return f"the store failed ({type(error).__name__})"


def hint_for(text: str, needed: str) -> str:
    """Return advice for a bucket's error, by its text; `needed`: the right that the credentials
    need."""
    if _ALLOWED in text:
        return f"give the service's credentials the right to {needed} there"
    if _TAKEN in text or _NONE in text:
        return "see to the credentials in the service's environment, and start it anew"
    if "no such bucket" in text:
        return "make the bucket, or name another"
    return "see that the service reaches the store, then wait"
