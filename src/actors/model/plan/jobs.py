"""Jobs for the engine and their answers: declarative and complete, never closures.

They are sent to the `SparkExecutor` actor (with a reply slot), and by it, as msgpack frames, to the
child process that runs PySpark. Rows travel as Arrow IPC streams if small and as files if large. A
job is a pure function of its message: sending it again gives the same answer.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from actors.model.plan.delta import DeltaPlan
from actors.model.plan.relational import ProjectNode
from actors.model.plan.schema import TableSchema

NO_UPPER: Final = 1 << 62
"""A bound beyond every time."""


# These frames go to the engine's process, which is of the same release. Their tags are also the
# kinds that `penstock.spark_jobs` shows (`kind_of`), so they do not change when a class is renamed.
class BucketObject(msgspec.Struct, frozen=True, gc=False):
    """A Parquet part in a bucket: URL of the bucket (such as ``s3://bucket``), key, and size."""

    bucket: str
    key: str
    bytes: int

    @property
    def kind(self) -> str:
        """Return the scheme of the bucket's URL."""
        return self.bucket.partition(":")[0]


class BucketFolder(msgspec.Struct, frozen=True, gc=False):
    """A location in a bucket for a job's objects: the bucket's URL and a unique prefix of keys."""

    bucket: str
    prefix: str


class JobRows(msgspec.Struct, frozen=True, gc=False):
    """Updates for the engine: inline Arrow, files or objects, or the union of several of these.

    Parquet `files` and `objects` contain parts (columns, ``__time``, ``__diff``, no errors), of
    which only rows with ``lower <= __time < upper`` are read. `arrow` is an IPC stream with the
    same columns, of which all rows are meant. If `advance_to` is set, times below it are advanced
    to it. `columns` names and orders the user columns.
    """

    schema: TableSchema
    arrow: bytes | None = None
    arrow_file: str | None = None
    """Like `arrow`, but as an IPC file, for rows larger than `engine_inline_bytes_max`."""
    files: tuple[str, ...] = ()
    lower: int = 0
    upper: int = NO_UPPER
    advance_to: int | None = None
    objects: tuple[BucketObject, ...] = ()
    """Parts that Spark reads from their bucket."""


class JobSpan(msgspec.Struct, frozen=True, gc=False):
    """A span of a traced job in the engine's process. `name` is defined in
    `actors.runtime.telemetry`; times are in ns of the wall clock."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool] = {}
    parent: int = -1
    """Index of its parent among the spans of the job; -1 for the service's span of the job."""


class JobTrace(msgspec.Struct, frozen=True, gc=False):
    """The spans of a job in the engine process `pid`, parents first."""

    pid: int
    spans: tuple[JobSpan, ...]


class AnalyzeStatement(msgspec.Struct, frozen=True, gc=False, tag="Analyze"):
    """Asks Spark to analyse a query over empty tables. `tables` are those that it may name."""

    job_id: str
    tables: tuple[tuple[str, TableSchema], ...]
    sql: str
    conf: tuple[tuple[str, str], ...] = ()
    translate: bool = False
    """True to request its relational plan."""
    restricted: bool = False
    """True if the query may only use functions and constructs that access nothing but its tables
    (`actors.engine.catalyst.permitted_functions`). For anything else the job fails with
    ``AccessDenied``, before the analysis if analysing it would access anything else."""


class ParseText(msgspec.Struct, frozen=True, gc=False, tag="Parse"):
    """Asks Spark to parse a text and report the names in it, without analysing or running it.
    Nothing outside of the engine is accessed.

    Answered with `StatementParsed`, or with ``QueryRejected`` if Spark cannot parse it.
    """

    job_id: str
    sql: str
    expression: bool = False
    """True if the text is a single expression (a column of a DataFrame), not a statement."""
    conf: tuple[tuple[str, str], ...] = ()
    """Settings of the session in which it will run; some of them affect parsing."""


class PreparePlan(msgspec.Struct, frozen=True, gc=False, tag="Prepare"):
    """Registers a dataflow's plan with the engine. Later jobs refer to it by `dataflow`.

    The engine builds the plan once on empty inputs and checks the schema of the output. The
    executor sends it again to a new engine, as `known`; then it is neither built nor answered.
    """

    job_id: str
    dataflow: str
    plan: DeltaPlan
    known: bool = False


class RunStep(msgspec.Struct, frozen=True, gc=False, tag="Step"):
    """Runs strata `first` to `last` (inclusive) of a prepared plan in one Spark job.

    `inputs` has every input that these strata read and do not make themselves; a missing input is
    empty.
    """

    job_id: str
    dataflow: str
    first: int
    last: int
    inputs: dict[str, JobRows]
    lo: int
    hi: int
    at_once: bool = False
    """True if all changes are at the same time, ``hi - 1`` (a view computed from scratch)."""
    into_files: bool = False
    """True to return a large answer as files; only with `at_once`."""
    optimistic: bool = False
    """True to assume that strata that rarely produce rows produce none
    (`plan.delta.PlanStratum`)."""
    into_bucket: tuple[BucketFolder, ...] = ()
    """Locations to which the executors write a large answer of the last stratum, one for each of
    the plan's deltas (`DeltaPlan.deltas`)."""
    old: tuple[JobRows, ...] = ()
    """Contents that the answer turns into those that the strata make, one for each of the plan's
    deltas; only with `at_once`."""


class LikelyRun(msgspec.Struct, frozen=True, gc=False):
    """A likely run of strata `first` to `last` with rows in `changed` (deltas, and outputs of
    earlier strata), at one time or at several."""

    first: int
    last: int
    changed: tuple[str, ...]
    one_time: bool
    optimistic: bool = False


class RehearseSteps(msgspec.Struct, frozen=True, gc=False, tag="Rehearse"):
    """Builds plans for likely runs of later steps, and for those with fewer changes.

    Answered with `PlanPrepared`, even if no plan can be built.
    """

    job_id: str
    dataflow: str
    runs: tuple[LikelyRun, ...]


class ComputeDifference(msgspec.Struct, frozen=True, gc=False, tag="Difference"):
    """Runs the query on plain Spark over the complete contents, minus old contents.

    `tables` are the contents of each input up to a time (weights summed, rows repeated by their
    weight). The answer has (columns, ``__time`` = `time`, ``__diff``): what must be appended to
    turn `old` into the query's result. Without `old` it is the result itself.
    """

    job_id: str
    sql: str
    tables: tuple[tuple[str, JobRows], ...]
    output: TableSchema
    time: int
    old: JobRows | None = None
    conf: tuple[tuple[str, str], ...] = ()
    into_bucket: tuple[BucketFolder, ...] = ()
    """Location to which the executors write a large answer."""


class QueryFiles(msgspec.Struct, frozen=True, gc=False, tag="Query"):
    """Runs a query on plain Spark over Parquet files, unchanged.

    `tables` are (name, path). The rows of the answer have the query's own columns, without time or
    diff.
    """

    job_id: str
    sql: str
    tables: tuple[tuple[str, str], ...]
    conf: tuple[tuple[str, str], ...] = ()


class SelectContents(msgspec.Struct, frozen=True, gc=False, tag="Select"):
    """Runs a query as it is written over the contents of its tables, which are given as in
    `ComputeDifference`. The rows of the answer have the columns of `output`, without time or diff,
    in the query's order."""

    job_id: str
    sql: str
    tables: tuple[tuple[str, JobRows], ...]
    output: TableSchema
    conf: tuple[tuple[str, str], ...] = ()
    into_files: bool = False
    """True to return a large answer as files, in order."""


class LendContents(msgspec.Struct, frozen=True, gc=False, tag="Lend"):
    """Makes contents available to every session of the driver, as in `SelectContents`.

    They become a global temporary view with this name (in the database ``global_temp``), until
    `ReturnContents`. The view reads the files of `rows`, which must exist until then. Answered with
    `PlanPrepared`.
    """

    job_id: str
    name: str
    rows: JobRows


class ReturnContents(msgspec.Struct, frozen=True, gc=False, tag="Return"):
    """Drops the view of a `LendContents`, if it exists. Answered with `PlanPrepared`."""

    job_id: str
    name: str


class ForgetPlan(msgspec.Struct, frozen=True, gc=False, tag="Forget"):
    """Drops a prepared plan. Not answered."""

    job_id: str
    dataflow: str


class CancelChildJob(msgspec.Struct, frozen=True, gc=False, tag="Cancel"):
    """Cancels a job, whether it is waiting, planning or running."""

    job_id: str


class TakeFiles(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Reads files as Spark's reader for `format` (parquet, csv or json) does with its `options`.

    The rows have those columns of the files (`read`) that are in `keep`. A small answer comes as
    Arrow, a large one as Parquet files. If a file cannot be read, the job fails with
    ``DefiniteError``; the text starts with the path of the file if Spark reports it.
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
    """True to return a large answer as files."""


class InferFiles(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks Spark for the columns of files. Answered with `QueryAnalyzed`, which has only the
    schema."""

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
    """The call or literal because of which a query's result is not a function of its tables."""

    call: str
    clock: bool = False
    """True if it depends on the time, the session or the release; False if it is random."""
    temporal: bool = False
    """True for a clock call that a temporal filter can follow, if there is no other such call."""


class QueryTranslation(msgspec.Struct, frozen=True, gc=False):
    """The relational plan of a query, from Spark's own analysis. Its scans are numbered as in
    `QueryAnalyzed.inputs`."""

    root: ProjectNode | None
    """A projection onto the output columns by name; None if no rule supports the query."""
    reason: str = ""
    """The construct that no rule supports."""


class QueryAnalyzed(msgspec.Struct, frozen=True, gc=False, tag="Analyzed"):
    """Spark's analysis of a query."""

    job_id: str
    schema: TableSchema = TableSchema(())
    inputs: tuple[str, ...] = msgspec.field(default=(), name="sources")
    """Names of the job's tables that the query reads, in the order in which its plan names them."""
    volatility: VolatileCall | None = None
    """None if the result is a function of the tables, except for choices that Spark's aggregates
    may make (``first``)."""
    translation: QueryTranslation | None = None
    """None if it was not requested."""
    missing: str = ""
    """A name, as Spark spells it, that is not one of the job's tables. All other fields are then
    empty."""


class StatementParsed(msgspec.Struct, frozen=True, gc=False, tag="Parsed"):
    """The names in a text, as Spark parses it.

    If the text is a command, or contains something that is refused, the analysis stops there; the
    other fields are complete only if `command` and `refused` are empty.
    """

    job_id: str
    relations: tuple[tuple[str, ...], ...] = ()
    """The parts of each name of a relation that is not a table expression of the text."""
    functions: tuple[str, ...] = ()
    """Names of all functions that are called, including table functions, as they are written."""
    unknown: tuple[str, ...] = ()
    """Those `functions` that are not Spark's own, such as a session's functions, which may do
    anything."""
    command: str = ""
    """Spark's name of the command that the text is; "" for a query or an expression."""
    kind: str = ""
    """Kind of what is refused: ``function``, ``option`` or ``construct``."""
    refused: str = ""
    """The first function, option or construct that only administrators may use; "" if there is
    none."""


class PlanPrepared(msgspec.Struct, frozen=True, gc=False, tag="Prepared"):
    """The plan is registered, or the request carried out."""

    job_id: str


class FileDone(msgspec.Struct, frozen=True, gc=False):
    """A Parquet file of an answer."""

    path: str
    rows: int


class ObjectDone(msgspec.Struct, frozen=True, gc=False):
    """A Parquet object of an answer. Its key is the prefix given by the job, followed by `name`."""

    name: str
    rows: int
    size: int
    checksum: int
    """CRC-32 of the object."""
    footer: bytes
    """Its metadata, as a Parquet file without rows."""
    delta: int = 0
    """Number of the plan's delta, and of the job's location, to which it belongs. The number after
    the last delta means rows of a stratum that rarely produces any (`RunStep.optimistic`)."""
    time_min: int = 0
    time_max: int = 0


class RowsDone(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The rows that a job made, as an inline Arrow IPC stream, an IPC file, or (on request) Parquet
    `files`, whose rows are not consolidated.

    The reader removes the files after reading them.
    """

    job_id: str
    rows: int
    arrow: bytes | None = None
    arrow_file: str | None = None
    spark_ms: float = 0.0
    prepared: bool = False
    """True if a prepared plan was executed again."""
    files: tuple[FileDone, ...] | None = None
    wait_ms: float = 0.0
    """Time in ms that it waited in the engine for other jobs. `spark_ms` does not include it."""
    frequent: LikelyRun | None = None
    """A kind of run that has been frequent, so that a rehearsal of it pays."""
    objects: tuple[ObjectDone, ...] | None = None
    """Objects with the rows, not consolidated, if the job requested them and there are many rows.
    Objects that nobody adopts are orphans."""
    trace: JobTrace | None = None
    """Trace of a job that came with a trace context."""

    def paths(self) -> tuple[str, ...]:
        """Return all files, which must be removed with the answer."""
        found = () if self.arrow_file is None else (self.arrow_file,)
        return (*found, *(file.path for file in self.files or ()))


class JobFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The job failed. `code` is an error class of `actors.runtime.errors`.

    ``DefiniteError``: the data make an expression fail. ``QueryRejected``: the analysis refused the
    text. ``OperationCanceled``: it was canceled. ``EngineLost``: retry.
    """

    job_id: str
    code: str
    text: str


class EngineReady(msgspec.Struct, frozen=True, gc=False, tag=True):
    """First message of a child process: the engine is ready."""

    job_id: str
    spark_version: str
    java_version: str
    pid: int
    jvm_pid: int
    connect_port: int = 0
    """Loopback port of the Spark Connect server in the driver's own JVM; 0 if there is none."""
    connect_token: str = ""
    """Bearer token that this server requires."""


class JobProgress(msgspec.Struct, frozen=True, gc=False, tag="Progress"):
    """Progress of a long job: its Spark tasks, in the stages known so far. This is not the
    answer."""

    job_id: str
    tasks_done: int
    tasks: int
    executors: int | None = None
    """Number of Spark's current executors; None if the driver executes, or if unknown."""

    def shown(self) -> str:
        """Describe the progress for display.

        >>> JobProgress("a", 1, 4).shown()
        '1 of 4 tasks done'
        >>> JobProgress("a", 0, 2, executors=0).shown()
        '0 of 2 tasks done, and Spark has no executors'
        """
        waits = ", and Spark has no executors" if self.executors == 0 else ""
        return f"{self.tasks_done} of {self.tasks} tasks done{waits}"


def kind_of(job: Job) -> str:
    """Return the kind of a job for display and on the wire: its tag."""
    # The tag and not the class name, so that relations and logs keep the names that users know.
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
    """Asks the executor actor to run a job and answer `reply` (a `ReplySlot`), and to send its
    `JobProgress` to `watcher` (an `ActorAddress`) if there is one.

    A failure is given to the reply as the error itself (`DefiniteError`, `QueryRejected`,
    `OperationCanceled`, `EngineLost`, …), never as a `JobFailed`.
    """

    job: Job
    reply: Any
    watcher: Any = None


class CancelJob(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks the executor actor to cancel a job. Its caller gets `OperationCanceled` immediately."""

    job_id: str


class InspectJobs(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks the executor actor for its current jobs and those that ended last, as
    `job_log.JobNote`s."""

    reply: Any


class EngineCondition(msgspec.Struct, frozen=True):
    """State of an engine: it is running, has had no job yet, is starting, or could not be started;
    `why` is the reason."""

    state: Literal["up", "idle", "starting", "unavailable"]
    why: str = ""


class InspectEngine(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks the executor actor for its `EngineCondition`."""

    reply: Any


class LocateConnect(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks the executor actor for the `EngineReady` of its engine, as soon as one is ready. The
    reply fails with `EngineUnavailable`."""

    reply: Any


ExecutorMessage: TypeAlias = SubmitJob | CancelJob | InspectJobs | InspectEngine | LocateConnect
