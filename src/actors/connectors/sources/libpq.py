"""Bindings to the functions of libpq that sources call: psycopg's, or those of the system's libpq.

psycopg (the extra ``postgres``) brings its own libpq. Where it is not installed, the system's is
loaded through ctypes. Both give the same `LibpqConnection`, which never blocks once it is made
nonblocking. A lost connection raises one of `LOST`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_void_p
from types import ModuleType
from typing import Any, Final, Protocol, cast

psycopg_pq: ModuleType | None
try:
    from psycopg import OperationalError as _PsycopgLost
    from psycopg import pq as psycopg_pq
except ImportError:
    psycopg_pq = None
    _LOST_THERE: tuple[type[Exception], ...] = ()
else:
    _LOST_THERE = (_PsycopgLost,)

CONNECTION_OK: Final = 0
COMMAND_OK: Final = 1
TUPLES_OK: Final = 2
FATAL_ERROR: Final = 7
SQLSTATE: Final = ord("C")
MESSAGE_PRIMARY: Final = ord("M")
MESSAGE_HINT: Final = ord("H")
_PLACES: Final = ("libpq.so.5", "libpq.5.dylib")
_POINTERS: Final = ("PQconnectdb", "PQgetResult")
_TEXTS: Final = ("PQerrorMessage", "PQresultErrorMessage", "PQresultErrorField")
_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "PQconnectdb": (c_char_p,),
    "PQfinish": (c_void_p,),
    "PQstatus": (c_void_p,),
    "PQerrorMessage": (c_void_p,),
    "PQserverVersion": (c_void_p,),
    "PQsocket": (c_void_p,),
    "PQsslInUse": (c_void_p,),
    "PQgssEncInUse": (c_void_p,),
    "PQsetnonblocking": (c_void_p, c_int),
    "PQisnonblocking": (c_void_p,),
    "PQsetNoticeProcessor": (c_void_p, c_void_p, c_void_p),
    "PQsendQuery": (c_void_p, c_char_p),
    "PQflush": (c_void_p,),
    "PQisBusy": (c_void_p,),
    "PQconsumeInput": (c_void_p,),
    "PQgetResult": (c_void_p,),
    "PQgetCopyData": (c_void_p, POINTER(POINTER(c_char)), c_int),
    "PQputCopyData": (c_void_p, c_char_p, c_int),
    "PQfreemem": (c_void_p,),
    "PQclear": (c_void_p,),
    "PQresultStatus": (c_void_p,),
    "PQresultErrorMessage": (c_void_p,),
    "PQresultErrorField": (c_void_p, c_int),
    "PQntuples": (c_void_p,),
    "PQnfields": (c_void_p,),
    "PQgetisnull": (c_void_p, c_int, c_int),
    "PQgetlength": (c_void_p, c_int, c_int),
    "PQgetvalue": (c_void_p, c_int, c_int),
}


class LibpqConnectionLost(Exception):
    """The connection is lost; the text is libpq's."""


LOST: Final[tuple[type[Exception], ...]] = (LibpqConnectionLost, *_LOST_THERE)


class LibpqResult(Protocol):
    """Result of one statement."""

    @property
    def status(self) -> int:
        """Return `TUPLES_OK`, `FATAL_ERROR`, or another status."""
        ...

    @property
    def error_message(self) -> bytes:
        """Return the whole error."""
        ...

    def error_field(self, fieldcode: int, /) -> bytes | None:
        """Return one field of the error."""
        ...

    @property
    def ntuples(self) -> int:
        """Return the number of rows."""
        ...

    @property
    def nfields(self) -> int:
        """Return the number of columns."""
        ...

    def get_value(self, row: int, column: int, /) -> bytes | None:
        """Return a value as text; None: NULL."""
        ...


