"""What a client may say, in which order."""

from __future__ import annotations

import msgspec
import pytest

from actors.cluster.rules import CommandRules
from actors.errors import InvalidUsage, RemoteProtocolError
from actors.plan.schema import Column, Schema
from actors.progress import EMPTY
from actors.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Command,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Hello,
    IndexExport,
    IndexTarget,
    InitializationComplete,
    Peek,
    Schedule,
    UpdateConfiguration,
)

SCHEMA = Schema((Column("k", "bigint"),))
FLOW = DataflowDescription("i1", "", (), IndexExport(("k",), SCHEMA), 0)
START: list[Command] = [Hello("a"), CreateInstance(2)]


def check(*commands: Command) -> None:
    rules = CommandRules(CreateInstance(2), 1000)
    for command in commands:
        rules.check(command)


def test_a_good_conversation() -> None:
    check(
        *START,
        UpdateConfiguration(),
        UpdateConfiguration(999),
        CreateDataflow(FLOW),
        Schedule("i1"),
        Schedule("unknown"),
        Peek("p", IndexTarget("i1"), 5),
        InitializationComplete(),
        AllowWrites(),
        AllowCompaction("unknown", 5),
        AllowCompaction("i1", EMPTY),
        CreateDataflow(FLOW),
    )


@pytest.mark.parametrize(
    "commands",
    [
        [CreateInstance(2)],
        [Hello("")],
        [Hello("a"), Hello("b")],
        [Hello("a"), AllowWrites()],
        [*START, CreateInstance(2)],
        [*START, InitializationComplete(), InitializationComplete()],
        [*START, CreateDataflow(FLOW), CreateDataflow(FLOW)],
        [*START, CreateDataflow(msgspec.structs.replace(FLOW, id=""))],
        [*START, CreateDataflow(msgspec.structs.replace(FLOW, as_of=-1))],
        [*START, Peek("", IndexTarget("i1"), 5)],
        [*START, Peek("p", IndexTarget("i1"), EMPTY)],
    ],
)
def test_a_broken_order(commands: list[Command]) -> None:
    check(*commands[:-1])
    with pytest.raises(RemoteProtocolError):
        check(*commands)


def test_another_instance_is_refused_with_the_difference() -> None:
    with pytest.raises(InvalidUsage, match=r"3 workers.*2 workers"):
        check(Hello("a"), CreateInstance(3))
    with pytest.raises(InvalidUsage, match=r"version 9.*version 2"):
        check(Hello("a"), CreateInstance(2, 9))


def test_a_result_must_fit_a_frame() -> None:
    with pytest.raises(InvalidUsage, match="frame_bytes_max"):
        check(*START, UpdateConfiguration(1000))
