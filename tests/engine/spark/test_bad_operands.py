"""Functions over bad operands, drawn: each view has contents or a definite error in one step.

`tests/proof/fuzz_operands.py` takes the functions of Spark's own registry.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from engine_child import ChildProcess  # type: ignore[import-not-found]

from actors.model.plan.jobs import ForgetPlan, JobFailed, SubmitJob
from actors.runtime.errors import from_wire
from actors.runtime.kernel import ReplySlot
from actors.testing.maintain import EngineCaller
from suite_lanes import examples  # type: ignore[import-not-found]
from tests.kit.bad_operands import OperandCheck

pytestmark = pytest.mark.spark

EXAMPLES = (
    "cardinality(sequence(1, 4, 2))",
    "to_number('454', '999')",
    "map_keys(str_to_map('a:1,b:2', ',', ':'))",
    "s LIKE 'x%' FROM VALUES ('x') AS tab(s)",
    "format_string('%s %d', 'a', 7)",
    "from_utc_timestamp('2016-08-31', 'Asia/Seoul')",
    "conv('100', 2, 10)",
    "split('oneAtwoB', '[AB]')",
    "xpath_int('<a>1</a>', 'a')",
    "date_format('2016-04-08', 'y')",
    "element_at(array(1, 2), 2)",
    "sum(col) FROM VALUES (5), (10) AS tab(col)",
    "percentile(col, 0.3) FROM VALUES (0), (10) AS tab(col)",
    "make_date(2013, 7, 15)",
    "encode('abc', 'utf-8')",
    "aes_decrypt(unhex('83F16B2AA704794132802D248E6BFD4E'), '0000111122223333')",
)


class ChildExecutor:
    """The shared child, asked as an executor actor is."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child

    async def ask(self, make: Any) -> Any:
        message: SubmitJob = make(ReplySlot())
        if isinstance(message.job, ForgetPlan):
            return self._child.send(message.job)
        answer = self._child.ask(message.job)
        if isinstance(answer, JobFailed):
            raise from_wire(answer.code, answer.text, True)
        return answer


@pytest.mark.sampled
async def test_each_view_has_contents_or_a_definite_error_in_one_step(child: ChildProcess) -> None:
    count = examples(len(EXAMPLES))
    random = Random(count)
    check = OperandCheck(EngineCaller(ChildExecutor(child), "operands"), random)  # type: ignore[arg-type]
    for example in random.sample(EXAMPLES, count):
        assert await check.judge(example, rows=1), example
    assert check.wrong == []
    assert check.views == count
