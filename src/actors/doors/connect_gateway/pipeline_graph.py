"""The datasets of a `spark-pipelines` project, as its client defines them. Pure.

A materialized view becomes a materialized view of the service, and a view a plain view. A temporary
view is not in the catalog: its definition precedes the queries that name it. Streaming tables,
separate flows and sinks have no counterpart in the service and are refused.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Literal, TypeAlias

import msgspec

from actors.doors.connect_gateway.error_status import SparkCondition, unsupported
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage, plain_text_of
from actors.doors.connect_gateway.sql_names import parse_identifier, split_words, temporary_view_of
from actors.engine.spark.spark_releases import pipeline_messages
from actors.engine.sql.dialects import without_schema
from actors.engine.sql.grammar import parse_statement, split_statements
from actors.engine.sql.object_names import CATALOGS, SCHEMAS, object_name
from actors.engine.sql.statements import ChangeStatement
from actors.engine.sql.tokens import SqlDialect, lex_text, quote_name, quote_text
from actors.engine.views.plain_views import find_relations
from actors.model.protocol.api import CreateView
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage, SqlSyntaxError

DatasetKind: TypeAlias = Literal["materialized view", "view", "temporary view"]

DATASETS_MAX: Final = 1_000
"""Maximum number of datasets in one pipeline."""
TEXT_CHARACTERS_MAX: Final = 4 * 1024 * 1024
"""Maximum total length of the queries in one pipeline."""
POLICY_PROPERTY: Final = "refresh_policy"
"""Property with the refresh policy of a dataset that is defined in Python."""
_SPARK_CONF: Final = "spark."
_LASTING: Final = ("materialized view", "view")
_STREAMING: Final = "use a materialized view, which Penstock keeps up to date with its inputs"
_FLOW: Final = "a materialized view has exactly one query, which defines it"
_SINK: Final = "create a Penstock sink with CREATE SINK, outside the pipeline"
_BEFORE_NAME: Final = frozenset(
    {"STREAMING", "TABLE", "FLOW", "SINK", "TEMPORARY", "TEMP", "VIEW", "IF", "NOT", "EXISTS"}
)
"""Keywords that may stand between CREATE and a dataset's name."""
_OUTPUTS: Final[Mapping[str, tuple[str, str]]] = {
    "TABLE": ("streaming table", _STREAMING),
    "SINK": ("sink", _SINK),
}
"""Maps the kinds of outputs that are refused to their names and the reason."""


def _kind_name(number: int) -> str:
    """Return the name of an output type; "" if this PySpark does not know it."""
    known = pipeline_messages().OutputType.DESCRIPTOR.values_by_number.get(number)
    return "" if known is None else str(known.name)


class PipelineDataset(msgspec.Struct, frozen=True, kw_only=True):
    """One dataset. `query` is empty until the flow with the query is defined."""

    name: str
    kind: DatasetKind
    query: str = ""
    policy: str = ""
    comment: str = ""
    properties: Mapping[str, str] = {}
    place: str = ""
    """File and line of the definition; "" if unknown."""

    @property
    def shown(self) -> str:
        """Return the name as Spark shows it."""
        return f"spark_catalog.default.{self.name}"

    @property
    def lasting(self) -> bool:
        """Return whether the dataset is in the catalog after the run."""
        return self.kind in _LASTING


def statement_of_dataset(dataset: PipelineDataset, query: str) -> str:
    """Return the statement that creates or replaces a dataset with this query.

    >>> one = PipelineDataset(name="v", kind="materialized view", policy="full", comment="c")
    >>> print(statement_of_dataset(one, "SELECT 1 AS a"))
    CREATE OR REPLACE MATERIALIZED VIEW `v` REFRESH POLICY FULL COMMENT 'c' AS
    SELECT 1 AS a
    """
    parts = [f"CREATE OR REPLACE {dataset.kind.upper()} {quote_name(dataset.name)}"]
    if dataset.policy:
        parts.append(f"REFRESH POLICY {dataset.policy.upper()}")
    if dataset.comment:
        parts.append(f"COMMENT {quote_text(dataset.comment)}")
    if dataset.properties:
        pairs = (f"{quote_text(k)} = {quote_text(v)}" for k, v in dataset.properties.items())
        parts.append(f"TBLPROPERTIES ({', '.join(pairs)})")
    return f"{' '.join(parts)} AS\n{query}"


