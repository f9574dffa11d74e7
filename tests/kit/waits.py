"""Records which actors' handlers wait for which actors, as a graph, and finds its cycles.

Theory of operation. An actor that waits to send handles no message. If the receiver waits, directly
or through others, for the sender, all of them are deadlocked as soon as their mailboxes are full.
So sends that wait must form a graph without a cycle, whatever the load; answers go in reserved room
(`Address.reply`) and never wait.

`WaitingMailbox` takes the place of `BoundedMailbox` (`ActorSystem.mailbox_type`) in a test that
runs all actors of the service, and notes an edge for every `send` made by a handler, whether or not
it had to wait that time, and for every ask (which waits for its answer). An actor's effects wait
beside its handler: they block no mailbox, and draw no edge. `cycle` finds a cycle, `drawing` is the
graph as Mermaid text. Edges of paths that the run did not take are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, TypeVar

from actors.runtime.kernel import BoundedMailbox
from actors.runtime.kernel.actor import HANDLING

M = TypeVar("M")

Edge = tuple[str, str]
"""(waiting actor's path, path of the actor that it waits for)."""


class WaitingMailbox(BoundedMailbox[M]):
    """A mailbox that notes which actor's handler sends to it."""

    __slots__ = ()

    edges: ClassVar[dict[Edge, set[str]]] = {}
    """Kinds of the messages on each edge."""

    async def send(self, message: M) -> None:
        """Note the edge and send as `BoundedMailbox.send` does; an ask sends its message in this
        way, too."""
        sender = HANDLING.get()
        if sender is not None:
            self.edges.setdefault((sender.path, self.path), set()).add(type(message).__name__)
        await super().send(message)


def by_role(edges: Iterable[Edge], role: Callable[[str], str]) -> list[Edge]:
    """Return the edges between roles instead of paths, sorted, each once."""
    return sorted({(role(sender), role(receiver)) for sender, receiver in edges})


def cycle(edges: Iterable[Edge]) -> list[str] | None:
    """Return a cycle, as the nodes along it (first and last are one); None when there is none."""
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
    """Return the graph as a Mermaid flowchart: an arrow from each waiter to the actor it waits
    for."""
    edges = list(edges)
    names = sorted({name for edge in edges for name in edge})
    numbers = {name: f"n{index}" for index, name in enumerate(names)}
    lines = ["flowchart LR", *(f'    {numbers[name]}["{name}"]' for name in names)]
    lines += [f"    {numbers[sender]} --> {numbers[receiver]}" for sender, receiver in edges]
    return "\n".join(lines)
