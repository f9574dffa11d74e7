"""Parts that all commands share: the event loop (uvloop), log lines, common options."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

import anyio
import msgspec
import typer

from actors.runtime.errors import BadSettings, nearest_hint
from actors.runtime.settings import MAPPINGS, Settings, load

if TYPE_CHECKING:
    from actors.doors.client.client import Client

log = logging.getLogger("penstock.settings")
R = TypeVar("R")

LEVELS: Final = ("debug", "info", "warning", "error")

LogLevel = Annotated[str, typer.Option("--log-level", help=f"One of {', '.join(LEVELS)}.")]
LogFormat = Annotated[
    str, typer.Option("--log-format", help="text, or json for one JSON object per line.")
]
Connect = Annotated[
    str,
    typer.Option(
        "--connect",
        envvar="PENSTOCK_LISTEN",
        help="Address of a running service: host:port or unix:/path.",
    ),
]
Certificate = Annotated[
    str | None,
    typer.Option("--tls-certificate", help="PEM file of the certificate to present to peers."),
]
Key = Annotated[
    str | None, typer.Option("--tls-key", help="PEM file of the certificate's private key.")
]
Authority = Annotated[
    str | None,
    typer.Option(
        "--tls-authority", help="PEM file of the authority that signed the peers' certificates."
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file", help="File of client tokens, one per line; a client uses the first."
    ),
]
Identity = Annotated[
    str | None,
    typer.Option(
        "--identity", help="Name of the service; for a client, of the service it connects to."
    ),
]
DEFAULT_ADDRESS: Final = Settings().listen


class ServiceTarget(msgspec.Struct, frozen=True):
    """The service that a command connects to, with the settings to authenticate there."""

    address: str
    settings: Settings


def with_client(target: ServiceTarget, call: Callable[[Client], Awaitable[R]]) -> R:
    """Connect a client to the service, await `call` with it, and return the result."""

    async def run() -> R:
        from actors.doors.client.client import Client

        async with await Client.connect(target.address, settings=target.settings) as client:
            return await call(client)

    return run_loop(run)


def command_with_options(
    name: str, options: Callable[..., Any]
) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator for commands whose first parameter, `name`, is built by `options`.

    The parameters of `options` become options of the command.
    """

    def wrapped(command: Callable[..., None]) -> Callable[..., None]:
        shared = inspect.signature(options).parameters

        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = options(**{option: given.pop(option) for option in shared})
            command(**{name: made}, **given)

        own = inspect.signature(command).parameters
        parameters = [*shared.values(), *(own[option] for option in own if option != name)]
        hints = get_type_hints(command, include_extras=True)
        hints |= get_type_hints(options, include_extras=True)
        # Typer reads the options from the signature.
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name])
                for one in parameters
            ]
        )
        run.__annotations__ = {one.name: hints[one.name] for one in parameters}
        del run.__dict__["__wrapped__"]  # else Typer reads the wrapped function's annotations
        return run

    return wrapped


def service_command(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for connecting to a service, and build the parameter `target` from them.

    The options are ``--connect``, ``--tls-certificate``, ``--tls-key``, ``--tls-authority``,
    ``--token-file`` and ``--identity``. Options that are not given come from the environment, for
    example ``PENSTOCK_TLS_KEY``. The command logs only warnings and errors.
    """

    def options(
        connect: Connect = DEFAULT_ADDRESS,
        tls_certificate: Certificate = None,
        tls_key: Key = None,
        tls_authority: Authority = None,
        token_file: TokenFile = None,
        identity: Identity = None,
    ) -> ServiceTarget:
        flags = {
            "tls_certificate": tls_certificate,
            "tls_key": tls_key,
            "tls_authority": tls_authority,
            "token_file": token_file,
            "identity": identity,
        }
        set_up_logging("warning")
        return ServiceTarget(connect, load(flags=flags))

    made: Callable[..., None] = command_with_options("target", options)(command)
    return made


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn an `ImportError` of a package that `extra` installs into `BadSettings`."""
    try:
        yield
    except ImportError as error:
        raise BadSettings(
            f"{what} needs additional packages: pip install 'penstock-views[{extra}]' ({error})"
        ) from None


class OneLine(logging.Formatter):
    """Formats a record as one line: time (UTC), level, logger, text.

    The lines of a traceback are joined by ``|``.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """Return the record's time as ISO 8601, in UTC, with milliseconds."""
        when = datetime.fromtimestamp(record.created, UTC)
        return f"{when:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        return " | ".join(line for line in super().format(record).splitlines() if line.strip())


def set_up_logging(level: str, *, traced: bool = False, log_format: str = "text") -> None:
    """Log messages of `level` and above to stderr.

    With `traced`, structlog formats them, with trace ids, as text or as JSON. Raises `BadSettings`
    for an unknown level or format.
    """
    if log_format not in ("text", "json"):
        raise BadSettings(f"invalid log format {log_format!r}: expected text or json")
    if level.lower() not in LEVELS:
        raise BadSettings(f"invalid log level {level!r}: expected one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    if traced:
        # Imported here because structlog is slow to load.
        from actors.runtime.tracing.logs import formatter

        handler.setFormatter(formatter("json" if log_format == "json" else "text"))
    else:
        handler.setFormatter(OneLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    warn_of_variables(os.environ)


_NOT_SETTINGS: Final = re.compile(
    r"PENSTOCK_(?:SECRET_.*|WAL_TOKEN|(?:.*_)?SERVICE_(?:HOST|PORT)(?:_.*)?|(?:.*_)?PORT(?:_.*)?)"
)
"""Environment variables that are not settings: secrets, and those that Kubernetes sets for a
Kubernetes service named penstock."""


def warn_of_variables(environment: Mapping[str, str]) -> None:
    """Log a warning for each variable ``PENSTOCK_*`` that is not a setting, with the nearest
    name."""
    fields = {each.name for each in msgspec.structs.fields(Settings)} - {*MAPPINGS}
    known = [f"PENSTOCK_{name.upper()}" for name in sorted(fields)]
    for name in environment:
        wrong = name.startswith("PENSTOCK_") and name.upper() not in known
        if wrong and _NOT_SETTINGS.fullmatch(name) is None:
            hint = nearest_hint(name, known)
            log.warning("ignoring environment variable %s: there is no such setting%s", name, hint)


_SWITCH_SECONDS: Final = 0.0005
"""Interpreter switch interval: how long another thread may delay the event loop (Python's default
is 0.005)."""


def run_loop(body: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Run `body` on uvloop and return its result."""
    # The event loop releases the interpreter lock at each socket call, and a compacting thread then
    # keeps it for the whole interval. With the default interval an INSERT during a compaction takes
    # a third longer; COPY is as fast with either.
    sys.setswitchinterval(_SWITCH_SECONDS)
    return anyio.run(body, backend="asyncio", backend_options={"use_uvloop": True})


def parse_settings(given: list[str]) -> dict[str, Any]:
    """Parse ``name=value`` pairs into flags. Raises `BadSettings` for a malformed pair.

    The values stay strings, which `settings.load` converts. ``spark_conf.KEY=VALUE`` adds an entry
    to `spark_conf`.
    """
    flags: dict[str, Any] = {}
    for pair in given:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise BadSettings(f"invalid --set {pair!r}: expected name=value")
        if name.startswith("spark_conf."):
            flags.setdefault("spark_conf", {})[name.removeprefix("spark_conf.")] = value
        else:
            flags[name] = value
    return flags
