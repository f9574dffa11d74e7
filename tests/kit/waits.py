"""Records which actors' handlers wait for which actors, as a graph, and finds its cycles.

Theory of operation. An actor that waits to send handles no message. If the receiver waits for the
sender, directly or through others, all of them deadlock as soon as their mailboxes are full. So the
sends that may wait must form an acyclic graph, whatever the load. Answers use `ActorAddress.reply`,
which never waits.

`WaitingMailbox` replaces `BoundedMailbox` (`ActorSystem.mailbox_type`) in a test that runs all
actors of the service. It records an edge for every `send` by a handler, whether or not it had to
wait this time, and for every ask, which waits for its answer. The effects of an actor run
concurrently with its handler: they block no mailbox and have no edges. `cycle` finds a cycle, and
`drawing` returns the graph as Mermaid text. Edges on paths that the run did not take are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, TypeVar

from actors.runtime.kernel import BoundedMailbox
from actors.runtime.kernel.actor import HANDLING

M = TypeVar("M")

Edge = tuple[str, str]
"""(path of the waiting actor, path of the actor for which it waits)."""


class WaitingMailbox(BoundedMailbox[M]):
    """A mailbox that records which actor's handler sends to it."""

    __slots__ = ()

    edges: ClassVar[dict[Edge, set[str]]] = {}
    """Types of the messages on each edge."""

    async def send(self, message: M) -> None:
        """Record the edge and send like `BoundedMailbox.send`. An ask sends its message this way
        too."""
        sender = HANDLING.get()
        if sender is not None:
            self.edges.setdefault((sender.path, self.path), set()).add(type(message).__name__)
        await super().send(message)


def by_role(edges: Iterable[Edge], role: Callable[[str], str]) -> list[Edge]:
    """Return the edges between roles instead of paths, sorted and without duplicates."""
    return sorted({(role(sender), role(receiver)) for sender, receiver in edges})


def cycle(edges: Iterable[Edge]) -> list[str] | None:
    """Return a cycle as the list of its nodes, of which the first and last are the same; None if
    there is no cycle."""
    ways: dict[str, list[str]] = {}
    for sender, receiver in edges:
        ways.setdefault(sender, []).append(receiver)
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for other in ways.get(node, []):
            found = search(other, [*path, node])
            if found is not None:
                return found
        done.add(node)
        return None

    for node in list(ways):
        found = search(node, [])
        if found is not None:
            return found
    return None


def drawing(edges: Iterable[Edge]) -> str:
    """Return the graph as a Mermaid flowchart: an arrow from each waiting actor to the actor for
    which it waits."""
    edges = list(edges)
    names = sorted({name for edge in edges for name in edge})
    numbers = {name: f"n{index}" for index, name in enumerate(names)}
    lines = ["flowchart LR", *(f'    {numbers[name]}["{name}"]' for name in names)]
    lines += [f"    {numbers[sender]} --> {numbers[receiver]}" for sender, receiver in edges]
    return "\n".join(lines)
