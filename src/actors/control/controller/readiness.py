"""Readiness of a service: whether its controller, its stores and its engine can serve now.

Each component is asked with the same deadline; one that does not answer is not ready, and the
report says why. An engine that is starting or being replaced counts as ready: jobs wait for it, and
reads and writes work without it. An engine that cannot be started does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, Literal, TypeAlias

import anyio
import msgspec

from actors.control.controller.messages import CountReplicas, InspectObjects, ObjectReadiness
from actors.durable.persist import PersistClient
from actors.durable.persist.replica_fence import ReplicaFence
from actors.model.plan.jobs import EngineCondition, ExecutorMessage, InspectEngine
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import ActorAddress, ActorClock
from actors.runtime.settings import Settings
from actors.runtime.transport.http_pages import HttpPage, HttpResponse

CHECK_TIMEOUT_MS: Final = 2_000
"""Time limit for the check of one component (ms)."""
FRESH_MS: Final = 500

TEXT_MAX: Final = 500
"""Maximum number of characters of one component's text."""


class ComponentReadiness(msgspec.Struct, frozen=True):
    """One component of a service: whether it can serve, and its state in words."""

    ready: bool
    state: str


class ReadinessReport(msgspec.Struct, frozen=True):
    """The state of a service and, once it has started, of its components."""

    state: Literal["starting", "active", "stopping"]
    components: dict[str, ComponentReadiness] = {}
    objects: tuple[ObjectReadiness, ...] = ()
    """The objects that the controller reports. A stalled one is shown, but does not make the
    service unready."""

    @property
    def not_ready(self) -> list[str]:
        """Return the names of the components that are not ready; the service itself is named
        `service`."""
        own = [] if self.state == "active" else ["service"]
        return own + [name for name, found in self.components.items() if not found.ready]

    def to_json(self, *, texts: bool, verbose: bool = False) -> bytes:
        """Return the report as a JSON object. Without `texts` it only says which components are
        ready. `verbose` adds the number of objects in each state and, with `texts`, every
        object."""
        shown: dict[str, Any] = {
            name: {"ready": found.ready} | ({"state": found.state} if texts else {})
            for name, found in self.components.items()
        }
        wrong = self.not_ready
        whole: dict[str, Any] = {
            "ready": not wrong,
            "state": self.state,
            "not_ready": wrong,
            "components": shown,
        }
        if verbose:
            whole["states"] = Counter(each.state for each in self.objects)
        if verbose and texts:
            whole["objects"] = self.objects
        return msgspec.json.encode(whole) + b"\n"


ObjectsCheck: TypeAlias = Callable[[], Awaitable[tuple[ObjectReadiness, ...]]]
"""Returns the condition of all objects. Raises `PenstockError` if there is no answer."""
ComponentCheck: TypeAlias = Callable[[], Awaitable[ComponentReadiness]]
"""Checks one component. Raises `PenstockError` if it does not answer."""


def count_replicas(controller: ActorAddress[Any], settings: Settings) -> ComponentCheck:
    """Return the check of a controller: it answers and has a connected replica."""

    async def active() -> ComponentReadiness:
        count = await controller.ask(CountReplicas, CHECK_TIMEOUT_MS)
        state = f"active, {count} of its replicas connected"
        return ComponentReadiness(count > 0, state)

    return active


def check_objects(controller: ActorAddress[Any], settings: Settings) -> ObjectsCheck:
    """Return the check that fetches the condition of a controller's objects."""

    async def objects() -> tuple[ObjectReadiness, ...]:
        return await controller.ask(InspectObjects, CHECK_TIMEOUT_MS)

    return objects


def check_owner(fence: ReplicaFence) -> ComponentCheck:
    """Return the check for a replica in a separate process: a controller commands it."""

    async def commanded() -> ComponentReadiness:
        owner = fence.owner
        if owner is None:
            return ComponentReadiness(False, "not connected to the controller that owns the stores")
        return ComponentReadiness(True, f"commanded by {owner}")

    return commanded


class ReadinessCheck:
    """Checks the components of a running service.

    Calls within `FRESH_MS` share one report, so that frequent probes do not load the stores.
    """

    def __init__(
        self,
        persist: PersistClient,
        controller: ComponentCheck,
        executor: ActorAddress[ExecutorMessage],
        clock: ActorClock,
        settings: Settings,
        objects: ObjectsCheck | None = None,
    ) -> None:
        """Set up the checks, each limited to `CHECK_TIMEOUT_MS`. `objects` is None in a process
        without a controller."""
        self._objects = objects
        self._deadline_ms = deadline_ms = CHECK_TIMEOUT_MS
        self._clock = clock
        self._lock = anyio.Lock()
        """Held while a report is made, so that concurrent callers share it."""
        self._last: tuple[float, ReadinessReport] | None = None
        """The last report, and the time at which it was made (monotonic, ms)."""

        async def documents() -> ComponentReadiness:
            await persist.probe_documents()
            return ComponentReadiness(True, "reachable")

        async def blobs() -> ComponentReadiness:
            await persist.probe_blobs()
            return ComponentReadiness(True, "reachable")

        async def engine() -> ComponentReadiness:
            found: EngineCondition = await executor.ask(InspectEngine, deadline_ms)
            text = found.state if not found.why else f"{found.state}: {found.why}"
            return ComponentReadiness(found.state != "unavailable", text)

        self._checks = {
            "controller": controller,
            "documents": documents,
            "blobs": blobs,
            "engine": engine,
        }

    async def run(self) -> ReadinessReport:
        """Return the state of all components. Raises nothing."""
        async with self._lock:
            now = self._clock.monotonic_ms()
            if self._last is not None and now - self._last[0] < FRESH_MS:
                return self._last[1]
            report = ReadinessReport("active", await self._components(), await self._inspected())
            self._last = self._clock.monotonic_ms(), report
            return report

    async def _inspected(self) -> tuple[ObjectReadiness, ...]:
        if self._objects is None:
            return ()
        # the entry of the controller already shows that it does not answer
        with suppress(PenstockError):
            return await self._objects()
        return ()

    async def _components(self) -> dict[str, ComponentReadiness]:
        found: dict[str, ComponentReadiness] = {}

        async def one(name: str, check: ComponentCheck) -> None:
            found[name] = await self._one(check)

        async with anyio.create_task_group() as group:
            for name, check in self._checks.items():
                group.start_soon(one, name, check)
        return {name: found[name] for name in self._checks}

    async def _one(self, check: ComponentCheck) -> ComponentReadiness:
        try:
            with anyio.fail_after(self._deadline_ms / 1000):
                return await check()
        except TimeoutError:
            return ComponentReadiness(False, f"no answer within {self._deadline_ms} ms")
        except PenstockError as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            return ComponentReadiness(False, text[:TEXT_MAX])


def readiness_page(run: Callable[[], Awaitable[ReadinessReport]]) -> HttpPage:
    """Return the page of a report, with status 200 if all components are ready, else 503. Only
    trusted clients get texts (which may name paths and hosts) and names of objects. ``?verbose``
    adds the objects."""

    async def respond(trusted: bool, query: str) -> HttpResponse:
        report = await run()
        status = HTTPStatus.SERVICE_UNAVAILABLE if report.not_ready else HTTPStatus.OK
        verbose = "verbose" in query.split("&")
        body = report.to_json(texts=trusted, verbose=verbose)
        return HttpResponse(body, status, content_type="application/json")

    return HttpPage(respond)