class LibpqConnection(Protocol):
    """One connection; methods raise one of `LOST` when it is lost."""

    nonblocking: int

    @property
    def status(self) -> int:
        """Return `CONNECTION_OK`, or another status."""
        ...

    @property
    def error_message(self) -> bytes:
        """Return the last error."""
        ...

    @property
    def server_version(self) -> int:
        """Return the server's version: 150004 for 15.4."""
        ...

    @property
    def socket(self) -> int:
        """Return the socket's file descriptor."""
        ...

    @property
    def ssl_in_use(self) -> bool:
        """Return whether TLS encrypts the connection."""
        ...

    @property
    def used_gssapi(self) -> bool:
        """Return whether GSSAPI authenticated the connection; it may encrypt as well."""
        ...

    def send_query(self, command: bytes, /) -> None:
        """Send simple statements; `get_result` must be called until it returns None."""
        ...

    def flush(self) -> int:
        """Send buffered data; 1 if the socket takes no more just now."""
        ...

    def is_busy(self) -> int:
        """Return 1 if `get_result` would block."""
        ...

    def consume_input(self) -> None:
        """Read the data that has arrived."""
        ...

    def get_result(self) -> LibpqResult | None:
        """Return the next result; None: there are no more."""
        ...

    def get_copy_data(self, async_: int, /) -> tuple[int, memoryview]:
        """Return (bytes, a row); 0: none has arrived yet, -1: there are no more."""
        ...

    def put_copy_data(self, buffer: bytes, /) -> int:
        """Send data of a COPY."""
        ...

    def finish(self) -> None:
        """Close the connection; may be called twice."""
        ...


def connect(conninfo: bytes) -> LibpqConnection:
    """Connect, and wait for success or failure: see `status`. Blocks. Raises `ImportError` where
    there is no libpq."""
    if psycopg_pq is None:
        return SystemConnection(conninfo)
    connection = psycopg_pq.PGconn.connect(conninfo)
    # Else psycopg logs the server's notices.
    connection.notice_handler = None
    return cast("LibpqConnection", connection)


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the system's libpq. Raises `ImportError`."""
    for place in (*_PLACES, ctypes.util.find_library("pq")):
        try:
            library = ctypes.CDLL(place) if place else None
        except OSError:
            continue
        if library is not None:
            for name, arguments in _FUNCTIONS.items():
                function = getattr(library, name)
                function.argtypes = arguments
                function.restype = (
                    c_void_p if name in _POINTERS else c_char_p if name in _TEXTS else c_int
                )
            for name in ("PQfinish", "PQfreemem", "PQclear"):
                getattr(library, name).restype = None
            # Not c_char_p, which would cut binary values at their first zero byte.
            library.PQgetvalue.restype = c_void_p
            library.PQsetNoticeProcessor.restype = c_void_p
            return library
    raise ImportError("there is neither psycopg nor a libpq on this machine")


def check() -> None:
    """Raise `ImportError` where there is no libpq."""
    if psycopg_pq is None:
        _library()


_UNHEARD: Final = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)(lambda _argument, _message: None)
"""Discards notices. It must live as long as any connection: libpq calls it."""


class SystemResult:
    """A `LibpqResult` of the system's libpq."""

    def __init__(self, library: ctypes.CDLL, pointer: int) -> None:
        self._library = library
        self._pointer = pointer

    def __del__(self) -> None:
        self._library.PQclear(self._pointer)

    @property
    def status(self) -> int:
        """See `LibpqResult`."""
        return int(self._library.PQresultStatus(self._pointer))

    @property
    def error_message(self) -> bytes:
        """See `LibpqResult`."""
        return bytes(self._library.PQresultErrorMessage(self._pointer))

    def error_field(self, fieldcode: int, /) -> bytes | None:
        """See `LibpqResult`."""
        found: bytes | None = self._library.PQresultErrorField(self._pointer, fieldcode)
        return found

    @property
    def ntuples(self) -> int:
        """See `LibpqResult`."""
        return int(self._library.PQntuples(self._pointer))

    @property
    def nfields(self) -> int:
        """See `LibpqResult`."""
        return int(self._library.PQnfields(self._pointer))

    def get_value(self, row: int, column: int, /) -> bytes | None:
        """See `LibpqResult`."""
        place = (self._pointer, row, column)
        if self._library.PQgetisnull(*place):
            return None
        return ctypes.string_at(self._library.PQgetvalue(*place), self._library.PQgetlength(*place))


