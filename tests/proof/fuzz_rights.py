"""Statements, requests and names under roles with drawn rights, against a model of what each may.

    .venv/bin/python tests/proof/fuzz_rights.py [--statements 20000] [--seconds 600] [--seed 1]
        [--door postgres|connect] [--json FILE] [--replay SEED] [--spark]

Rows hold canaries (`rights_model`). Nothing that a role is answered, told or shown may hold one of
a row that it may not read and has not written. What the model refuses must fail, and what it
permits must succeed where the statement is a plain one. After every batch the objects, rows, roles
and rights, as an administrator sees them, are the model's. Each round of statements has a service
of its own, on the in-memory engine, and is drawn from a seed; by Spark Connect it stands before a
server that stands for Spark (`rights_connect`). Exit status 1 for anything else, with the round's
seed and its last statements.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import anyio
import pyarrow as pa
from rights_model import (
    ADMIN,
    CANARY,
    CREATE,
    WRITE,
    ModelObject,
    ModelRole,
    Need,
    RightsModel,
)
from rights_requests import drawn_request
from rights_session import LoginRefused, PgAnswer, PgSession
from rights_statements import BOSS, ROLES, StatementDrawer, Step

from actors.doors.client.client import Client
from actors.model.pgwire.scram import make_verifier
from actors.model.plan.jobs import Answer, Job
from actors.model.protocol.api import ObjectStatus
from actors.model.protocol.relations import is_subscribed_view
from actors.model.protocol.role_messages import CreateRole, RoleRight
from actors.runtime.errors import AccessDenied, PenstockError, QueryRejected
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.runtime.settings import Settings
from actors.service import DoorConnector, Service
from actors.testing.check_views import for_short_lives
from actors.testing.engine import InMemoryExecutor
from actors.testing.patience import PATIENCE_S

ROUND_STATEMENTS = 400
SPARK_ROUND_STATEMENTS = 2_000
BATCH_STATEMENTS = 50
WRONG_MAX = 20
"""Wrong rounds after which no further one is looked at."""
SHOWN_STATEMENTS = 25
"""Statements before a wrong one that are printed."""
SESSIONS_PER_ROLE = 2
DENIED = "42501"
ABORTED = "25P02"
_CHANGES = frozenset({"insert", "copy in", "update", "delete"})
"""Kinds of steps whose effect is that of a transaction's end."""
_BEYOND = re.compile(
    r"in-memory engine|oracle cannot run|qualified names are not supported here"
    r"|SINGLE_PART_NAMESPACE|unknown relation 'penstock.public"
)
"""Errors of statements that are right, and that this engine or door does not know."""
_NOTHING = frozenset({"INSERT 0 0", "UPDATE 0", "DELETE 0", "MERGE 0"})


class RightsBroken(AssertionError):
    """The service has done or shown what the model does not permit, or refused what it permits."""


