"""The releases of Spark that the service runs on, and all in which they differ for it.

The sources beside this file are written for the newest release. Where an older one has another
name or another signature, `adapt_source` changes the text. What PySpark lacks is asked of the
PySpark that is there, never concluded from its number.

The service reads this file too, and starts no Spark: PySpark is imported in functions alone.
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
"""The releases that `make matrix` tries, the oldest first."""
OLDEST: Final = RELEASES[0]
NEWEST: Final = RELEASES[-1]
_VERSION: Final = re.compile(r"(\d+)\.(\d+)")


_JAVA_MAX: Final = (((4, 0), 23),)
"""The last Java that releases up to one run on: Java 24 lost what Hadoop asked for the user."""


class SourceDifference(msgspec.Struct, frozen=True):
    """A text of ours that means the same in other words to older releases."""

    until: tuple[int, int]
    """The last release that has it otherwise."""
    ours: str
    """The text for the releases after that."""
    theirs: str
    """The text for releases up to that."""


DIFFERENCES: Final = (
    # A third flag came with 4.3: it keeps relations that nothing refers to.
    SourceDifference((4, 2), "new InlineCTE(true, false, false)", "new InlineCTE(true, false)"),
    SourceDifference((4, 2), "InlineCTE(true,false,false)", "InlineCTE(true,false)"),
)
"""Every difference of a text of ours, in the order in which they are applied."""
_CLASS: Final = '{"class":"org.apache.spark.sql.catalyst.expressions.'
FORMER_CLASSES: Final = (
    # Renamed when TIME got an addition of its own.
    SourceDifference((4, 0), f'{_CLASS}TimestampAddInterval"', f'{_CLASS}TimeAdd"'),
)
"""Expressions of Catalyst that had another name and the same fields, as a dumped plan has them."""


def release_of(version: str) -> tuple[int, int]:
    """Return the release of a version: its first two numbers.

    Raises `EngineUnavailable` for a text that is no version.

    >>> release_of("4.2.1"), release_of("4.3.0-SNAPSHOT")
    ((4, 2), (4, 3))
    """
    found = _VERSION.match(version)
    if found is None:
        raise EngineUnavailable(f"{version!r} is no version of Spark")
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
    """Refuse a PySpark that the service was not tried with. Raises `EngineUnavailable`.

    >>> check_release("4.2.1")
    >>> check_release("3.5.9")
    Traceback (most recent call last):
    ...
    actors.runtime.errors.EngineUnavailable: PySpark 3.5.9 is installed, and the service runs on \
Spark 4.0 \
to 4.3: pip install 'pyspark==4.3.*'
    """
    if not OLDEST <= release_of(version) <= NEWEST:
        raise EngineUnavailable(
            f"PySpark {version} is installed, and the service runs on Spark {_text(OLDEST)} to "
            f"{_text(NEWEST)}: pip install 'pyspark=={_text(NEWEST)}.*'"
        )


def java_version_max(version: str) -> int | None:
    """Return the last Java that a version of Spark runs on; None: any that is known.

    >>> java_version_max("4.0.5"), java_version_max("4.1.4")
    (23, None)
    """
    release = release_of(version)
    return next((java for until, java in _JAVA_MAX if release <= until), None)


def check_server(place: str, server: str, installed: str) -> None:
    """Refuse a Spark Connect server of another release than the PySpark that reads its plans.

    Raises `EngineUnavailable`.

    >>> check_server("a:15002", "4.1.2", "4.1.4")
    >>> check_server("a:15002", "4.1.2", "4.3.0")
    Traceback (most recent call last):
    ...
    actors.runtime.errors.EngineUnavailable: the Spark Connect server at a:15002 is Spark 4.1.2, \
