"""The releases of Spark that the service supports, and all differences between them that matter.

The sources next to this file are written for the newest release. If an older release has another
name or signature, `adapt_source` changes the text. What PySpark provides is determined by looking
at it, never from its version number.

The service reads this file too, without starting Spark, so PySpark is imported only inside
functions.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from actors.runtime.errors import EngineUnavailable

RELEASES: Final = ((4, 0), (4, 1), (4, 2), (4, 3))
"""The releases that `make matrix` tests, the oldest first."""
OLDEST: Final = RELEASES[0]
NEWEST: Final = RELEASES[-1]
_VERSION: Final = re.compile(r"(\d+)\.(\d+)")


_JAVA_MAX: Final = (((4, 0), 23),)
"""The last Java version that releases up to a given one run on. Java 24 removed what Hadoop used to
determine the user."""


class SourceDifference(msgspec.Struct, frozen=True):
    """A piece of Penstock's sources that has to be written differently for older releases."""

    until: tuple[int, int]
    """The last release that needs `theirs`."""
    ours: str
    """The text for later releases."""
    theirs: str
    """The text for releases up to `until`."""


DIFFERENCES: Final = (
    # 4.3 added a third flag, which keeps relations that nothing refers to.
    SourceDifference((4, 2), "new InlineCTE(true, false, false)", "new InlineCTE(true, false)"),
    SourceDifference((4, 2), "InlineCTE(true,false,false)", "InlineCTE(true,false)"),
)
"""All such differences, in the order in which they are applied."""
_CLASS: Final = '{"class":"org.apache.spark.sql.catalyst.expressions.'
FORMER_CLASSES: Final = (
    # Renamed when a separate addition for the type TIME was introduced.
    SourceDifference((4, 0), f'{_CLASS}TimestampAddInterval"', f'{_CLASS}TimeAdd"'),
)
"""Expressions of Catalyst that had another name and the same fields, as they occur in a dumped
plan."""


def release_of(version: str) -> tuple[int, int]:
    """Return the release of a version: its first two numbers.

    Raises `EngineUnavailable` for a text that is not a version.

    >>> release_of("4.2.1"), release_of("4.3.0-SNAPSHOT")
    ((4, 2), (4, 3))
    """
    found = _VERSION.match(version)
    if found is None:
        raise EngineUnavailable(f"invalid Spark version {version!r}: expected a form like 4.1.0")
    return int(found[1]), int(found[2])


def installed_version() -> str:
    """Return the version of the installed PySpark. Raises `EngineUnavailable` if there is none."""
    try:
        return importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        raise EngineUnavailable(
            f"PySpark is not installed: pip install 'pyspark=={_text(NEWEST)}.*'"
        ) from None


def check_release(version: str) -> None:
    """Check that PySpark is of a supported release. Raises `EngineUnavailable` if it is not.

    >>> check_release("4.2.1")
    >>> check_release("3.5.9")
    Traceback (most recent call last):
    ...
    actors.runtime.errors.EngineUnavailable: PySpark 3.5.9 is not supported: the service runs on \
Spark 4.0 \
to 4.3: pip install 'pyspark==4.3.*'
    """
    if not OLDEST <= release_of(version) <= NEWEST:
        raise EngineUnavailable(
            f"PySpark {version} is not supported: the service runs on Spark {_text(OLDEST)} to "
            f"{_text(NEWEST)}: pip install 'pyspark=={_text(NEWEST)}.*'"
        )


def java_version_max(version: str) -> int | None:
    """Return the last Java version that a version of Spark runs on; None if there is no limit.

    >>> java_version_max("4.0.5"), java_version_max("4.1.4")
    (23, None)
    """
    release = release_of(version)
    return next((java for until, java in _JAVA_MAX if release <= until), None)


def check_server(place: str, server: str, installed: str) -> None:
    """Check that a Spark Connect server is of the same release as the PySpark that reads its plans.

    Raises `EngineUnavailable` if it is not.

    >>> check_server("a:15002", "4.1.2", "4.1.4")
    >>> check_server("a:15002", "4.1.2", "4.3.0")
    Traceback (most recent call last):
    ...
    actors.runtime.errors.EngineUnavailable: the Spark Connect server at a:15002 is Spark 4.1.2, \
but PySpark 4.3.0 is installed here, and the two may interpret a view differently: \
pip install 'pyspark==4.1.*'
    """
    if release_of(server) == release_of(installed):
        return
    told = (
        f"the Spark Connect server at {place} is Spark {server}, but PySpark {installed} is"
        " installed here, and the two may interpret a view differently: "
    )
    if OLDEST <= release_of(server) <= NEWEST:
        raise EngineUnavailable(f"{told}pip install 'pyspark=={_text(release_of(server))}.*'")
    raise EngineUnavailable(
        f"{told}the service runs on Spark {_text(OLDEST)} to {_text(NEWEST)}: use a "
        "server of such a release"
    )


def adapt_source(text: str, version: str) -> str:
    """Return one of Penstock's sources, or the name of a rule, in the form for a release of Spark.

    >>> adapt_source("new InlineCTE(true, false, false).apply(plan)", "4.1.0")
    'new InlineCTE(true, false).apply(plan)'
    """
    release = release_of(version)
    for each in DIFFERENCES:
        if release <= each.until:
            text = text.replace(each.ours, each.theirs)
    return text


