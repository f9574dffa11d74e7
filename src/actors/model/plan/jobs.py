"""Jobs for the engine and their answers: declarative, complete, never closures.

They are sent to the `SparkExecutor` actor (which adds a reply slot) and by it, as msgpack frames,
to the child process that holds PySpark. Rows travel as Arrow IPC streams when small, as files when
large. A job is a pure function of its message: sending it again gives the same answer.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from actors.model.plan.delta import DeltaPlan
from actors.model.plan.relational import ProjectNode
from actors.model.plan.schema import TableSchema

NO_UPPER: Final = 1 << 62
"""A bound beyond every time."""


# Frames of these cross to the engine's process, which is of the same release. Their tags are also
# the kinds that `penstock.jobs` shows (`kind_of`), so they stay when a class is renamed.
class BucketObject(msgspec.Struct, frozen=True, gc=False):
    """A Parquet part in a bucket: the bucket's URL (``s3://bucket``), the key in it, its size."""

    bucket: str
    key: str
    bytes: int

    @property
    def kind(self) -> str:
        """Return the scheme of the bucket's URL."""
        return self.bucket.partition(":")[0]


class BucketFolder(msgspec.Struct, frozen=True, gc=False):
    """Place in a bucket for a job's objects: its URL, and a prefix of keys that no other has."""

    bucket: str
    prefix: str


class JobRows(msgspec.Struct, frozen=True, gc=False):
    """Updates handed to the engine: inline Arrow, files, objects, or all of them (their union).

    Parquet `files` and `objects` hold parts (columns, ``__time``, ``__diff``, no errors); of these
    only rows with ``lower <= __time < upper`` are read. `arrow` is one IPC stream of exactly the
    rows meant, with the same columns. With `advance_to` set, times below it are raised to it.
    `columns` names and orders the user columns.
    """

    schema: TableSchema
    arrow: bytes | None = None
    arrow_file: str | None = None
    """The same as `arrow`, as an IPC file: for rows above `engine_inline_bytes_max`."""
    files: tuple[str, ...] = ()
    lower: int = 0
    upper: int = NO_UPPER
    advance_to: int | None = None
    objects: tuple[BucketObject, ...] = ()
    """Parts that Spark reads from their bucket."""


class JobSpan(msgspec.Struct, frozen=True, gc=False):
    """A span of a traced job in the engine's process: `name` is of the table in
    `actors.runtime.telemetry`, times are of the wall clock, in ns."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool] = {}
    parent: int = -1
    """Index of its parent among the spans beside it; -1: the service's span of the job."""


class JobTrace(msgspec.Struct, frozen=True, gc=False):
    """The spans of a job in the engine's process number `pid`, parents first."""

    pid: int
    spans: tuple[JobSpan, ...]


class AnalyzeStatement(msgspec.Struct, frozen=True, gc=False, tag="Analyze"):
    """Asks Spark to analyse a query over (empty) tables: `tables` are those that it may name."""

    job_id: str
    tables: tuple[tuple[str, TableSchema], ...]
    sql: str
    conf: tuple[tuple[str, str], ...] = ()
    translate: bool = False
    """True if its relational plan is wanted."""
    restricted: bool = False
    """True if it may use only what reaches nothing outside of it
    (`actors.engine.catalyst.permitted_functions`): the job fails with ``AccessDenied`` for anything
    else, before it is analysed where that would look at something outside."""


class ParseText(msgspec.Struct, frozen=True, gc=False, tag="Parse"):
    """Asks Spark to parse a text, and to say what it names. It is neither analysed nor run: nothing
    is looked for outside of the engine. Answered with `StatementParsed`, or with ``QueryRejected``
    for a text that Spark cannot parse."""

    job_id: str
    sql: str
    expression: bool = False
    """True if the text is one expression (a column of a data frame), not a statement."""
    conf: tuple[tuple[str, str], ...] = ()
    """Settings of the session in which it is to be run: some change how a text is parsed."""


class PreparePlan(msgspec.Struct, frozen=True, gc=False, tag="Prepare"):
    """Makes a dataflow's plan known to the engine; later jobs name it by `dataflow`.

    The engine builds the plan once on empty inputs and checks the output's schema. Sent again
    to a new engine by the executor, as `known`: then it is neither built nor answered.
    """

    job_id: str
    dataflow: str
    plan: DeltaPlan
    known: bool = False