class SystemConnection:
    """A `LibpqConnection` of the system's libpq."""

    _pointer: int | None = None

    def __init__(self, conninfo: bytes) -> None:
        self._library = _library()
        self._pointer = self._library.PQconnectdb(conninfo)
        if self._pointer is None:
            # libpq returns NULL only when it is out of memory.
            raise MemoryError("libpq")
        self._library.PQsetNoticeProcessor(self._pointer, _UNHEARD, None)

    def __del__(self) -> None:
        self.finish()

    def finish(self) -> None:
        """See `LibpqConnection`."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._library.PQfinish(pointer)

    def _open(self) -> int:
        if self._pointer is None:
            raise LibpqConnectionLost("the connection is closed")
        return self._pointer

    def _checked(self, well: bool) -> None:
        if not well:
            raise LibpqConnectionLost(self.error_message.decode(errors="replace").strip())

    @property
    def status(self) -> int:
        """See `LibpqConnection`."""
        return int(self._library.PQstatus(self._pointer))

    @property
    def error_message(self) -> bytes:
        """See `LibpqConnection`."""
        return bytes(self._library.PQerrorMessage(self._pointer))

    @property
    def server_version(self) -> int:
        """See `LibpqConnection`."""
        return int(self._library.PQserverVersion(self._open()))

    @property
    def socket(self) -> int:
        """See `LibpqConnection`."""
        found = int(self._library.PQsocket(self._open()))
        self._checked(found >= 0)
        return found

    @property
    def ssl_in_use(self) -> bool:
        """See `LibpqConnection`."""
        return bool(self._library.PQsslInUse(self._open()))

    @property
    def used_gssapi(self) -> bool:
        """See `LibpqConnection`. Here True only if GSSAPI encrypts, which is what callers need."""
        return bool(self._library.PQgssEncInUse(self._open()))

    @property
    def nonblocking(self) -> int:
        """See `LibpqConnection`."""
        return int(self._library.PQisnonblocking(self._open()))

    @nonblocking.setter
    def nonblocking(self, value: int) -> None:
        self._checked(self._library.PQsetnonblocking(self._open(), value) == 0)

    def send_query(self, command: bytes, /) -> None:
        """See `LibpqConnection`."""
        self._checked(self._library.PQsendQuery(self._open(), command) == 1)

    def flush(self) -> int:
        """See `LibpqConnection`."""
        left = int(self._library.PQflush(self._open()))
        self._checked(left >= 0)
        return left

    def is_busy(self) -> int:
        """See `LibpqConnection`."""
        return int(self._library.PQisBusy(self._open()))

    def consume_input(self) -> None:
        """See `LibpqConnection`."""
        self._checked(self._library.PQconsumeInput(self._open()) == 1)

    def get_result(self) -> SystemResult | None:
        """See `LibpqConnection`."""
        pointer = self._library.PQgetResult(self._open())
        return None if pointer is None else SystemResult(self._library, pointer)

    def get_copy_data(self, async_: int, /) -> tuple[int, memoryview]:
        """See `LibpqConnection`."""
        row = POINTER(c_char)()
        size = int(self._library.PQgetCopyData(self._open(), byref(row), async_))
        self._checked(size >= -1)
        if not row:
            return size, memoryview(b"")
        data = ctypes.string_at(row, size)
        # The row belongs to us once libpq has returned it.
        self._library.PQfreemem(row)
        return size, memoryview(data)

    def put_copy_data(self, buffer: bytes, /) -> int:
        """See `LibpqConnection`."""
        sent = int(self._library.PQputCopyData(self._open(), buffer, len(buffer)))
        self._checked(sent >= 0)
        return sent