def newest_names(dumped: str, version: str) -> str:
    """Return the dump of a plan with the newest release's names for its expressions.

    >>> newest_names(f'[{_CLASS}TimeAdd","num-children":2}}]', "4.0.5") == (
    ...     f'[{_CLASS}TimestampAddInterval","num-children":2}}]'
    ... )
    True
    """
    release = release_of(version)
    for each in FORMER_CLASSES:
        # The quotes in a literal are escaped in a dump, so a match is never part of the query's
        # text.
        if release <= each.until:
            dumped = dumped.replace(each.theirs, each.ours)
    return dumped


# -- Methods in the JVM, which py4j finds by the number of their arguments -------------------------


def tree_text(plan: Any, version: str) -> str:
    """Return a physical plan as text, one node per line, each with its number."""
    # Since 4.1: whether to show the columns.
    more = () if release_of(version) <= (4, 0) else (False,)
    return str(plan.treeString(False, False, 0, True, *more))


def arrow_schema(kinds: Any, columns: Any, zone: str, version: str) -> Any:
    """Return Spark's columns as an Arrow schema for Java. `kinds`: the object `ArrowUtils`."""
    # Whether texts may be larger than 2 GB; it has no default before 4.2.
    more = (False,) if release_of(version) <= (4, 1) else ()
    return kinds.toArrowSchema(columns, zone, False, *more)


# -- what older releases of PySpark lack or name differently ---------------------------------------


class _NoLimit:
    """Stands for a class that a release of PySpark lacks: nothing is an instance of it."""


def shape_options() -> dict[str, str]:
    """Return the options with which `to_arrow_schema` gives columns that Spark accepts from a data
    source: timestamps in UTC, which is the default before 4.2."""
    from pyspark.sql.pandas.types import to_arrow_schema

    known = inspect.signature(to_arrow_schema).parameters
    return {"timezone": "UTC"} if "timezone" in known else {}


def stream_limits() -> Any:
    """Return the classes with which Spark limits a batch of a stream (since 4.2):
    `ReadAllAvailable`, `ReadMaxRows` and `SupportsTriggerAvailableNow`. `known`: whether this
    PySpark has them."""
    try:
        from pyspark.sql.streaming import datasource
    except ImportError:
        return SimpleNamespace(
            known=False,
            ReadAllAvailable=_NoLimit,
            ReadMaxRows=_NoLimit,
            SupportsTriggerAvailableNow=object,
        )
    return SimpleNamespace(
        known=True,
        ReadAllAvailable=datasource.ReadAllAvailable,
        ReadMaxRows=datasource.ReadMaxRows,
        SupportsTriggerAvailableNow=datasource.SupportsTriggerAvailableNow,
    )


def pushed_filter(name: str) -> Any:
    """Return a class of the filters that Spark pushes into a data source (since 4.1)."""
    from pyspark.sql import datasource

    return getattr(datasource, name, type(name, (_NoLimit,), {}))


def pipeline_messages() -> Any:
    """Return the messages of Spark Connect that define pipelines (since 4.1); None without them."""
    try:
        from pyspark.sql.connect.proto import pipelines_pb2
    except ImportError:
        return None
    return pipelines_pb2


def is_given(message: Any, field: str) -> bool:
    """Return whether a message of Spark Connect has a field that older releases do not have."""
    return field in message.DESCRIPTOR.fields_by_name and bool(message.HasField(field))


def chunks_of_batch(batch: Any) -> int:
    """Return the number of answers in which a batch of rows arrives; always one before 4.1."""
    return max(1, getattr(batch, "num_chunks_in_batch", 1))


def limit_calls(client: Any, seconds: float, release_seconds: float) -> None:
    """Limit the duration of a Connect client's calls that are not jobs."""
    try:
        from pyspark.sql.connect.client.core import RpcDeadlines
    except ImportError:
        # Before 4.3 a client waits forever, so a timeout is set for each of its calls.
        stub = client._stub
        for name, most in (
            ("Config", seconds),
            ("Interrupt", seconds),
            ("ReleaseSession", release_seconds),
        ):
            call = getattr(stub, name)
            # The function may be called twice for the same client.
            bare = call.func if isinstance(call, partial) else call
            setattr(stub, name, partial(bare, timeout=most))
        return
    client._rpc_deadlines = RpcDeadlines(
        config=seconds, interrupt=seconds, release_session=release_seconds
    )


def retries_exhausted(error: BaseException) -> bool:
    """Return whether a Connect client has retried a call too often, and does not say why it failed.

    Before 4.3 it may raise its own error; later releases raise the error of the last attempt.
    """
    return type(error).__name__ in ("RetriesExceeded", "RetryException")


def another_session(session: Any) -> Any:
    """Return a new session on the server of a Connect session, with its own settings."""
    if hasattr(session, "newSession"):
        return session.newSession()
    # Before 4.3 a session cannot open another one, but its address can be used to open any number.
    return type(session)(session.client._builder, session.client._user_id)


def send_rows_ahead(session: Any, rows: Any, chunk_rows: int, chunk_bytes: int) -> Any:
    """Send the rows of a relation to a Connect server, which keeps them until the session ends.
    Return the relation that refers to them there."""
    limits = (chunk_rows, chunk_bytes, chunk_bytes)
    kept = session._cache_local_relation
    wanted = kept.__code__.co_argcount - 2
    if wanted == 0:
        # Before 4.1 rows are sent in one piece, and the answer is their name.
        from pyspark.sql.connect.plan import CachedLocalRelation

        return CachedLocalRelation(kept(rows))
    # 4.2 also has a limit for the whole relation, which the caller has to set.
    return kept(rows, *(limits if wanted == len(limits) else (1 << 62, *limits)))


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