class RunStep(msgspec.Struct, frozen=True, gc=False, tag="Step"):
    """Runs strata `first` to `last` (inclusive) of a prepared plan in one Spark job.

    `inputs` gives every input that these strata read and do not make themselves; an input left
    out is empty.
    """

    job_id: str
    dataflow: str
    first: int
    last: int
    inputs: dict[str, JobRows]
    lo: int
    hi: int
    at_once: bool = False
    """True if all changes are at one time, ``hi - 1`` (a view computed from scratch)."""
    into_files: bool = False
    """True if a large answer is wanted as files; only with `at_once`."""
    optimistic: bool = False
    """True if strata that seldom make a row count as if they made none
    (`plan.delta.PlanStratum`)."""
    into_bucket: tuple[BucketFolder, ...] = ()
    """Places for a large answer of the last stratum, one for each of the plan's deltas
    (`DeltaPlan.deltas`), written there by the executors."""
    old: tuple[JobRows, ...] = ()
    """Contents that the answer turns into those that the strata make, one for each of the plan's
    deltas; only with `at_once`."""


class LikelyRun(msgspec.Struct, frozen=True, gc=False):
    """A run of strata `first` to `last` with rows in `changed` (deltas and outputs of earlier
    strata), at one time or at several."""

    first: int
    last: int
    changed: tuple[str, ...]
    one_time: bool
    optimistic: bool = False


class RehearseSteps(msgspec.Struct, frozen=True, gc=False, tag="Rehearse"):
    """Builds plans for likely runs of later steps, and for those with fewer changes. Answered with
    `PlanPrepared`, also when no plan can be built."""

    job_id: str
    dataflow: str
    runs: tuple[LikelyRun, ...]


class ComputeDifference(msgspec.Struct, frozen=True, gc=False, tag="Difference"):
    """Plain Spark: the query over whole contents, minus old contents.

    `tables` are the contents of each input up to a time (weights summed, rows repeated by
    their weight). The answer holds (columns, ``__time`` = `time`, ``__diff``): what must be
    appended to turn `old` into the query's result. Without `old` it is the result itself.
    """

    job_id: str
    sql: str
    tables: tuple[tuple[str, JobRows], ...]
    output: TableSchema
    time: int
    old: JobRows | None = None
    conf: tuple[tuple[str, str], ...] = ()
    into_bucket: tuple[BucketFolder, ...] = ()
    """Place for a large answer, written there by the executors."""


class QueryFiles(msgspec.Struct, frozen=True, gc=False, tag="Query"):
    """Plain Spark over Parquet files as they are: a query's text and nothing of ours around it.

    `tables` are (name, path). The answer's rows have the query's own columns, without time or
    diff.
    """

    job_id: str
    sql: str
    tables: tuple[tuple[str, str], ...]
    conf: tuple[tuple[str, str], ...] = ()


class SelectContents(msgspec.Struct, frozen=True, gc=False, tag="Select"):
    """A query over the contents of its tables, which are as in `ComputeDifference`, as it is
    written: the answer's rows have the columns of `output`, without time or diff, in the query's
    order.
    """

    job_id: str
    sql: str
    tables: tuple[tuple[str, JobRows], ...]
    output: TableSchema
    conf: tuple[tuple[str, str], ...] = ()
    into_files: bool = False
    """True if a large answer is wanted as files, in order."""


class LendContents(msgspec.Struct, frozen=True, gc=False, tag="Lend"):
    """Makes contents, as in `SelectContents`, a global temporary view that every session of the
    driver can read under this name (in the database ``global_temp``) until `ReturnContents`.
    Answered with `PlanPrepared`.

    The view reads the files of `rows`: they must stay until then.
    """

    job_id: str
    name: str
    rows: JobRows


class ReturnContents(msgspec.Struct, frozen=True, gc=False, tag="Return"):
    """Drops the view of a `LendContents`, if it is there. Answered with `PlanPrepared`."""

    job_id: str
    name: str


class ForgetPlan(msgspec.Struct, frozen=True, gc=False, tag="Forget"):
    """Drops a prepared plan. No answer."""

    job_id: str
    dataflow: str


class CancelChildJob(msgspec.Struct, frozen=True, gc=False, tag="Cancel"):
    """Cancels a job wherever it is: waiting, planning or running."""

    job_id: str