and \
PySpark 4.3.0 is installed here, to which views may mean something else: \
pip install 'pyspark==4.1.*'
    """
    if release_of(server) == release_of(installed):
        return
    told = (
        f"the Spark Connect server at {place} is Spark {server}, and PySpark {installed} is "
        "installed here, to which views may mean something else: "
    )
    if OLDEST <= release_of(server) <= NEWEST:
        raise EngineUnavailable(f"{told}pip install 'pyspark=={_text(release_of(server))}.*'")
    raise EngineUnavailable(
        f"{told}the service runs on Spark {_text(OLDEST)} to {_text(NEWEST)}: take such a server"
    )


def adapt_source(text: str, version: str) -> str:
    """Return a source of ours, or a rule's name, as a release of Spark has it.

    >>> adapt_source("new InlineCTE(true, false, false).apply(plan)", "4.1.0")
    'new InlineCTE(true, false).apply(plan)'
    """
    release = release_of(version)
    for each in DIFFERENCES:
        if release <= each.until:
            text = text.replace(each.ours, each.theirs)
    return text


def newest_names(dumped: str, version: str) -> str:
    """Return the dump of a plan with the names that the newest release has for its expressions.

    >>> newest_names(f'[{_CLASS}TimeAdd","num-children":2}}]', "4.0.5") == (
    ...     f'[{_CLASS}TimestampAddInterval","num-children":2}}]'
    ... )
    True
    """
    release = release_of(version)
    for each in FORMER_CLASSES:
        # Quotes of a literal are escaped in a dump: what is found is no text of the query.
        if release <= each.until:
            dumped = dumped.replace(each.theirs, each.ours)
    return dumped


# -- Methods in the JVM, which py4j finds by the number of their arguments -------------------------


def tree_text(plan: Any, version: str) -> str:
    """Return a physical plan as a text, a node a line, each with its number."""
    # Whether the columns are shown, since 4.1.
    more = () if release_of(version) <= (4, 0) else (False,)
    return str(plan.treeString(False, False, 0, True, *more))


def arrow_schema(kinds: Any, columns: Any, zone: str, version: str) -> Any:
    """Return Spark's columns as a schema of Arrow for Java. `kinds`: the object `ArrowUtils`."""
    # Whether texts may be larger than 2 GB, without a default before 4.2.
    more = (False,) if release_of(version) <= (4, 1) else ()
    return kinds.toArrowSchema(columns, zone, False, *more)


# -- PySpark: what an older one lacks, or calls otherwise ------------------------------------------


class _NoLimit:
    """Stands for a class of PySpark's that a release lacks: nothing is an instance of it."""


def shape_options() -> dict[str, str]:
    """Return the options with which `to_arrow_schema` gives the columns that Spark accepts of a
    data source: timestamps in UTC, which is the default before 4.2."""
    from pyspark.sql.pandas.types import to_arrow_schema

    known = inspect.signature(to_arrow_schema).parameters
    return {"timezone": "UTC"} if "timezone" in known else {}


def stream_limits() -> Any:
    """Return the classes by which Spark bounds a batch of a stream (since 4.2): `ReadAllAvailable`,
    `ReadMaxRows` and `SupportsTriggerAvailableNow`. `known`: whether this PySpark has them."""
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
    """Return whether a message of Spark Connect has a field that older releases do not know."""
    return field in message.DESCRIPTOR.fields_by_name and bool(message.HasField(field))


def chunks_of_batch(batch: Any) -> int:
    """Return in how many answers a batch of rows comes: in one before 4.1."""
    return max(1, getattr(batch, "num_chunks_in_batch", 1))


def limit_calls(client: Any, seconds: float, release_seconds: float) -> None:
    """Bound the time of a Connect client's calls that are no jobs."""
    try:
        from pyspark.sql.connect.client.core import RpcDeadlines
    except ImportError:
        # Before 4.3 a client waits for ever: its calls are given the time one by one.
        stub = client._stub
        for name, most in (
            ("Config", seconds),
            ("Interrupt", seconds),
            ("ReleaseSession", release_seconds),
        ):
            call = getattr(stub, name)
            # A client may be asked twice.
            bare = call.func if isinstance(call, partial) else call
            setattr(stub, name, partial(bare, timeout=most))
        return
    client._rpc_deadlines = RpcDeadlines(
        config=seconds, interrupt=seconds, release_session=release_seconds
    )


def retries_exhausted(error: BaseException) -> bool:
    """Return whether a Connect client has tried a call too often, and does not say why.

    Before 4.3 it may raise a mark of its own; later ones raise what the last try met.
    """
    return type(error).__name__ in ("RetriesExceeded", "RetryException")


def another_session(session: Any) -> Any:
    """Return a new session of a Connect session's server, with settings of its own."""
    if hasattr(session, "newSession"):
        return session.newSession()
    # Before 4.3 a session opens no other one; its address opens as many as one likes.
    return type(session)(session.client._builder, session.client._user_id)


def send_rows_ahead(session: Any, rows: Any, chunk_rows: int, chunk_bytes: int) -> Any:
    """Send the rows of a relation to a Connect server, which keeps them until the session ends;
    return the relation that names them there."""
    limits = (chunk_rows, chunk_bytes, chunk_bytes)
    kept = session._cache_local_relation
    wanted = kept.__code__.co_argcount - 2
    if wanted == 0:
        # Before 4.1 rows go in one piece, and come back as their name.
        from pyspark.sql.connect.plan import CachedLocalRelation

        return CachedLocalRelation(kept(rows))
    # 4.2 has a bound of the whole relation, too, which is ours to set.
    return kept(rows, *(limits if wanted == len(limits) else (1 << 62, *limits)))


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