@dataclass
class RoundCounts:
    """What came of the statements of one round or more."""

    statements: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Statements by kind and outcome."""

    def add(self, other: RoundCounts) -> None:
        """Add those of another round."""
        self.statements += other.statements
        self.kinds += other.kinds


class RightsRound:
    """A service, its model, and the sessions of all roles."""

    def __init__(self, service: Service, admin: Client, seed: int) -> None:
        self.rng = Random(seed)
        self.seed = seed
        self.service = service
        self.admin = admin
        self.model = RightsModel()
        self.counts = RoundCounts()
        self.log: list[str] = []
        self._canaries = 0
        self.known: dict[str, set[str]] = {}
        """Canaries that a role has written itself."""
        self.drawer = StatementDrawer(self.rng, self.model, self.canary)
        self.sessions: dict[tuple[str, int], PgSession] = {}
        self.roles_of: dict[PgSession, ModelRole] = {}
        """The role that each session has logged in as: another one may have its name by now."""
        self.clients: dict[str, Client] = {}
        self.texts: dict[ModelObject, str] = {}
        """The queries of views, as they were created."""

    def canary(self) -> str:
        """A text that was never given before."""
        self._canaries += 1
        return f"CNR{self._canaries:04x}{self.rng.getrandbits(24):06x}"

    async def aclose(self) -> None:
        """Close all connections."""
        for session in self.sessions.values():
            await session.aclose()
        for client in self.clients.values():
            await client.aclose()

    # -- running ---------------------------------------------------------------------------------

    async def run(self, statements: int) -> RoundCounts:
        """Draw and judge so many statements. Raises `RightsBroken`."""
        await self._begin()
        await self.check_state()
        while self.counts.statements < statements:
            batch = self.counts.statements + BATCH_STATEMENTS
            while self.counts.statements < min(batch, statements):
                await self._some_steps()
            await self.check_state()
        return self.counts

    async def _begin(self) -> None:
        """An administrator, some roles, and tables with rows."""
        self.model.roles[BOSS] = ModelRole(BOSS, BOSS, rights={ADMIN})
        verifier = make_verifier(BOSS, b"salt" * 4).text()
        await self.admin.submit(CreateRole(0, BOSS, login=True, verifier=verifier))
        boss = await self.session(BOSS)
        for name in ROLES[1:4]:
            await self.step(boss, self.drawer._create_role(name))
        for name in ("tab", "books", "Odd Name"):
            await self.step(boss, self.drawer._table(BOSS, name))
            x = self.model.objects[name.lower()]
            await self.step(boss, self.drawer._insert(x))

    async def session(self, role: str) -> PgSession:
        """An open session of a role. Raises `RightsBroken`."""
        key = role, self.rng.randrange(SESSIONS_PER_ROLE)
        found, at = self.sessions.get(key), self.model.roles[role]
        if found is not None and self.roles_of[found] is not at:
            await self._ended(key)
            found = None
        if found is None:
            try:
                found = await PgSession.connect(self.service.pg_address, role, at.password)
            except (LoginRefused, asyncio.IncompleteReadError, OSError) as error:
                self._broken(f"{role} was not let in: {error!r}")
            self.sessions[key], self.roles_of[found] = found, at
        return found

    async def _ended(self, key: tuple[str, int]) -> None:
        """The service has ended a session of a role that was dropped. Raises `RightsBroken`."""
        session = self.sessions.pop(key)
        with suppress(TimeoutError, asyncio.IncompleteReadError, OSError):
            answer = await session.send(Step("SHOW server_version", kind="ended"))
            if answer.code != "57P01":
                self._broken(f"a session of {key[0]} goes on though the role was dropped")
        await session.aclose()

    async def _some_steps(self) -> None:
        """Steps of one session; another one may come between them."""
        role = self.rng.choice((BOSS, BOSS, *ROLES[1:], *ROLES[1:]))
        if role not in self.model.roles:
            await self._login_of_nobody(role)
            return
        if self.rng.random() < 0.06:
            await self.request(role)
            return
        if self.rng.random() < 0.02:
            await self._another_login(role)
        session = await self.session(role)
        for step in self.drawer.draw(role):
            if self.model.roles.get(role) is not self.roles_of[session]:
                return
            await self.step(session, step)
            if session.status != "I" and self.rng.random() < 0.15:
                await self._from_outside(session)

    async def _from_outside(self, other: PgSession) -> None:
        """What an administrator changes while a transaction of another session is open."""
        boss = await self.session(BOSS)
        if boss is other or boss.status != "I":
            return
        for step in self.drawer.rights(BOSS):
            await self.step(boss, step)

    async def _login_of_nobody(self, role: str) -> None:
        """A dropped role is not let in, and its sessions have ended."""
        for number in range(SESSIONS_PER_ROLE):
            if (role, number) in self.sessions:
                await self._ended((role, number))
        await self._refused_login(role, role)
        boss = await self.session(BOSS)
        if boss.status == "I":
            await self.step(boss, self.drawer._create_role(role))

    async def _another_login(self, role: str) -> None:
        """A wrong password is refused, and the right one is not."""
        await self._refused_login(role, f"not {self.model.roles[role].password}")
        for number in range(SESSIONS_PER_ROLE):
            session = self.sessions.pop((role, number), None)
            if session is not None:
                await session.aclose()
        await self.session(role)

    async def _refused_login(self, role: str, password: str) -> None:
        self.counts.statements += 1
        try:
            session = await PgSession.connect(self.service.pg_address, role, password)
        except LoginRefused:
            self.counts.kinds["login refused"] += 1
            return
        await session.aclose()
        self._broken(f"{role} logged in with {password!r}")

    # -- one step --------------------------------------------------------------------------------

    async def step(self, session: PgSession, step: Step) -> PgAnswer:
        """Send a step, judge its answer, and change the model. Raises `RightsBroken`."""
        role, model = session.role, self.model
        self._note(role, step)
        if any(self.model.objects.get(name.lower()) is not on for on, name in step.named.items()):
            # Another session has come between: the text means something else now.
            step.needs = step.effect = None
        allowed = step.needs is None or model.allows(role, step.needs)
        before = model.visible(role)
        was = session.status
        try:
            answer = await session.send(step)
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            self._broken(f"no answer ({type(error).__name__})")
        outcome = answer.code or "done"
        self.log[-1] += f"  -> {outcome} {answer.error}"[:300]
        self.counts.statements += 1
        self.counts.kinds[f"{step.kind}: {'denied' if outcome == DENIED else outcome}"] += 1
        await self._take(session, step, answer, was, allowed=allowed)
        self._check_seen(session, step, answer, before)
        return answer

    def _note(self, role: str, step: Step) -> None:
        text = step.text + (f" <- {step.copied!r}" if step.copied else "")
        self.log.append(f"{role}: {f'[{step.prepared}] ' if step.prepared else ''}{text}")
        self.known.setdefault(role, set()).update(CANARY.findall(text))

    def _check_seen(
        self, session: PgSession, step: Step, answer: PgAnswer, before: set[str]
    ) -> None:
        found = set(CANARY.findall(answer.raw.decode(errors="replace")))
        found -= before | self.known[session.role]
        if found:
            found -= self.model.visible(session.role)
        if found and step.kind == "fetch" and step.keeps in session.held:
            held, objects = session.held[step.keeps]
            found -= held.union(*(each.ever for each in objects))
        if found:
            self._broken(f"{session.role} was shown {', '.join(sorted(found))}")

    async def _take(
        self, session: PgSession, step: Step, answer: PgAnswer, was: str, *, allowed: bool
    ) -> None:
        """Judge whether a step succeeded, and note what it changed."""
        done = not answer.code
        if not allowed and done and step.kind != "subscribe" and not _NOTHING & set(answer.tags):
            self._broken(f"{session.role} did what it may not: {self._lacks(session, step)}")
        if not done and allowed and answer.code == DENIED and step.needs is not None:
            self._broken(f"{session.role} was refused what it may do")
        fresh = was == "I" and not session.odd
        if not done and allowed and step.plain and fresh and not _BEYOND.search(answer.error):
            self._broken(f"{session.role}: a plain statement failed")
        if step.kind == "setting" and done:
            session.odd = session.odd or step.text.startswith("SET ") or "AS OF" in step.text
        self._note_cursor(session, step, done=done)
        if was == "I" and session.status == "T":
            session.pending, session.mark = [], None
        if was != "I" or session.status != "I":
            await self._take_within(session, step, answer, was, done=done)
        elif done:
            await self._apply(session.role, step)

    def _lacks(self, session: PgSession, step: Step) -> str:
        lacking = [need for need in step.needs or () if not self.model.allows(session.role, [need])]
        return ", ".join(f"{right} on {on.name if on else '*'}" for right, on in lacking)

    def _note_cursor(self, session: PgSession, step: Step, *, done: bool) -> None:
        if not step.keeps or not done:
            return
        if step.kind == "close":
            session.held.pop(step.keeps, None)
        elif step.kind in ("declare", "subscribe"):
            objects = [on for _, on in step.needs or () if on is not None]
            if not self.model.allows(session.role, step.needs or ()):
                objects = []
            session.held[step.keeps] = (self.model.visible(session.role), objects)

    async def _take_within(
        self, session: PgSession, step: Step, answer: PgAnswer, was: str, *, done: bool
    ) -> None:
        """Note a step of a transaction, whose changes are made by its COMMIT alone."""
        if session.status == "I":
            pending, session.pending = session.pending, []
            if "COMMIT" in answer.tags and done:
                for each, _ in pending:
                    await self._apply(session.role, each)
            return
        if not done or session.status == "E":
            return
        if step.text.startswith("SAVEPOINT"):
            session.mark = len(session.pending)
        elif step.text.startswith("ROLLBACK TO"):
            del session.pending[session.mark or 0 :]
        elif step.kind in _CHANGES or (step.effect is None and step.kind != "read"):
            session.pending.append((step, step.effect))
        else:
            # Definitions, and what is done to roles, take effect at once.
            await self._apply(session.role, step)

    async def _apply(self, role: str, step: Step) -> None:
        """Change the model as a step has changed the service."""
        if step.effect is not None:
            step.effect()
            self.model.changed()
            if step.kind == "create":
                await self._note_texts()
        elif _changes(step.text) or not step.text:
            await self.settle(role)

    async def _note_texts(self) -> None:
        for entry in (await self.admin.status()).objects:
            x = self.model.objects.get(entry.name.lower())
            if x is not None:
                self.texts.setdefault(x, entry.sql)

    # -- requests --------------------------------------------------------------------------------

    async def request(self, role: str) -> None:
        """Send a request of a client of this role."""
        if role not in self.clients:
            connector = DoorConnector(self.service, role)
            self.clients[role] = await Client.in_process(connector)
        canary, model = self.canary(), self.model
        name, send, needs = drawn_request(self.rng, model, self.drawer.new_key(), canary)
        self.known.setdefault(role, set()).add(canary)
        self.log.append(f"{role}: request {name}")
        before, allowed = model.visible(role), needs is None or model.allows(role, needs)
        failed: PenstockError | None = None
        found: Any = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                found = await send(self.clients[role])
        except PenstockError as error:
            failed, found = error, str(error)
        self.log[-1] += f"  -> {type(failed).__name__ if failed else 'done'} {failed or ''}"[:300]
        self.counts.statements += 1
        outcome = type(failed).__name__ if failed else "done"
        self.counts.kinds[f"request {name}: {outcome}"] += 1
        seen = set(CANARY.findall(_text_of(found))) - before - self.known[role]
        if seen:
            self._broken(f"{role} was shown {', '.join(sorted(seen))}")
        if failed is None and not allowed:
            self._broken(f"{role} may not make the request {name}")
        if isinstance(failed, AccessDenied) and allowed and needs is not None:
            self._broken(f"{role} was refused the request {name}, which it may make")
        if failed is None:
            await self.settle(role)

    # -- the state -------------------------------------------------------------------------------

    async def settle(self, role: str) -> None:
        """Take over what a step has changed whose effect is not known, if the role may do it."""
        while strange := await self._strange_object(role):
            # The model knows no such object.
            await self.admin.drop(strange, cascade=True)
            x = self.model.objects.get(strange.lower())
            if x is not None:
                self.model.drop(x, *self.model.dependents(x))
        self.model.changed()

    async def _strange_object(self, role: str) -> str:
        """Return an object that is none of the model's, and that the role may have made or changed;
        empty if there is none. Rows of tables are taken over."""
        report = await self.admin.status()
        real = {e.name.lower(): e for e in report.objects if not is_subscribed_view(e.name)}
        model = self.model
        for key, x in list(model.objects.items()):
            entry = real.get(key)
            if entry is None:
                # It may have gone with another one.
                if key in model.objects:
                    self._must(role, [(ADMIN, x)], f"dropped {x.name}")
                    model.drop(x, *model.dependents(x))
            elif entry.sql != self.texts.setdefault(x, entry.sql) or not _is_usual(x, entry):
                self._must(role, [(ADMIN, x)], f"changed {x.name}")
                return x.name
            elif x.kind == "table":
                rows = await self._rows(x.name)
                if rows != x.rows:
                    self._must(role, [(WRITE, x)], f"changed rows of {x.name}")
                    self._check_copied(role, x, rows)
                    x.rows = rows
        for entry in (real[key] for key in real if key not in model.objects):
            self._must(role, [(CREATE, None)], f"created {entry.name}")
            return entry.name
        return ""

    def _check_copied(self, role: str, x: ModelObject, rows: dict[int, Any]) -> None:
        text = str(list(rows.values()))
        copied = set(CANARY.findall(text)) - x.ever - self.known[role] - self.model.visible(role)
        if copied:
            self._broken(f"{role} copied {', '.join(sorted(copied))} into {x.name}")

    def _must(self, role: str, needs: list[Need], what: str) -> None:
        if not self.model.allows(role, needs):
            self._broken(f"{role} {what}")

    async def _rows(self, name: str) -> dict[int, Any]:
        found = await self.admin.peek(name, columns=["k", "open", "secret"])
        return {row[0]: row for row in zip(*(c.to_pylist() for c in found.columns), strict=True)}

    async def check_state(self) -> None:
        """Compare everything that an administrator sees with the model."""
        report = await self.admin.status()
        # The latest time that can be read at once.
        self.drawer.time_ms = report.tables_upper - 1
        real = {
            e.name: (e.kind, e.comment) for e in report.objects if not is_subscribed_view(e.name)
        }
        model = self.model
        wanted = {x.name: (x.kind, x.comment) for x in model.objects.values()}
        self._compare("objects", real, wanted)
        for x in model.objects.values():
            if x.kind in ("table", "view") and not any(each.fails for each in _below(x)):
                self._compare(f"rows of {x.name}", await self._rows(x.name), x.contents())
        roles = await self.admin.roles()
        self._compare(
            "roles",
            {each.name: (each.login, each.tokens, _shown(each.rights)) for each in roles.roles},
            {each.name: (each.login, each.tokens, _rights(each)) for each in model.roles.values()},
        )

    def _compare(self, what: str, real: dict[Any, Any], wanted: dict[Any, Any]) -> None:
        if real != wanted:
            keys = [k for k in {**real, **wanted} if real.get(k) != wanted.get(k)]
            shown = "; ".join(f"{k}: {real.get(k)}, not {wanted.get(k)}" for k in keys[:5])
            self._broken(f"{what} are other ones: {shown}")

    def _broken(self, what: str) -> NoReturn:
        lines = "\n    ".join(self.log[-SHOWN_STATEMENTS:])
        raise RightsBroken(f"{what}\n  --replay {self.seed}; the last statements:\n    {lines}")


def _is_usual(x: ModelObject, entry: ObjectStatus) -> bool:
    names = [] if entry.schema is None else list(entry.schema.names)
    return x.kind != "table" or names == ["k", "open", "secret"]


def _below(x: ModelObject) -> Iterable[ModelObject]:
    yield x
    for each in x.sources:
        yield from _below(each)


def _shown(rights: Iterable[RoleRight]) -> set[tuple[str, str]]:
    # The view of a subscribe is its role's, and no object that anybody can name.
    return {(each.right, each.on) for each in rights if not is_subscribed_view(each.on)}


def _rights(role: ModelRole) -> set[tuple[str, str]]:
    found = {(right, "") for right in role.rights}
    return found | {(right, on.name) for on, given in role.objects.items() for right in given}


def _changes(text: str) -> bool:
    words = ("INSERT", "UPDATE", "DELETE", "MERGE", "TRUNCATE", "CREATE", "COPY", "EXECUTE", ";")
    return any(word in text.upper() for word in words)


def _text_of(found: Any) -> str:
    if isinstance(found, pa.Table | pa.RecordBatch):
        return str(found.to_pylist())
    if isinstance(found, list):
        return " ".join(map(_text_of, found))
    table = getattr(found, "table", None)
    return repr(found) if table is None else _text_of(table)


class PatientEngine(InMemoryExecutor):
    """The in-memory engine, which refuses what it cannot run by whatever fault."""

    def answer(self, job: Job) -> Answer:
        """As the engine does. Raises `QueryRejected` for its faults."""
        try:
            return super().answer(job)
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it stumbles over
            raise QueryRejected(f"the in-memory engine cannot: {error!r}") from None


def patient_engine(system: ActorSystem, settings: Settings, scratch: Path) -> ActorAddress[Any]:
    """Start a `PatientEngine`."""
    address: ActorAddress[Any] = system.spawn(PatientEngine, "engine")
    return address


# -- rounds ----------------------------------------------------------------------------------------


async def run_round(
    seed: int,
    statements: int = ROUND_STATEMENTS,
    *,
    on_spark: bool = False,
) -> RoundCounts:
    """One round on a service of its own. Raises `RightsBroken`."""
    with tempfile.TemporaryDirectory(prefix="penstock-rights-") as folder:
        settings = Settings(
            state_dir=str(Path(folder) / "state"),
            # Spark reads what is in files.
            blob_url="" if on_spark else "mem:",
            consensus_url="" if on_spark else "mem:",
            listen="127.0.0.1:0",
            pg_listen="127.0.0.1:0",
        )
        if on_spark:
            made_service = Service(for_short_lives(settings))
        else:
            made_service = Service(settings, engine=patient_engine)
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(made_service)
            admin = await stack.enter_async_context(await Client.in_process(service))
            made = RightsRound(service, admin, seed)
            stack.push_async_callback(made.aclose)
            return await made.run(statements)
    raise AssertionError("a context that swallows errors")


async def run_drawn_round(arguments: argparse.Namespace, seed: int) -> RoundCounts:
    """One round at a door. Raises `RightsBroken`."""
    if arguments.spark:
        # An engine takes long to start.
        statements = SPARK_ROUND_STATEMENTS
        return await run_round(seed, statements, on_spark=True)
    if arguments.door == "postgres":
        return await run_round(seed)
    # It builds upon this module, and needs more packages.
    sys.modules.setdefault("fuzz_rights", sys.modules[__name__])
    from rights_connect import run_connect_round

    return await run_connect_round(seed, ROUND_STATEMENTS)


async def campaign(arguments: argparse.Namespace) -> int:
    """The exit status."""
    logging.disable(logging.WARNING)
    total, wrong, began = RoundCounts(), 0, time.monotonic()
    seed = arguments.seed * 1_000_000 if arguments.replay is None else arguments.replay
    while total.statements < arguments.statements and wrong < WRONG_MAX:
        seconds = time.monotonic() - began
        if seconds > arguments.seconds:
            break
        try:
            total.add(await run_drawn_round(arguments, seed))
        except Exception as error:  # noqa: BLE001 - the service's end is one, too
            wrong += 1
            told = error.__context__ if isinstance(error.__context__, RightsBroken) else None
            print(f"WRONG (--replay {seed}): {error!r}\n{told or error}", flush=True)
        seed += 1
        if arguments.replay is not None:
            break
        rate = total.statements / max(time.monotonic() - began, 0.001)
        print(f"{total.statements} statements, {rate:.0f}/s, {wrong} wrong", flush=True)
    if arguments.json:
        found = {"statements": total.statements, "wrong": wrong, "kinds": dict(total.kinds)}
        arguments.json.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{total.statements} statements in {time.monotonic() - began:.0f} s: {wrong} wrong")
    return 1 if wrong or not total.statements else 0


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--statements", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=36_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--door", choices=("postgres", "connect"), default="postgres")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--spark", action="store_true", help="at PostgreSQL's door, on Spark")
    parser.add_argument("--replay", type=int, help="the seed of one round")
    return anyio.run(campaign, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
