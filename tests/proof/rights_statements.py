"""Statements under roles with drawn rights, and what a model says of each. Pure.

A `Step` is a text, how it is sent, the rights that it needs and what it changes in the model. Steps
whose needs are None mean what nobody knows (look-alikes of names, settings, texts cut in two): they
may fail or succeed, and are judged by what is seen and what is changed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeAlias

from rights_model import (
    ADMIN,
    CONNECT,
    CREATE,
    OBJECT_RIGHTS,
    SERVICE_RIGHTS,
    WRITE,
    ModelObject,
    ModelRole,
    Need,
    RightsModel,
)

from actors.model.protocol.relations import RELATIONS

Effect: TypeAlias = Callable[[], None]
BOSS = "boss"
ROLES = (BOSS, "ann", "bob", "cyd", "dee")
NAMES = ("tab", "books", "kept_k", "Odd Name", "sélect", "a.b", "q`t", 'd"q', "order", "__t", "$x")
OBJECTS_MAX = 8
COLUMNS = "(k BIGINT PRIMARY KEY, open STRING DEFAULT 'DEF', secret STRING)"
RELATION_NAMES = tuple(RELATIONS)
CATALOGS = (
    *("pg_class", "pg_attribute", "pg_attrdef", "pg_description", "pg_roles", "pg_authid"),
    *("pg_views", "pg_matviews", "pg_stat_activity", "pg_stats", "pg_settings", "pg_cursors"),
    *("pg_prepared_statements", "pg_index", "pg_proc", "pg_rewrite", "pg_shadow", "pg_user"),
    *("information_schema.columns", "information_schema.tables", "information_schema.views"),
    *("information_schema.table_privileges", "information_schema.role_table_grants"),
)
READS = (
    "SELECT * FROM {x}",
    "SELECT k, secret FROM {x} WHERE k = {n}",
    "SELECT secret FROM {x} ORDER BY k LIMIT 2",
    "SELECT count(*) AS n FROM {x}",
    "SELECT max(secret) AS m FROM {x}",
    "SELECT secret, count(*) AS n FROM {x} GROUP BY secret",
    "WITH q AS (SELECT * FROM {x}) SELECT q.secret FROM q WHERE q.k > {n}",
    "SELECT open FROM {x} UNION ALL SELECT secret FROM {x}",
    "SELECT v.secret FROM (SELECT secret, k FROM {x}) AS v",
    "COPY {x} TO STDOUT",
    "COPY (SELECT secret FROM {x}) TO STDOUT WITH (FORMAT csv)",
)
"""Reads of one object, which must be answered where they may."""
JOINS = (
    "SELECT a.k, b.secret FROM {y} a JOIN {x} b ON a.k = b.k",
    "SELECT a.k FROM {y} a WHERE a.k IN (SELECT k FROM {x})",
    "SELECT secret FROM {y} UNION SELECT secret FROM {x}",
    "SELECT k FROM {y} a WHERE EXISTS (SELECT 1 FROM {x} b WHERE b.k = a.k)",
)
HARD_READS = (
    "SELECT (SELECT max(secret) FROM {x}) AS m",
    "SELECT secret FROM {x} AS OF {time}",
    "SELECT secret FROM {x} TIMESTAMP AS OF {time}",
    "SELECT secret, row_number() OVER (ORDER BY k) AS n FROM {x}",
    "SELECT CAST(secret AS INT) AS n FROM {x}",
    "SELECT 1 / (k - k) AS n, secret FROM {x}",
    "SELECT * FROM {x} WHERE secret LIKE '%CN%' OR open = $${n}$$",
    "TABLE {x}",
    "FROM {x} SELECT secret",
    "SELECT * FROM {x} TABLESAMPLE (100 PERCENT)",
)
"""Reads that an engine may refuse, with whatever rights."""
SAID = (
    "EXPLAIN SELECT * FROM {x} WHERE k = 1",
    "EXPLAIN INCREMENTAL SELECT open, max(secret) AS m FROM {x} GROUP BY open",
    "EXPLAIN CREATE MATERIALIZED VIEW ev AS SELECT * FROM {x}",
    "DESCRIBE {x}",
    "DESCRIBE EXTENDED {x}",
    "DESCRIBE QUERY SELECT * FROM {x}",
    "SHOW COLUMNS FROM {x}",
    "SHOW CREATE TABLE {x}",
    "SHOW INDEXES ON {x}",
    "SHOW GRANTS ON {x}",
    "REFRESH MATERIALIZED VIEW {x}",
    "ANALYZE {x}",
    "VACUUM {x}",
    "SUBSCRIBE {x} AS OF {time} UP TO {time}",
    "COPY {x} FROM '/etc/passwd'",
    "COPY {x} TO '/tmp/out'",
    "COPY {x} TO PROGRAM 'id'",
    "LOCK TABLE {x}",
    "SELECT * FROM IDENTIFIER('{r}')",
    "SELECT * FROM IDENTIFIER(concat('{r}', ''))",
    "SELECT * FROM ${{env:HOME}}{r}",
    "SELECT * FROM parquet.`{r}`",
    "SELECT * FROM csv.`/etc/passwd`",
    "EXECUTE IMMEDIATE 'SELECT * FROM {r}'",
    "SELECT '{r}'::regclass, pg_get_viewdef('{r}'::regclass), pg_relation_size('{r}')",
    "SELECT query_to_xml('SELECT * FROM {r}', true, true, '')",
    "SELECT reflect('java.lang.System', 'getenv')",
    "SELECT current_setting('penstock.as_of'), current_user, has_table_privilege('{r}', 'SELECT')",
)
"""Statements that may be answered or refused: none shows a row of an object that is unreadable."""
SETTINGS = (
    *("SET ROLE boss", "SET ROLE NONE", "SET SESSION AUTHORIZATION boss", "RESET ROLE"),
    *("SET search_path = penstock, public", "SET penstock.as_of = '{time}'", "RESET ALL"),
    *("RESET penstock.as_of", "SET TIME ZONE 'Europe/Paris'", "SHOW ALL", "DISCARD ALL"),
    *("SET spark.sql.variable.substitute = true", "SET roles_required = false", "SHOW ROLES"),
    *("SHOW GRANTS", "SHOW penstock.written_at", "SHOW TABLES", "SHOW SOURCES", "SHOW SINKS"),
    *("SET default_transaction_read_only = on", "SET default_transaction_read_only = off"),
    *("SET statement_timeout = '30s'", "SELECT * FROM pg_catalog.pg_class", "LISTEN x"),
    *("SELECT name, text FROM penstock.errors", "SELECT * FROM penstock.operators"),
)


@dataclass
class Step:
    """One text that a session sends, and what the model says of it."""

    text: str
    kind: str
    needs: list[Need] | None = None
    effect: Effect | None = None
    plain: bool = False
    """True if it must succeed where the role may."""
    copied: bytes | None = None
    """Rows of a COPY FROM STDIN."""
    prepared: str = ""
    """Name under which the extended protocol prepares it; of a text that is empty: that executes
    again what was prepared."""
    named: dict[ModelObject, str] = field(default_factory=dict)
    """The names of its objects when it was drawn: others may change them before it is sent."""
    keeps: str = ""
    """Cursor or prepared statement that a later step names."""


def quoted(name: str) -> str:
    """A name as PostgreSQL's dialect quotes it."""
    return '"' + name.replace('"', '""') + '"'


