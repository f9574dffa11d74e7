"""Requests of Spark Connect's clients, over objects of a model and with pieces that are forbidden.

A forbidden piece runs code, or names a file, an address, a class or a setting of the service; each
has the text `MARK` in it, so that who sees the request sees whether the piece is still there. Pure.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
from google.protobuf import message_factory
from pyspark.sql.connect.proto import base_pb2, relations_pb2
from rights_model import ModelObject, Need, RightsModel
from rights_statements import is_failing

from tests.kit.connect_fuzz import fuzzed_request

MARK: Final = "CNRFORBIDDENMARK"
_UDT: Final = json.dumps(
    {
        "type": "struct",
        "fields": [
            {
                "name": "a",
                "type": {"type": "udt", "class": f"a.{MARK}", "sqlType": "string"},
                "nullable": True,
                "metadata": {},
            }
        ],
    }
)
_TEXTS: Final = (
    f"SELECT * FROM parquet.`/{MARK}`",
    f"SELECT * FROM csv.`/{MARK}`",
    f"SELECT reflect('java.lang.System', 'getProperty', '{MARK}')",
    f"SELECT ref${{x}}lect('{MARK}', 'b')",
    f"SELECT java_method('{MARK}', 'b')",
    f"SELECT try_reflect('{MARK}', 'b')",
    f"SELECT xpath('{MARK}', 'a')",
    f"SELECT nofunction('{MARK}')",
    f"SET spark.sql.catalog.x = {MARK}",
    f"SET spark.sql.variable.substitute = true -- {MARK}",
    f"ADD JAR '/{MARK}.jar'",
    f"CREATE TEMPORARY FUNCTION f AS '{MARK}'",
    f"CREATE TABLE x USING parquet LOCATION '/{MARK}'",
    f"CREATE TEMPORARY VIEW v USING csv OPTIONS (path '/{MARK}')",
    f"INSERT OVERWRITE DIRECTORY '/{MARK}' USING csv SELECT 1",
    f"LOAD DATA INPATH '/{MARK}' INTO TABLE x",
    f"EXECUTE IMMEDIATE 'SELECT 1 AS {MARK}'",
    f"BEGIN SELECT '{MARK}'; END",
    f"SELECT * FROM {MARK}.a.b",
    f"SELECT * FROM read_files('/{MARK}')",
)


OTHER_METHODS: Final = (
    *("AddArtifacts", "ArtifactStatus", "Interrupt", "ReattachExecute", "ReleaseExecute"),
    *("ReleaseSession", "FetchErrorDetails", "CloneSession"),
)


@dataclass
class DrawnRequest:
    """A request, and what the model says of it."""

    method: str
    message: Any
    what: str
    needs: list[Need] | None = None
    forbidden: bool = False
    """True if a piece of it may be used only by who may run code."""
    plain: bool = False


class RequestDrawer:
    """Draws requests over the objects of a model."""

    def __init__(self, rng: Random, model: RightsModel) -> None:
        self._rng = rng
        self._model = model

    def draw(self) -> DrawnRequest:
        """A request of any method, without its session."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.1:
            message = base_pb2.ExecutePlanRequest()
            try:
                message.ParseFromString(fuzzed_request(rng))
            except Exception:  # noqa: BLE001 - bytes that are no message
                return self.draw()
            return DrawnRequest("ExecutePlan", message, "random")
        if kind < 0.2:
            return self._config()
        if kind < 0.27:
            return self._command()
        if kind < 0.32:
            return self._other_method()
        return self._plan()

    def _other_method(self) -> DrawnRequest:
        method = self._rng.choice(OTHER_METHODS)
        kind = base_pb2.DESCRIPTOR.services_by_name["SparkConnectService"].methods_by_name[method]
        message = message_factory.GetMessageClass(kind.input_type)()
        if method == "AddArtifacts":
            message.batch.artifacts.add(name=f"jars/{MARK}.jar").data.data = MARK.encode()
        elif method == "ArtifactStatus":
            message.names.append(MARK)
        elif method == "Interrupt":
            message.interrupt_type = base_pb2.InterruptRequest.INTERRUPT_TYPE_ALL
        forbidden = method in ("AddArtifacts", "ArtifactStatus")
        return DrawnRequest(method, message, method, forbidden=forbidden)

    # -- plans -----------------------------------------------------------------------------------

    def _plan(self) -> DrawnRequest:
        rng = self._rng
        objects = self._model.objects.values()
        readable = [x for x in objects if x.kind != "index" and not is_failing(x)]
        x = rng.choice(readable) if readable else ModelObject("none", "table")
        kind = rng.random()
        needs: list[Need] | None = self._model.reads(x)
        forbidden, exact = False, True
        if kind < 0.3:
            leaf, forbidden, needs = self._forbidden_leaf(), True, None
        elif kind < 0.4:
            leaf, needs, exact = _named(self._other(x.name)), None, False
        elif kind < 0.6:
            leaf = relations_pb2.Relation()
            leaf.sql.query = f"SELECT * FROM {self._same(x.name)}"
        else:
            leaf = _named(self._same(x.name))
        relation = leaf
        for _ in range(rng.choice((0, 0, 1, 2, 4, 8))):
            if not forbidden and needs is not None and rng.random() < 0.1:
                relation, forbidden = self._forbidden_around(relation), True
            else:
                relation = self._wrapped(relation)
        plain = exact and not forbidden and relation is leaf and bool(readable)
        if rng.random() < 0.8:
            message = base_pb2.ExecutePlanRequest()
            message.plan.root.CopyFrom(relation)
            return DrawnRequest("ExecutePlan", message, "plan", needs, forbidden, plain)
        message = base_pb2.AnalyzePlanRequest()
        part = rng.choice(("schema", "explain", "tree_string", "is_local", "semantic_hash"))
        getattr(message, part).plan.root.CopyFrom(relation)
        return DrawnRequest("AnalyzePlan", message, f"analyze {part}", None, forbidden)

    def _same(self, name: str) -> str:
        tick = "`" + name.replace("`", "``") + "`"
        bare = name.isidentifier() and name.isascii() and name != "order"
        forms = [tick, f"default.{tick}", f"spark_catalog.default.{tick}"]
        return self._rng.choice([*forms, *([name, name.upper()] if bare else [])])

    def _other(self, name: str) -> str:
        tick = "`" + name.replace("`", "``") + "`"
        forms = (
            *(f"penstock.{tick}", f"public.{tick}", f"`{name} `", f"global_temp.{tick}"),
            *(f"parquet.{tick}", f"${{env:x}}{name}", f"`default.{name}`", f"{tick}.secret"),
            *("penstock.objects", "penstock.errors", "a.b.c.d", "`", "", "system.session.x"),
        )
        return self._rng.choice(forms)

    def _wrapped(self, inner: Any) -> Any:
        rng, made = self._rng, relations_pb2.Relation()
        form = rng.randrange(10)
        if form == 0:
            made.limit.input.CopyFrom(inner)
            made.limit.limit = 5
        elif form == 1:
            made.project.input.CopyFrom(inner)
            made.project.expressions.add().unresolved_star.SetInParent()
        elif form == 2:
            made.filter.input.CopyFrom(inner)
            made.filter.condition.literal.boolean = True
        elif form == 3:
            made.subquery_alias.input.CopyFrom(inner)
            made.subquery_alias.alias = rng.choice(("a", "tab", "b"))
        elif form == 4:
            made.set_op.left_input.CopyFrom(_range())
            made.set_op.right_input.CopyFrom(inner)
            made.set_op.set_op_type = relations_pb2.SetOperation.SET_OP_TYPE_UNION
        elif form == 5:
            made.join.left.CopyFrom(inner)
            made.join.right.CopyFrom(_range())
            made.join.join_type = relations_pb2.Join.JOIN_TYPE_CROSS
        elif form == 6:
            made.with_relations.root.CopyFrom(_range())
            made.with_relations.references.add().CopyFrom(inner)
        elif form == 7:
            made.sort.input.CopyFrom(inner)
        elif form == 8:
            made.project.input.CopyFrom(_range())
            query = made.project.expressions.add()
            query.expression_string.expression = "(SELECT max(1))"
            made.with_relations.root.CopyFrom(made.project.input)
            made.with_relations.references.add().CopyFrom(inner)
        else:
            made.show_string.input.CopyFrom(inner)
            made.show_string.num_rows = 5
        return made

    # -- what is forbidden -----------------------------------------------------------------------

    def _forbidden_leaf(self) -> Any:
        made = relations_pb2.Relation()
        form = self._rng.randrange(9)
        if form < 3:
            made.sql.query = self._rng.choice(_TEXTS)
        elif form == 3:
            made.read.data_source.format = self._rng.choice(("parquet", "jdbc", MARK))
            made.read.data_source.paths.append(f"/{MARK}")
        elif form == 4:
            made.local_relation.schema = _UDT
        elif form == 5:
            made.cached_local_relation.hash = MARK
        elif form == 6:
            made.extension.type_url = f"type.googleapis.com/{MARK}"
            made.extension.value = MARK.encode()
        elif form == 7:
            made.unresolved_table_valued_function.function_name = MARK
        else:
            made.catalog.create_external_table.table_name = "x"
            made.catalog.create_external_table.path = f"/{MARK}"
        return made

    def _forbidden_around(self, inner: Any) -> Any:
        made = relations_pb2.Relation()
        form = self._rng.randrange(5)
        if form == 0:
            made.map_partitions.input.CopyFrom(inner)
            made.map_partitions.func.python_udf.command = MARK.encode()
            return made
        if form == 1:
            made.parse.input.CopyFrom(inner)
            made.parse.format = relations_pb2.Parse.PARSE_FORMAT_JSON
            made.parse.options["rowValidationXSDPath"] = MARK
            return made
        made.project.input.CopyFrom(inner)
        expression = made.project.expressions.add()
        self._expression(expression, form)
        return made

    def _expression(self, at: Any, form: int) -> None:
        if form == 2:
            udf = at.common_inline_user_defined_function
            udf.function_name, udf.python_udf.command = "f", MARK.encode()
        elif form == 3:
            name = self._rng.choice(("reflect", "java_method", "xpath", "nofunction"))
            at.unresolved_function.function_name = name
            at.unresolved_function.arguments.add().literal.string = MARK
        else:
            at.expression_string.expression = self._rng.choice(
                (f"reflect('{MARK}', 'b')", f"(SELECT 1 FROM parquet.`/{MARK}`)", f"f('{MARK}')")
            )

    # -- commands and settings -------------------------------------------------------------------

    def _command(self) -> DrawnRequest:
        rng, message = self._rng, base_pb2.ExecutePlanRequest()
        command = message.plan.command
        form = rng.randrange(8)
        if form < 3:
            command.sql_command.input.sql.query = rng.choice(_TEXTS)
        elif form == 3:
            command.write_operation.input.CopyFrom(_range())
            command.write_operation.source = "parquet"
            command.write_operation.path = f"/{MARK}"
        elif form == 4:
            command.register_function.function_name = "f"
            command.register_function.python_udf.command = MARK.encode()
        elif form == 5:
            command.create_dataframe_view.input.CopyFrom(self._forbidden_leaf())
            command.create_dataframe_view.name = "v"
        elif form == 6:
            command.write_stream_operation_start.input.CopyFrom(_range())
            command.write_stream_operation_start.format = "parquet"
            command.write_stream_operation_start.path = f"/{MARK}"
        else:
            command.extension.type_url = f"type.googleapis.com/{MARK}"
            command.extension.value = b"x"
        return DrawnRequest("ExecutePlan", message, "command", forbidden=True)

    def _config(self) -> DrawnRequest:
        rng, message = self._rng, base_pb2.ConfigRequest()
        names = (
            *("spark.sql.catalog.x", "spark.sql.variable.substitute", "spark.jars"),
            *("spark.sql.extensions", "spark.hadoop.fs.x", "spark.sql.warehouse.dir"),
            *("spark.sql.runSQLOnFiles", "spark.plugins", "spark.sql.legacy.aClassName"),
            *("spark.sql.ui.explainMode", "SPARK.SQL.VARIABLE.SUBSTITUTE"),
        )
        if rng.random() < 0.6:
            message.operation.set.pairs.add(key=rng.choice(names), value=MARK)
            return DrawnRequest("Config", message, "set", forbidden=True)
        if rng.random() < 0.5:
            name = rng.choice(("spark.sql.ansi.enabled", "spark.sql.session.timeZone"))
            value = f"${{env:{MARK}}}"
            message.operation.set.pairs.add(key=name, value=value)
            return DrawnRequest("Config", message, "set", forbidden=True)
        message.operation.get_all.SetInParent()
        return DrawnRequest("Config", message, "get all")


def _named(name: str) -> Any:
    made = relations_pb2.Relation()
    made.read.named_table.unparsed_identifier = name
    return made


def _range() -> Any:
    made = relations_pb2.Relation()
    made.range.end, made.range.step = 2, 1
    return made