class DataflowGraph:
    """The datasets of one pipeline."""

    def __init__(self, command: ProtoMessage) -> None:
        """Start an empty pipeline from a `CreateDataflowGraph`. Raises `InvalidUsage` for a catalog
        or database other than the service's."""
        catalog, database = command.default_catalog, command.default_database
        if (catalog and catalog.lower() not in CATALOGS) or (
            database and database.lower() not in SCHEMAS
        ):
            raise InvalidUsage(
                f"invalid default schema {catalog or 'spark_catalog'}.{database or 'default'} of "
                f"the pipeline: expected spark_catalog.default"
            )
        self._conf = _settings(command.sql_conf)
        self._datasets: dict[str, PipelineDataset] = {}
        """The datasets by folded name, in the order of definition."""
        self._characters = 0
        """Total length of all queries."""

    def __len__(self) -> int:
        return len(self._datasets)

    # -- definitions ---------------------------------------------------------------------------

    def define_output(self, command: ProtoMessage) -> PipelineDataset:
        """Add the dataset of a `DefineOutput`. Raises `SparkCondition` for an unsupported kind or
        option, and `InvalidUsage`."""
        name, place = command.output_name, _place_of(command)
        wanted = _kind_name(command.output_type)
        if wanted in _OUTPUTS:
            kind, why = _OUTPUTS[wanted]
            raise _refused(kind, name, why, place)
        if wanted == "TEMPORARY_VIEW":
            return self._add(
                PipelineDataset(name=_name_of(name), kind="temporary view", place=place)
            )
        if wanted != "MATERIALIZED_VIEW":
            raise _refused("output", name, "its kind is unknown", place)
        details = command.table_details
        for given, what in (
            (details.partition_cols, "partition_cols"),
            (details.clustering_columns, "cluster_by"),
            (details.format, "format"),
        ):
            if given:
                why = f"a materialized view of Penstock has no {what}"
                raise _refused("materialized view", name, why, place)
        if details.WhichOneof("schema") and (
            details.schema_string or details.HasField("schema_data_type")
        ):
            why = "omit the schema, which follows from the query"
            raise _refused("materialized view", name, why, place)
        properties = dict(details.table_properties)
        policy = properties.pop(POLICY_PROPERTY, "")
        return self._add(
            PipelineDataset(
                name=_name_of(name),
                kind="materialized view",
                policy=policy,
                comment=command.comment,
                properties={**self._conf, **properties},
                place=place,
            )
        )

    def define_flow(self, command: ProtoMessage) -> PipelineDataset:
        """Set the query of a dataset from a `DefineFlow`. Raises as `define_output` does."""
        target, place = command.target_dataset_name, _place_of(command)
        if command.WhichOneof("details") == "auto_cdc_flow_details":
            raise _refused("AUTO CDC flow", command.flow_name, _STREAMING, place)
        found = self._datasets.get(fold(_name_of(target)))
        if found is None:
            raise InvalidUsage(f"flow {command.flow_name}: dataset {target} is not defined")
        own = fold(_name_of(command.flow_name)) == fold(found.name)
        if command.once or not own or found.query:
            raise _refused("append flow", command.flow_name, _FLOW, place)
        if not command.relation_flow_details.HasField("relation"):
            raise _refused(found.kind, target, "the flow has no query", place)
        query = _query_of(command.relation_flow_details.relation, found, place)
        properties = found.properties
        if found.kind == "materialized view":
            properties = {**properties, **_settings(command.sql_conf)}
        made = msgspec.structs.replace(found, query=query, properties=properties)
        return self._put(made)

    def define_texts(self, command: ProtoMessage) -> None:
        """Add the datasets of a `DefineSqlGraphElements`. Raises as `define_output` does, and
        `SqlSyntaxError` with file and line."""
        text, file = command.sql_text, command.sql_file_path
        # Check the size before copying the text for each statement.
        self._check_room(len(text))
        try:
            for each in split_statements(text):
                # Prepend spaces, so that lines and columns are those of the file.
                blank = re.sub(r"[^\n]", " ", text[: each.start])
                self._add(self._dataset_of(blank + each.text, file))
        except SqlSyntaxError as error:
            raise SqlSyntaxError(f"{file}: {error.problem}", hint=error.hint) from None

    def _dataset_of(self, text: str, file: str) -> PipelineDataset:
        words = split_words(text)
        heads = [word.text.upper() for word in words[:6]]
        place = f"{file}:{text[: words[0].start].count(chr(10)) + 1}" if words else file
        if heads[:3] in (["CREATE", "OR", "REFRESH"], ["CREATE", "OR", "REPLACE"]):
            # Remove OR REFRESH and OR REPLACE: a run replaces each definition anyway.
            start, end = words[1].start, words[2].end
            text = text[:start] + " " * (end - start) + text[end:]
            del words[1:3], heads[1:3]
        named = (word.text for word in words[1:] if word.text.upper() not in _BEFORE_NAME)
        name = next(named, "")
        match heads[:2]:
            case ["CREATE", "STREAMING" | "TABLE"]:
                raise _refused("streaming table", name, _STREAMING, place)
            case ["CREATE", "FLOW"]:
                raise _refused("flow", name, _FLOW, place)
            case ["CREATE", "SINK"]:
                raise _refused("sink", name, _SINK, place)
            case ["CREATE", "TEMPORARY" | "TEMP"]:
                view = temporary_view_of(text)
                if view is None or view.columns or not view.query:
                    why = "expected CREATE TEMPORARY VIEW name AS query"
                    raise _refused("temporary view", name, why, place)
                return PipelineDataset(
                    name=view.name, kind="temporary view", query=view.query, place=place
                )
            case ["CREATE", "MATERIALIZED" | "VIEW"]:
                return self._parsed(text, place)
        raise _refused(
            "statement",
            " ".join(heads[:3]),
            "use only CREATE MATERIALIZED VIEW, CREATE VIEW and CREATE TEMPORARY VIEW",
            place,
        )

    def _parsed(self, text: str, place: str) -> PipelineDataset:
        statement = parse_statement(text)
        assert isinstance(statement, ChangeStatement), place
        if statement.refused:
            raise InvalidUsage(statement.refused)
        (request,) = statement.requests
        assert isinstance(request, CreateView), place
        assert statement.query is not None, place
        if request.plain:
            properties = {}
        else:
            given = {
                "retain_history_ms": request.retain_history_ms,
                "target_lag_ms": request.target_lag_ms or None,
            }
            numbers = {key: str(value) for key, value in given.items() if value is not None}
            properties = {**self._conf, **request.conf, **numbers}
        return PipelineDataset(
            name=request.name,
            kind="view" if request.plain else "materialized view",
            query=statement.query.text,
            policy=request.refresh_policy if not request.plain else "",
            comment=request.comment,
            properties=properties,
            place=place,
        )

    def _add(self, dataset: PipelineDataset) -> PipelineDataset:
        known = self._datasets.get(fold(dataset.name))
        if known is not None:
            raise InvalidUsage(
                f"dataset {dataset.name} is defined twice: {known.place}, {dataset.place}"
            )
        if len(self._datasets) >= DATASETS_MAX:
            raise InvalidUsage(f"too many datasets in the pipeline (limit {DATASETS_MAX})")
        return self._put(dataset)

    def _put(self, dataset: PipelineDataset) -> PipelineDataset:
        self._check_room(len(dataset.query))
        self._characters += len(dataset.query)
        self._datasets[fold(dataset.name)] = dataset
        return dataset

    def _check_room(self, characters: int) -> None:
        if self._characters + characters > TEXT_CHARACTERS_MAX:
            raise InvalidUsage(
                f"the pipeline's queries are too long (limit {TEXT_CHARACTERS_MAX} characters)"
            )

    # -- reading -------------------------------------------------------------------------------

    def ordered(self) -> list[PipelineDataset]:
        """Return all datasets in dependency order. Raises `InvalidUsage` for a cycle, and for a
        dataset without a query."""
        for dataset in self._datasets.values():
            if not dataset.query:
                raise InvalidUsage(f"dataset {dataset.name} ({dataset.place}) has no query")
        edges = {key: self._reads(each) for key, each in self._datasets.items()}
        try:
            order = list(graphlib.TopologicalSorter(edges).static_order())
        except graphlib.CycleError as error:
            circle = " -> ".join(self._datasets[key].name for key in error.args[1])
            raise InvalidUsage(f"datasets depend on each other in a cycle: {circle}") from None
        return [self._datasets[key] for key in order]

    def reads(self, dataset: PipelineDataset) -> set[str]:
        """Return the lower-case names of the lasting datasets that a dataset reads, directly or
        through temporary views."""
        found: set[str] = set()
        for each in self._below(dataset, ("temporary view",)):
            found.update(key for key in self._reads(each) if self._datasets[key].lasting)
        return found

    def _reads(self, dataset: PipelineDataset) -> list[str]:
        own = fold(dataset.name)
        named = map(fold, find_relations(_bare(dataset.query)))
        # If a dataset names itself, the name is defined within its query, or the service reports an
        # error.
        return [key for key in dict.fromkeys(named) if key in self._datasets and key != own]

    def _below(self, dataset: PipelineDataset, kinds: Collection[str]) -> Iterator[PipelineDataset]:
        """Yield a dataset and its transitive inputs of these kinds, each once."""
        seen, left = {fold(dataset.name)}, [dataset]
        while left:
            found = left.pop()
            yield found
            for key in self._reads(found):
                if key not in seen and self._datasets[key].kind in kinds:
                    seen.add(key)
                    left.append(self._datasets[key])

    def query_with(
        self,
        dataset: PipelineDataset,
        order: list[PipelineDataset],
        kinds: Collection[str] = ("temporary view",),
    ) -> str:
        """Return a dataset's query with a WITH that defines its transitive inputs of some kinds.
        `order` is the result of `ordered`."""
        needed = {fold(each.name) for each in self._below(dataset, kinds)} - {fold(dataset.name)}
        if not needed:
            return dataset.query
        # Define each input once in a single WITH: nested definitions would grow exponentially.
        parts = ", ".join(
            f"{quote_name(each.name)} AS ({_bare(each.query)}\n)"
            for each in order
            if fold(each.name) in needed
        )
        return f"WITH {parts} ({_bare(dataset.query)}\n)"

    def chosen(self, names: Collection[str], *, all_of_them: bool) -> set[str]:
        """Return the lower-case names of the datasets that a run should define. Raises
        `InvalidUsage` for an unknown name."""
        if all_of_them:
            return set(self._datasets)
        found = {fold(_name_of(name)): name for name in names}
        for key, name in found.items():
            known = self._datasets.get(key)
            if known is None or not known.lasting:
                raise InvalidUsage(f"this pipeline has no dataset {name} that can be refreshed")
        return set(found)