def is_bare(name: str) -> bool:
    """Whether a name needs no quotes."""
    return name.isidentifier() and name.isascii() and name not in ("order",)


class StatementDrawer:
    """Draws steps for a role. `canary` gives a text that was never given before."""

    def __init__(
        self,
        rng: Random,
        model: RightsModel,
        canary: Callable[[], str],
    ) -> None:
        self.rng = rng
        self.model = model
        self.canary = canary
        self.key = 0
        self.time_ms = 0

    # -- names -----------------------------------------------------------------------------------

    def same(self, name: str) -> str:
        """One of the ways to write the name of an object."""
        rng, bare = self.rng, is_bare(name)
        tick = "`" + name.replace("`", "``") + "`"
        written = rng.choice([quoted(name), quoted(name.swapcase()), tick, *([name] * 4 * bare)])
        if bare and rng.random() < 0.2:
            written = rng.choice((name.upper(), f"/* {name} */{name}", f"\n{name}--\n"))
        if rng.random() < 0.25:
            place = rng.choice(("public", "default", "penstock.public", "spark_catalog.default"))
            written = f"{place}.{written}"
        return written

    def other(self, name: str) -> str:
        """A text that may be taken for the name of an object."""
        wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in name)
        forms = (
            *(quoted(wide), quoted(f"{name} "), quoted(f"{name}\u200b"), f"IDENTIFIER('{name}')"),
            *(f"${{system:x}}{name}", f"parquet.`{name}`", f"penstock.{name}", f"`public.{name}`"),
            *(f"other.public.{quoted(name)}", f"system.session.{name}", f"global_temp.{name}"),
            *(f"{quoted(name)}.secret", f'U&"{name}"', f"{quoted(name)}@v1", f"pg_temp.{name}"),
            *(f"json.`/{name}`", quoted(name.replace("k", "\u212a")), f"({name})", f"[{name}]"),
            *(f"ONLY {quoted(name)}", f"{quoted(name)} *", f"LIVE.{name}", f"stream({name})"),
        )
        return self.rng.choice(forms)

    def pick(self, *kinds: str) -> ModelObject | None:
        """An object of these kinds; None if there is none."""
        found = [x for x in self.model.objects.values() if not kinds or x.kind in kinds]
        return self.rng.choice(found) if found else None

    def readable(self) -> ModelObject | None:
        """An object that can be read by those who may."""
        found = [x for x in self.model.objects.values() if x.kind != "index" and not is_failing(x)]
        return self.rng.choice(found) if found else None

    def new_name(self) -> str | None:
        """A name that no object has."""
        free = [name for name in NAMES if name.lower() not in self.model.objects]
        if len(self.model.objects) >= OBJECTS_MAX or not free:
            return None
        return self.rng.choice(free)

    def new_key(self) -> int:
        """A key that no row has."""
        self.key += 1
        return self.key

    # -- steps -----------------------------------------------------------------------------------

    def draw(self, role: str) -> list[Step]:
        """Steps of one session, one after the other."""
        rng = self.rng
        families: list[tuple[int, Callable[[str], list[Step]]]] = [
            (30, self.read),
            (8, self.said),
            (6, self.setting),
            (18, self.write),
            (10, self.define),
            (4, self.alter),
            (3, self.drop),
            (14, self.rights),
            (3, self.role),
            (5, self.transaction),
            (5, self.cursor),
            (5, self.prepared),
            (3, self.script),
        ]
        ((_, make),) = rng.choices(families, [weight for weight, _ in families])
        steps = make(role)
        for step in steps:
            step.named = {on: on.name for _, on in step.needs or () if on is not None}
        return steps

    def _filled(self, text: str, x: ModelObject, spelled: str | None = None) -> str:
        y = self.readable() or x
        return text.format(
            x=spelled or self.same(x.name),
            y=self.same(y.name),
            r=x.name.replace("'", "''"),
            n=self.rng.randint(0, self.key + 1),
            time=self.time_ms - self.rng.choice((0, 1, 1000)),
        )

    def read(self, role: str) -> list[Step]:
        """A read of an object."""
        rng, x = self.rng, self.readable()
        if x is None:
            return self.define(role)
        kind = rng.random()
        if kind < 0.12:
            return [Step(self._filled(rng.choice(READS), x, self.other(x.name)), "look-alike")]
        if kind < 0.3:
            y = self.readable() or x
            text = rng.choice(JOINS).format(x=self.same(x.name), y=self.same(y.name))
            return [self._sent(Step(text, "join", self.model.reads(x, y), plain=True))]
        if kind < 0.45:
            text = self._filled(rng.choice(HARD_READS), x)
            return [self._sent(Step(text, "hard read", self.model.reads(x)))]
        return [self._sent(self._plain_read(x))]

    def _plain_read(self, x: ModelObject) -> Step:
        text = self._filled(self.rng.choice(READS), x)
        return Step(text, "read", self.model.reads(x), plain=True)

    def _sent(self, step: Step) -> Step:
        """The step, by the extended protocol now and then."""
        if self.rng.random() < 0.3:
            step.prepared = self.rng.choice(("-", "-", "s1", "s2"))
        return step

    def said(self, role: str) -> list[Step]:
        """A statement about objects."""
        x = self.pick()
        if x is None:
            return self.define(role)
        rng = self.rng
        if rng.random() < 0.3:
            name = rng.choice((*RELATION_NAMES, *CATALOGS))
            return [self._sent(Step(f"SELECT * FROM {name}", "system"))]
        spelled = self.other(x.name) if rng.random() < 0.1 else None
        return [self._sent(Step(self._filled(rng.choice(SAID), x, spelled), "said"))]

    def setting(self, role: str) -> list[Step]:
        """A setting of the session."""
        return [Step(self.rng.choice(SETTINGS).format(time=self.time_ms), "setting")]

    # -- rows ------------------------------------------------------------------------------------

    def write(self, role: str) -> list[Step]:
        """A change of rows of one table."""
        x = self.pick("table")
        if x is None:
            return self.define(role)
        makers = (self._insert, self._insert, self._copy, self._update, self._delete)
        odd = (self._upsert, self._insert_query, self._merge, self._returning, self._elsewhere)
        make = self.rng.choice((*makers, *makers, *odd))
        return [self._sent(make(x))]

    def _put(self, x: ModelObject, rows: Sequence[tuple[int, str, str]]) -> None:
        x.rows |= {row[0]: row for row in rows}
        self.model.changed()

    def _insert(self, x: ModelObject) -> Step:
        rows = [(self.new_key(), "o", self.canary()) for _ in range(self.rng.randint(1, 2))]
        values = ", ".join(f"({k}, '{o}', '{s}')" for k, o, s in rows)
        text = f"INSERT INTO {self.same(x.name)} VALUES {values}"
        return Step(text, "insert", [(WRITE, x)], partial(self._put, x, rows), plain=True)

    def _copy(self, x: ModelObject) -> Step:
        row = (self.new_key(), "c", self.canary())
        data = "\t".join(map(str, row)).encode() + b"\n"
        text = f"COPY {self.same(x.name)} FROM STDIN"
        effect = partial(self._put, x, [row])
        return Step(text, "copy in", [(WRITE, x)], effect, plain=True, copied=data)

    def _update(self, x: ModelObject) -> Step:
        secret, k = self.canary(), self._key_of(x)

        def effect() -> None:
            if k in x.rows:
                self._put(x, [(k, str(x.rows[k][1]), secret)])

        text = f"UPDATE {self.same(x.name)} SET secret = '{secret}' WHERE k = {k}"
        return Step(text, "update", [*self.model.reads(x), (WRITE, x)], effect, plain=True)

    def _delete(self, x: ModelObject) -> Step:
        k = self._key_of(x)
        text = f"DELETE FROM {self.same(x.name)} WHERE k = {k}"
        needs = [*self.model.reads(x), (WRITE, x)]
        return Step(text, "delete", needs, lambda: void(x.rows.pop(k, None)), plain=True)

    def _key_of(self, x: ModelObject) -> int:
        return self.rng.choice([*x.rows, 0])

    def _upsert(self, x: ModelObject) -> Step:
        secret, k = self.canary(), self._key_of(x)
        text = (
            f"INSERT INTO {self.same(x.name)} AS t VALUES ({k}, 'u', '{secret}') "
            + self.rng.choice(
                ("ON CONFLICT DO NOTHING", "ON CONFLICT (k) DO UPDATE SET open = 'u'")
            )
            + self.rng.choice(("", " RETURNING secret", " RETURNING *"))
        )
        return Step(text, "upsert")

    def _insert_query(self, x: ModelObject) -> Step:
        y = self.readable() or x
        shift = self.new_key() + 1000
        self.key = shift + 1000
        text = (
            f"INSERT INTO {self.same(x.name)} SELECT k + {shift}, open, secret "
            f"FROM {self.same(y.name)} WHERE k < 1000"
        )
        needs = [(WRITE, x), *self.model.reads(y)]
        # Judged by what it changes: at which rows it looks is the service's to say.
        return Step(text, "insert query", needs)

    def _merge(self, x: ModelObject) -> Step:
        y, secret = self.readable() or x, self.canary()
        given = f"(SELECT * FROM (VALUES ({self._key_of(x)}, '{secret}')) AS v (k, s))"
        source = self.rng.choice((given, f"(SELECT k, secret AS s FROM {self.same(y.name)})"))
        text = (
            f"MERGE INTO {self.same(x.name)} AS t USING {source} AS u ON t.k = u.k "
            "WHEN MATCHED THEN UPDATE SET secret = u.s "
            + self.rng.choice(("", "WHEN NOT MATCHED THEN INSERT (k, secret) VALUES (u.k, u.s)"))
        )
        return Step(text, "merge")

    def _returning(self, x: ModelObject) -> Step:
        row = (self.new_key(), "r", self.canary())
        text = self.rng.choice(
            (
                f"INSERT INTO {self.same(x.name)} VALUES {row} RETURNING *",
                f"UPDATE {self.same(x.name)} SET open = 'r' WHERE k > 0 RETURNING secret",
                f"DELETE FROM {self.same(x.name)} WHERE k = {self._key_of(x)} RETURNING secret",
                f"INSERT INTO {self.same(x.name)} (k) VALUES ({row[0]}) RETURNING open, secret",
            )
        )
        return Step(text, "returning", [*self.model.reads(x), (WRITE, x)])

    def _elsewhere(self, x: ModelObject) -> Step:
        y = self.pick() or x
        text = self.rng.choice(
            (
                f"UPDATE {self.same(x.name)} SET open = "
                f"(SELECT max(secret) FROM {self.same(y.name)})",
                f"DELETE FROM {self.same(x.name)} WHERE k IN (SELECT k FROM {self.same(y.name)})",
                f"INSERT INTO {self.other(x.name)} VALUES (1, 'x', 'y')",
                f"INSERT INTO {self.same(y.name)} VALUES ({self.new_key()}, 'x', 'y')",
                f"TRUNCATE {self.same(x.name)}",
                f"INSERT INTO {self.same(x.name)} DEFAULT VALUES",
                f"INSERT INTO {self.same(x.name)} VALUES ({self.new_key()}, "
                f"(SELECT max(secret) FROM {self.same(y.name)}), 'q')",
                f"UPDATE {self.same(x.name)} SET secret = secret",
                f"INSERT INTO penstock.objects VALUES (1, '{self.new_key()}', 'q')",
            )
        )
        return Step(text, "elsewhere")

    # -- definitions -----------------------------------------------------------------------------

    def define(self, role: str) -> list[Step]:
        """A new object."""
        name, x = self.new_name(), self.readable()
        if name is None:
            return self.drop(role)
        if x is None or self.rng.random() < 0.4:
            return [self._table(role, name)]
        if self.rng.random() < 0.15:
            return [self._index(role, name)]
        if self.rng.random() < 0.15:
            return [self._outside(name, x)]
        return [self._view(role, name, x)]

    def _made(self, role: str, made: ModelObject) -> Effect:
        return lambda: self.model.add(role, made)

    def _table(self, role: str, name: str) -> Step:
        made = ModelObject(name, "table")
        allowed = not name.startswith("__")
        text = f"CREATE TABLE {quoted(name)} {COLUMNS}"
        return Step(text, "create", [(CREATE, None)], self._made(role, made), plain=allowed)

    def _view(self, role: str, name: str, x: ModelObject) -> Step:
        rng, kind = self.rng, self.rng.choice(("view", "plain view"))
        sources: tuple[ModelObject, ...] = (x,)
        above, shows = -1, True
        source = self.same(x.name)
        form = rng.randrange(5)
        if form == 0:
            query = f"SELECT * FROM {source}"
        elif form == 1:
            above = rng.randint(0, self.key)
            query = f"SELECT k, open, secret FROM {source} WHERE k > {above}"
        elif form == 2:
            shows = False
            query = f"SELECT k, open, 'hidden' AS secret FROM {source}"
        elif form == 3:
            y = self.readable() or x
            sources = (x, y)
            query = (
                f"SELECT a.k AS k, a.open AS open, b.secret AS secret FROM {source} a "
                f"JOIN {self.same(y.name)} b ON a.k = b.k"
            )
        else:
            query = f"SELECT k, open, CAST(CAST(secret AS INT) AS STRING) AS secret FROM {source}"
        made = ModelObject(name, kind, sources=sources, above=above, shows_secret=shows)
        made.fails = form == 4
        needs = [(CREATE, None), *self.model.reads(*sources)]
        word = "MATERIALIZED VIEW" if kind == "view" else "VIEW"
        text = f"CREATE {word} {quoted(name)} AS {query}"
        plain = form != 4 and not name.startswith("__")
        return Step(text, "create", needs, self._made(role, made), plain=plain)

    def _index(self, role: str, name: str) -> Step:
        x = self.pick("table", "view") or ModelObject("none", "table")
        made = ModelObject(name, "index", sources=(x,))
        text = f"CREATE INDEX {quoted(name)} ON {self.same(x.name)} (k)"
        needs = [(CREATE, None), *self.model.reads(x)]
        return Step(text, "create", needs, self._made(role, made))

    def _outside(self, name: str, x: ModelObject) -> Step:
        spelled = self.same(x.name)
        text = self.rng.choice(
            (
                f"CREATE SINK {quoted(name)} FROM {spelled} USING parquet OPTIONS (path '/tmp/s')",
                f"CREATE SOURCE {quoted(name)} USING files OPTIONS (path '/etc', format 'csv')",
                f"CREATE OR REPLACE VIEW {spelled} AS SELECT 1 AS k, 'o' AS open, 's' AS secret",
                f"CREATE OR REPLACE MATERIALIZED VIEW {spelled} AS SELECT * FROM {spelled}",
                f"CREATE TABLE {quoted(name)} AS SELECT * FROM {spelled}",
                f"CREATE MATERIALIZED VIEW __subscribe_1f AS SELECT * FROM {spelled}",
                f"CREATE MATERIALIZED VIEW {quoted(name)} TBLPROPERTIES "
                f"('spark.sql.catalog.x' = 'y') AS SELECT * FROM {spelled}",
                f"CREATE TABLE {quoted('penstock.x')} (a INT)",
                f"CREATE TABLE {spelled} (a INT)",
                f"CREATE TABLE IF NOT EXISTS {spelled} (a INT)",
            )
        )
        return Step(text, "outside")

    def alter(self, role: str) -> list[Step]:
        """A change of a definition."""
        x, name = self.pick(), self.new_name()
        if x is None:
            return self.define(role)
        spelled = self.same(x.name)
        needs: list[Need] = [(ADMIN, x)]
        comment = f"says {self.rng.randint(0, 99)}"
        if self.rng.random() < 0.5 and x.kind != "index":
            word = "TABLE" if x.kind == "table" else "VIEW"
            text = f"COMMENT ON {word} {spelled} IS '{comment}'"
            return [Step(text, "comment", needs, lambda: setattr(x, "comment", comment))]
        word = {"view": "MATERIALIZED VIEW", "plain view": "VIEW"}.get(x.kind, x.kind.upper())
        forms: list[tuple[str, Effect | None]] = [
            (f"ALTER {word} {spelled} SET TBLPROPERTIES ('retain_history_ms' = '60000')", None),
        ]
        if name is not None and not name.startswith("__"):
            forms.append(
                (
                    f"ALTER {word} {spelled} RENAME TO {quoted(name)}",
                    partial(self._renamed, x, name),
                )
            )
        if x.kind == "table":
            forms.append((f"ALTER TABLE {spelled} ALTER COLUMN open SET DEFAULT 'DEF'", None))
        text, effect = self.rng.choice(forms)
        return [Step(text, "alter", needs, effect)]

    def _renamed(self, x: ModelObject, name: str) -> None:
        del self.model.objects[x.name.lower()]
        x.name = name
        self.model.objects[name.lower()] = x

    def drop(self, role: str) -> list[Step]:
        """A drop."""
        x = self.pick()
        if x is None:
            return self.define(role)
        others = self.model.dependents(x)
        cascade = self.rng.random() < 0.4
        gone = [x, *others] if cascade else [x]
        word = {"view": "MATERIALIZED VIEW", "plain view": "VIEW"}.get(x.kind, x.kind.upper())
        text = f"DROP {word} {self.same(x.name)}{' CASCADE' if cascade else ''}"
        needs: list[Need] = [(ADMIN, each) for each in gone]
        return [Step(text, "drop", needs, partial(self.model.drop, *gone), cascade or not others)]

    # -- roles -----------------------------------------------------------------------------------

    def rights(self, role: str) -> list[Step]:
        """A GRANT or a REVOKE."""
        rng = self.rng
        revoke = rng.random() < 0.4
        names = [each for each in self.model.roles if each != BOSS or not revoke]
        if not names:
            return self.define(role)
        to = rng.sample(names, rng.randint(1, min(2, len(names))))
        word, toward = ("REVOKE", "FROM") if revoke else ("GRANT", "TO")
        roles = ", ".join(rng.choice((each, each.upper(), quoted(each))) for each in to)
        x = self.pick()
        if x is not None and rng.random() < 0.75:
            given = set(rng.sample(OBJECT_RIGHTS, rng.randint(1, 2)))
            if ADMIN in given and rng.random() < 0.7:
                given = {"read"}
            text = f"{word} {', '.join(given)} ON {self.same(x.name)} {toward} {roles}"
            needs: list[Need] = [(ADMIN, x)]
            on: list[ModelObject] | None = [x]
        else:
            # Rarely an administrator's right: then nothing is refused any more.
            given = {rng.choice(SERVICE_RIGHTS if rng.random() < 0.2 else (CREATE, CONNECT))}
            text, on = f"{word} {', '.join(given)} {toward} {roles}", None
            needs = [(ADMIN, None)]
        effect = partial(self.model.change_rights, to, given, on, revoke=revoke)
        return [Step(text, "rights", needs, effect, plain=True)]

    def role(self, role: str) -> list[Step]:
        """A statement about a role."""
        rng, model = self.rng, self.model
        name = rng.choice(ROLES[1:])
        at = model.roles.get(name)
        if at is None:
            return [self._create_role(name)]
        own: list[Need] = [] if name == role else [(ADMIN, None)]
        form = rng.randrange(6)
        if form == 0:
            text = f"DROP ROLE {name}"
            return [Step(text, "role", [(ADMIN, None)], lambda: void(model.roles.pop(name)), True)]
        if form == 1:
            password = f"p{rng.randint(0, 99)}"
            text = f"ALTER ROLE {name} PASSWORD '{password}'"
            return [Step(text, "role", own, lambda: setattr(at, "password", password), True)]
        if form == 2:
            return [self._token(role, name, at, own)]
        if form == 3:
            text = f"DROP TOKENS FOR ROLE {name}"
            return [Step(text, "role", own, lambda: setattr(at, "tokens", 0), True)]
        if form == 4:
            text = f"ALTER ROLE {name} LOGIN PASSWORD 'boss'"
            needs: list[Need] = [(ADMIN, None)]
            return [Step(text, "role", needs, lambda: setattr(at, "password", "boss"), True)]
        text = rng.choice(
            (
                f"GRANT {role} TO {name}",
                "CREATE ROLE boss LOGIN PASSWORD 'x'",
                f"CREATE USER IF NOT EXISTS {name} PASSWORD 'x'",
                f"ALTER ROLE {name} SUPERUSER",
            )
        )
        return [Step(text, "role")]

    def _create_role(self, name: str) -> Step:
        made = ModelRole(name, password=name)
        text = f"CREATE ROLE {name} LOGIN PASSWORD '{name}'"
        effect = partial(self.model.roles.__setitem__, name, made)
        return Step(text, "role", [(ADMIN, None)], effect, plain=True)

    def _token(self, role: str, name: str, at: ModelRole, own: list[Need]) -> Step:
        def effect() -> None:
            if not at.may(CONNECT):
                at.rights.add(CONNECT)
            at.tokens += 1

        needs = own or [(CONNECT, None)]
        return Step(f"CREATE TOKEN FOR ROLE {name}", "role", needs, effect, at.tokens < 16)

    # -- several steps ---------------------------------------------------------------------------

    def transaction(self, role: str) -> list[Step]:
        """A transaction, in which other sessions may come between."""
        steps = [Step("BEGIN", "begin")]
        for _ in range(self.rng.randint(1, 4)):
            steps += self.rng.choice((self.read, self.write, self.write))(role)
            if self.rng.random() < 0.2:
                steps.append(Step(self.rng.choice(("SAVEPOINT a", "ROLLBACK TO a")), "savepoint"))
        return [*steps, Step(self.rng.choice(("COMMIT", "COMMIT", "ROLLBACK")), "end")]

    def cursor(self, role: str) -> list[Step]:
        """A cursor, whose rows may be fetched later."""
        x, name = self.readable(), self.rng.choice(("c1", "c2"))
        if x is None:
            return self.define(role)
        query = self.rng.choice(
            ("SELECT * FROM {x}", "SUBSCRIBE {x}", "SELECT max(secret) FROM {x}")
        )
        text = f"DECLARE {name} CURSOR WITH HOLD FOR {self._filled(query, x)}"
        fetch = Step(f"FETCH {self.rng.choice(('1', 'ALL'))} {name}", "fetch", keeps=name)
        return self.rng.choice(
            (
                [
                    Step(f"CLOSE {name}", "close", keeps=name),
                    # A subscribe is refused when the first row is fetched.
                    Step(
                        text,
                        "subscribe" if "SUBSCRIBE" in text else "declare",
                        self.model.reads(x),
                        keeps=name,
                    ),
                    fetch,
                ],
                [fetch],
            )
        )

    def prepared(self, role: str) -> list[Step]:
        """A prepared statement, which may be executed later."""
        x, name = self.readable(), self.rng.choice(("p1", "p2"))
        if x is None:
            return self.define(role)
        run = Step(f"EXECUTE {name}", "execute")
        again = Step("", "again", prepared=self.rng.choice(("s1", "s2")))
        made = Step(f"PREPARE {name} AS {self._filled(self.rng.choice(READS[:6]), x)}", "prepare")
        return self.rng.choice(([Step(f"DEALLOCATE {name}", "close"), made, run], [run], [again]))

    def script(self, role: str) -> list[Step]:
        """A text of several statements, which is one transaction."""
        steps = [self.rng.choice((self.read, self.write))(role)[0] for _ in range(2)]
        steps = [each for each in steps if each.copied is None and "COPY" not in each.text]
        if len(steps) < 2:
            return self.read(role)
        needs: list[Need] | None = None
        if all(each.needs is not None for each in steps):
            needs = [need for each in steps for need in each.needs or ()]
        return [Step("; ".join(each.text for each in steps), "script", needs)]


def is_failing(x: ModelObject) -> bool:
    """Whether reading an object may be answered with an error of its data."""
    return x.fails or any(is_failing(each) for each in x.sources)


def void(_: object) -> None:
    """Drop a value."""
