"""Rights at the door for Spark Connect's clients: rounds of ``fuzz_rights.py --door connect``.

The service's Spark is a server that stands for one (`gateway_world`), which notes all that it was
sent: nothing of a role that may not run code may come there with `MARK`, and no row that the role
may not read.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from fuzz_rights import RightsRound, RoundCounts, patient_engine
from pyspark.sql.connect.proto import base_pb2
from rights_model import CANARY, CODE, CONNECT
from rights_plans import MARK, DrawnRequest, RequestDrawer
from rights_statements import ROLES

from actors.control.access.role_registry import token_digest
from actors.doors.client.client import Client
from actors.doors.connect_gateway.gateway import SERVICE_NAME
from actors.model.protocol.role_messages import AlterRole
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.patience import PATIENCE_S

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "doors" / "connect_gateway"))
from gateway_world import SparkStandIn  # type: ignore[import-not-found]

_OPENING: Final = ("ExecutePlan", "AnalyzePlan", "Config")
"""Methods that open the session that they name."""
CPU_SECONDS_MAX: Final = 10.0
"""Of this process, in which the service is, for one request of a few kilobytes."""


class NotingSpark(SparkStandIn):  # type: ignore[misc]
    """Answers whatever comes, and notes it."""

    async def ExecutePlan(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self._note(request)
        for answer in self._answers(request.plan):
            answer.operation_id, answer.response_id = request.operation_id, str(uuid.uuid4())
            yield self._named(request, answer)

    async def AnalyzePlan(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request)
        return self._named(request, base_pb2.AnalyzePlanResponse())

    async def ArtifactStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request)
        return self._named(request, base_pb2.ArtifactStatusesResponse())

    async def FetchErrorDetails(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request)
        return self._named(request, base_pb2.FetchErrorDetailsResponse())

    async def take_artifacts(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            self._note(request)
        return self._named(request, base_pb2.AddArtifactsResponse())


@asynccontextmanager
async def noting_spark() -> AsyncIterator[NotingSpark]:
    """A server that stands for Spark."""
    spark = NotingSpark()
    server = grpc.aio.server()
    upload = grpc.stream_unary_rpc_method_handler(
        spark.take_artifacts, base_pb2.AddArtifactsRequest.FromString, _encoded
    )
    uploads = grpc.method_handlers_generic_handler(SERVICE_NAME, {"AddArtifacts": upload})
    server.add_generic_rpc_handlers((uploads, spark.handlers()))
    spark.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield spark
    finally:
        await server.stop(0)


def _encoded(message: Any) -> bytes:
    return bytes(message.SerializeToString())


class ConnectRound(RightsRound):
    """A round in which most requests come by Spark Connect."""

    def __init__(
        self,
        service: Service,
        admin: Client,
        seed: int,
        spark: SparkStandIn,
    ) -> None:
        super().__init__(service, admin, seed)
        self._spark = spark
        self._requests = RequestDrawer(self.rng, self.model)
        self._tokens: dict[str, str] = {}
        """Tokens that were given to roles, of those that may be valid still."""
        self._channel = grpc.aio.insecure_channel(service.connect_address)
        self._session_ids: dict[str, str] = {}
        self._opened: dict[tuple[str, str], str] = {}
        """Whose each session is that was used, by its user and its id."""
        self._coded: set[tuple[str, str]] = set()
        """Those that were used while the role could run code."""

    async def aclose(self) -> None:
        """Close all connections."""
        await self._channel.close()
        await super().aclose()

    async def _some_steps(self) -> None:
        for name in list(self._tokens):
            role = self.model.roles.get(name)
            if role is None or not role.tokens:
                del self._tokens[name]
        self._forget_sessions()
        if self.rng.random() < 0.15:
            await super()._some_steps()
            return
        name = self.rng.choice(ROLES)
        if name in self.model.roles and name not in self._tokens and self.rng.random() < 0.5:
            await self._give_token(name)
        await self._connect_request(name)

    def _forget_sessions(self) -> None:
        """Forget the sessions of roles that have lost their tokens, or a right that they were used
        under: the service ends them, and others may have their names."""
        for key, name in list(self._opened.items()):
            role = self.model.roles.get(name)
            lost = role is None or not role.may(CONNECT) or name not in self._tokens
            if lost or (key in self._coded and not self.model.allows(name, [(CODE, None)])):
                del self._opened[key]
                self._coded.discard(key)

    async def _give_token(self, name: str) -> None:
        role = self.model.roles[name]
        if role.tokens >= 16:
            return
        self._tokens[name] = token = uuid.UUID(int=self.rng.getrandbits(128)).hex
        await self.admin.submit(AlterRole(0, name, add_token=token_digest(token)))
        if not role.may(CONNECT):
            role.rights.add(CONNECT)
        role.tokens += 1

    async def _connect_request(self, name: str) -> None:
        drawn = self._requests.draw()
        self._address(drawn.message, name)
        self.log.append(f"{name} by Connect: {drawn.what}: {str(drawn.message)[:1500]}")
        role, before = self.model.roles.get(name), self.model.visible(name)
        sent = len(self._spark.requests)
        began = time.process_time()
        code, text, raw = await self._call(drawn, self._tokens.get(name, "no token"))
        if time.process_time() - began > CPU_SECONDS_MAX:
            self._broken("one request keeps the service from everything else")
        self.log[-1] = self.log[-1].replace("\n", " ") + f"  -> {code} {text}"[:300]
        self.counts.statements += 1
        outcome = "done" if not code else "denied" if "GRANT" in text else code
        self.counts.kinds[f"connect {drawn.what}: {outcome}"] += 1
        known = role is not None and name in self._tokens and role.may(CONNECT)
        runs_code = role is not None and role.may(CODE)
        self._judge(name, drawn, code, text, known=known, runs_code=runs_code)
        # The service releases the sessions of a role that was just dropped.
        asked = type(drawn.message)
        seen_by_spark = [
            each
            for each in self._spark.requests[sent:]
            if type(each) is asked or not isinstance(each, base_pb2.ReleaseSessionRequest)
        ]
        came = b"".join(each.SerializeToString() for each in seen_by_spark)
        if not known and came:
            self._broken(f"a request of {name} came to Spark without a valid token")
        if not runs_code and MARK.encode() in came:
            self._broken(f"what {name} may not use came to Spark")
        for what, data in (("was shown", raw), ("sent to Spark", came)):
            seen = set(CANARY.findall(data.decode(errors="replace")))
            seen -= before | self.known.get(name, set())
            if seen:
                self._broken(f"{name} {what} {', '.join(sorted(seen))}")

    def _judge(
        self, name: str, drawn: DrawnRequest, code: str, text: str, *, known: bool, runs_code: bool
    ) -> None:
        if not known and not code:
            self._broken(f"{name} was answered without a valid token")
        at = drawn.message.user_context.user_id, drawn.message.session_id
        own = self._opened.get(at, name) == name
        if not code and not own:
            self._broken(f"{name} was answered in a session of {self._opened[at]}")
        if not code and drawn.method in _OPENING:
            self._opened[at] = name
            self._coded |= {at} if runs_code else set()
        if not code and drawn.method == "ReleaseSession":
            self._opened.pop(at, None)
            # It is closed for good: its owner opens another one.
            ids = {role: id_ for role, id_ in self._session_ids.items() if id_ != at[1]}
            self._session_ids = ids
        if not known or code:
            plain = drawn.plain and known and own and self.model.allows(name, drawn.needs or ())
            if plain and "in-memory engine" not in text:
                self._broken(f"{name}: a plain request failed: {text}")
            return
        if drawn.forbidden and not runs_code:
            self._broken(f"{name} used what is for those who may run code")
        if drawn.needs is not None and not self.model.allows(name, drawn.needs):
            self._broken(f"{name} read what it may not")

    def _address(self, message: Any, name: str) -> None:
        """Say whose request it is: now and then in another role's session."""
        ids = self._session_ids
        # What a role could do with the right to run code is left in its session.
        fresh = name not in ids or self.rng.random() < 0.1
        if fresh:
            ids[name] = str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        message.session_id = ids[name]
        message.user_context.user_id = name
        if self._opened and self.rng.random() < 0.1:
            message.user_context.user_id, message.session_id = self.rng.choice([*self._opened])
        if "operation_id" in message.DESCRIPTOR.fields_by_name and not message.operation_id:
            message.operation_id = str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    async def _call(self, drawn: DrawnRequest, token: str) -> tuple[str, str, bytes]:
        """Send a request: its gRPC code (empty: answered), the error, and all bytes of answers."""
        path = f"/{SERVICE_NAME}/{drawn.method}"
        metadata = (("authorization", f"Bearer {token}"),)
        parts: list[bytes] = []
        data = drawn.message.SerializePartialToString()
        try:
            async with asyncio.timeout(PATIENCE_S):
                if drawn.method in ("ExecutePlan", "ReattachExecute"):
                    call = self._channel.unary_stream(path)(data, metadata=metadata)
                    parts += [each async for each in call]
                elif drawn.method == "AddArtifacts":
                    send = self._channel.stream_unary(path)
                    parts.append(await send(iter([data]), metadata=metadata))
                else:
                    parts.append(await self._channel.unary_unary(path)(data, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            told = str(error.details()) + str(error.trailing_metadata())
            return error.code().name, str(error.details()), told.encode()
        except TimeoutError:
            self._broken("no answer")
        return "", "", b"".join(parts)


async def run_connect_round(seed: int, statements: int) -> RoundCounts:
    """One round on a service of its own. Raises `RightsBroken`."""
    made: RightsRound
    with tempfile.TemporaryDirectory(prefix="penstock-rights-") as folder:
        async with AsyncExitStack() as stack:
            spark = await stack.enter_async_context(noting_spark())
            settings = Settings(
                state_dir=str(Path(folder) / "state"),
                blob_url="mem:",
                consensus_url="mem:",
                listen="127.0.0.1:0",
                pg_listen="127.0.0.1:0",
                connect_listen="127.0.0.1:0",
                spark_master=f"sc://127.0.0.1:{spark.port}",
            )
            service = Service(settings, engine=patient_engine)
            await stack.enter_async_context(service)
            admin = await stack.enter_async_context(await Client.in_process(service))
            made = ConnectRound(service, admin, seed, spark)
            stack.push_async_callback(made.aclose)
            return await made.run(statements)
    raise AssertionError("a context that swallows errors")