def _bare(query: str) -> str:
    return without_schema(lex_text(query, SqlDialect.SPARK), SCHEMAS, CATALOGS)


def _settings(conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of Spark. Others belong to the project's own Python code."""
    return {key: value for key, value in conf.items() if key.startswith(_SPARK_CONF)}


def _name_of(text: str) -> str:
    parts = parse_identifier(text)
    if parts is None:
        raise InvalidUsage(f"invalid dataset name {text!r}")
    return object_name(parts)


def _place_of(command: ProtoMessage) -> str:
    place = command.source_code_location
    if not place.file_name:
        return ""
    return f"{place.file_name}:{place.line_number}"


def _refused(kind: str, name: str, why: str, place: str) -> SparkCondition:
    behind = f" ({place})" if place else ""
    return unsupported(f"The {kind} {name}{behind} is not supported by Penstock: {why}.")


def _query_of(relation: ProtoMessage, dataset: PipelineDataset, place: str) -> str:
    """Return the SQL text of a flow's query. Raises `SparkCondition` if it has none."""
    kind = relation.WhichOneof("rel_type")
    text = plain_text_of(relation)
    if text is not None:
        return text
    read = relation.read
    if kind == "read" and read.HasField("named_table") and not read.is_streaming:
        return f"SELECT * FROM {read.named_table.unparsed_identifier}"
    match kind:
        case "read" if read.is_streaming:
            why = f"its query reads a stream; {_STREAMING}"
        case "sql":
            why = "its query has parameters; write their values into the text"
        case "with_relations":
            why = "its query names DataFrames; define each as a temporary view of the pipeline"
        case _:
            why = (
                f"its query is a DataFrame ({kind}), whose changes Penstock cannot follow; return "
                "spark.sql(text) instead"
            )
    raise _refused(dataset.kind, dataset.name, why, place)