class TakeFiles(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Reads files of `paths` as Spark reads `format` (parquet, csv or json) with its own reader
    `options`: rows with the columns `keep` of `read`, the files' columns. Small answers come as
    Arrow, large ones as Parquet files.

    A file that cannot be read so fails the job with ``DefiniteError``, whose text begins with the
    file's path where Spark tells it.
    """

    job_id: str
    paths: tuple[str, ...]
    format: str
    read: TableSchema
    keep: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()
    bytes: int = 0
    """Size of all files."""
    into_files: bool = True
    """True if a large answer is wanted as files."""


class InferFiles(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks Spark for the columns of files. Answered with `QueryAnalyzed`, of one schema."""

    job_id: str
    paths: tuple[str, ...]
    format: str
    options: tuple[tuple[str, str], ...] = ()


Job: TypeAlias = (
    AnalyzeStatement
    | ParseText
    | PreparePlan
    | RunStep
    | RehearseSteps
    | ComputeDifference
    | QueryFiles
    | ForgetPlan
    | CancelChildJob
    | SelectContents
    | LendContents
    | ReturnContents
    | TakeFiles
    | InferFiles
)


class VolatileCall(msgspec.Struct, frozen=True, gc=False):
    """The call or literal that makes a query's answer no function of its tables."""

    call: str
    clock: bool = False
    """True if the call stands for the time, the session or the release; false if for chance."""
    temporal: bool = False
    """True for a call of the clock that a temporal filter can follow, if there is no other call."""


class QueryTranslation(msgspec.Struct, frozen=True, gc=False):
    """A query's relational plan as Spark's own analysis gives it; its scans have places in
    `QueryAnalyzed.inputs`."""

    root: ProjectNode | None
    """A projection onto the output's columns, by name; None: no rule knows the query."""
    reason: str = ""
    """The construct that no rule knows."""


class QueryAnalyzed(msgspec.Struct, frozen=True, gc=False, tag="Analyzed"):
    """Spark's analysis of a query."""

    job_id: str
    schema: TableSchema = TableSchema(())
    inputs: tuple[str, ...] = msgspec.field(default=(), name="sources")
    """Names of the job's tables that it reads, in the order in which its plan names them."""
    volatility: VolatileCall | None = None
    """None if its answer is a function of its tables, but for the choices that Spark's aggregates
    are free to make (``first``)."""
    translation: QueryTranslation | None = None
    """None if it was not asked for."""
    missing: str = ""
    """A name, as Spark writes it, that is none of the job's tables; all other fields are empty
    then."""


class StatementParsed(msgspec.Struct, frozen=True, gc=False, tag="Parsed"):
    """Names that a text has, as Spark parses it. A text of which anything is refused, or that is a
    command, is looked at no further: all else is complete only if both are empty."""

    job_id: str
    relations: tuple[tuple[str, ...], ...] = ()
    """The parts of each name of a relation that is no table expression of the text."""
    functions: tuple[str, ...] = ()
    """Names of all functions that are called, table functions too, as they are written."""
    unknown: tuple[str, ...] = ()
    """Those of `functions` that Spark does not know as its own: such as a session's own functions,
    which may be anything."""
    command: str = ""
    """Spark's name of the command that the text is; empty for a query or an expression."""
    kind: str = ""
    """Kind of what is refused: "function", "option" or "construct"."""
    refused: str = ""
    """The first function, option or construct that only administrators may use; empty for none."""


class PlanPrepared(msgspec.Struct, frozen=True, gc=False, tag="Prepared"):
    """The plan is known."""

    job_id: str


class FileDone(msgspec.Struct, frozen=True, gc=False):
    """A Parquet file of an answer."""

    path: str
    rows: int


class ObjectDone(msgspec.Struct, frozen=True, gc=False):
    """A Parquet object of an answer; its key is the prefix that the job named and `name`."""

    name: str
    rows: int
    size: int
    checksum: int
    """crc32 of all of it."""
    footer: bytes
    """Its metadata, as a Parquet file without rows."""
    delta: int = 0
    """Place among the plan's deltas, and among the folders that the job named; the number of these:
    rows of a stratum that seldom makes one (`RunStep.optimistic`)."""
    time_min: int = 0
    time_max: int = 0


class RowsDone(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The updates that a Step or Difference made, or a query's rows: Arrow IPC stream inline, an
    IPC file, or (when they were asked for) Parquet `files`, whose rows are not consolidated.

    The reader removes the files when it has read them.
    """

    job_id: str
    rows: int
    arrow: bytes | None = None
    arrow_file: str | None = None
    spark_ms: float = 0.0
    prepared: bool = False
    """True if a step's plan was there already and was only executed again."""
    files: tuple[FileDone, ...] | None = None
    wait_ms: float = 0.0
    """Time that it waited in the engine for other jobs; `spark_ms` does not include it."""
    frequent: LikelyRun | None = None
    """The run of a step like many before, for which a rehearsal pays."""
    objects: tuple[ObjectDone, ...] | None = None
    """Objects with the rows, not consolidated, if the job asked for them and they are many. Those
    that nobody adopts are orphans."""
    trace: JobTrace | None = None
    """Trace of a job that came with a trace context."""

    def paths(self) -> tuple[str, ...]:
        """Return all files, which are to be removed with the answer."""
        found = () if self.arrow_file is None else (self.arrow_file,)
        return (*found, *(file.path for file in self.files or ()))


class JobFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The job failed. `code` is an error class of `actors.runtime.errors`.

    ``DefiniteError``: the data make an expression fail; ``QueryRejected``: analysis refused the
    text; ``OperationCanceled``; ``EngineLost``: retry.
    """

    job_id: str
    code: str
    text: str


class EngineReady(msgspec.Struct, frozen=True, gc=False, tag=True):
    """First message of a child: the engine is up."""

    job_id: str
    spark_version: str
    java_version: str
    pid: int
    jvm_pid: int
    connect_port: int = 0
    """Port on loopback of the Spark Connect server in the driver's own JVM; 0: there is none."""
    connect_token: str = ""
    """Bearer token that this server asks for."""


class JobProgress(msgspec.Struct, frozen=True, gc=False, tag="Progress"):
    """The progress of a job that takes long: Spark's tasks, of the stages known so far. It is not
    the job's answer."""

    job_id: str
    tasks_done: int
    tasks: int
    executors: int | None = None
    """The executors that Spark has just now; None: the driver executes, or it is not known."""

    def shown(self) -> str:
        """Return the progress for people.

        >>> JobProgress("a", 1, 4).shown()
        '1 of 4 tasks done'
        >>> JobProgress("a", 0, 2, executors=0).shown()
        '0 of 2 tasks done, and Spark has no executors'
        """
        waits = ", and Spark has no executors" if self.executors == 0 else ""
        return f"{self.tasks_done} of {self.tasks} tasks done{waits}"


def kind_of(job: Job) -> str:
    """Return a job's kind as people and the wire know it: its tag."""
    # The tag, not the class's name: relations and logs keep what people know.
    return str(type(job).__struct_config__.tag)


Answer: TypeAlias = (
    QueryAnalyzed
    | StatementParsed
    | PlanPrepared
    | RowsDone
    | JobFailed
    | EngineReady
    | JobProgress
)


class SubmitJob(msgspec.Struct, frozen=True, gc=False, tag="Run"):
    """Asks the executor actor to run this job and answer `reply` (a `kernel.Reply[Answer]`), and
    meanwhile to send its `JobProgress` to `watcher` (a `kernel.Address`), if there is one.

    A failure is given to the reply as the error itself (`DefiniteError`, `QueryRejected`,
    `OperationCanceled`, `EngineLost`, …), never as a `JobFailed`.
    """

    job: Job
    reply: Any
    watcher: Any = None


class CancelJob(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks the executor actor to cancel a job, whose caller gets `OperationCanceled` at once."""

    job_id: str


class InspectJobs(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks the executor actor to answer `reply` (a `kernel.ReplySlot`) with its current jobs and
    those that ended last (`job_log.JobNote`s)."""

    reply: Any


class EngineCondition(msgspec.Struct, frozen=True):
    """State of an engine: it runs, has had no job yet, is on its way, or could not be started, and
    `why`."""

    state: Literal["up", "idle", "starting", "unavailable"]
    why: str = ""


class InspectEngine(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks the executor actor to answer `reply` (a `kernel.ReplySlot`) with the
    `EngineCondition`."""

    reply: Any


class LocateConnect(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks the executor actor to answer `reply` (a `kernel.ReplySlot`) with the `EngineReady` of
    the engine that is up, as soon as one is; the reply fails with `EngineUnavailable`."""

    reply: Any


ExecutorMessage: TypeAlias = SubmitJob | CancelJob | InspectJobs | InspectEngine | LocateConnect
