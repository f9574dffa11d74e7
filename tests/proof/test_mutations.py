"""The draw of mutants, the choice of the tests that must notice them, and what counts as lost."""

from __future__ import annotations

import ast
import doctest
import json
import subprocess
import sys
from pathlib import Path

import module_tests
import mutants
import pytest
from module_tests import FILES_MAX, FILES_MIN, TESTS, ModuleTests
from mutant_campaign import DIED, lost
from mutants import ROOM_MUTANTS_MIN, ROOMS_APART, by_room, draw, modules_of, mutations

SOURCE = """
import logging

log = logging.getLogger("penstock.test")

def text(value):
    return "many" if value > 1 else "one"

class Counter:
    def add(self, value):
        if value < 0 or value is None:
            raise ValueError(value)
        log.info("added %s", value)
        self.total = min(self.total + value, 100)
        self.notify()

    def notify(self):
        while self.total > 10:
            self.total -= 10
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Sources of two rooms, and their tests."""
    files = {
        "src/actors/__init__.py": "",
        "src/actors/errors.py": SOURCE,
        "src/actors/sequencer.py": SOURCE,
        "src/actors/testing/__init__.py": SOURCE,
        "src/actors/persist/__init__.py": "from actors.persist.shard import Shard as Shard",
        "src/actors/persist/shard.py": f"from actors.persist import codec\n{SOURCE}",
        "src/actors/persist/codec.py": SOURCE * 20,
        "tests/test_sequencer.py": "import actors.sequencer",
        "tests/cluster/test_order.py": 'PATCHED = "actors.sequencer.order"',
        "tests/persist/persist_world.py": "from actors.persist import Shard",
        "tests/persist/test_shard_model.py": "from persist_world import World",
        "tests/persist/test_leases.py": "from actors.persist.shard import Lease",
        "tests/persist/test_named.py": "def test_it():\n    from actors.persist import Shard",
        "tests/cluster/test_elsewhere.py": "from actors.persist.shard import Lease",
        "tests/spark/test_shard_on_spark.py": "import pytest\nfrom actors.persist import Shard\n"
        "pytestmark = [pytest.mark.spark]",
        "tests/persist/test_long_shard.py": "import pytest\nfrom actors.persist import Shard\n"
        "@pytest.mark.long\ndef test_it(): pass",
        "tests/clients/test_shard.py": "from actors.persist import Shard",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_mutation_takes_out_one_rule() -> None:
    found = {each.what: mutants.mutated(SOURCE, each) for each in mutations("counter", SOURCE)}
    assert list(found) == [
        "value < 0 or value is None | always True",
        "value < 0 or value is None | always False",
        "value < 0 or value is None | without value < 0",
        "value < 0 or value is None | without value is None",
        "value < 0 | boundary",
        "self.total = min(self.total + value, 100) | left out",
        "min(self.total + value, 100) | only self.total + value",
        "min(self.total + value, 100) | only 100",
        "self.notify() | left out",
        "self.total > 10 | always False",
        "self.total > 10 | boundary",
        "self.total -= 10 | left out",
    ]
    assert len({*found.values(), mutants.unmutated(SOURCE)}) == len(found) + 1
    assert all(ast.parse(text) for text in found.values())


def test_the_draw_follows_from_the_seed_and_the_sources(checkout: Path) -> None:
    rooms = by_room(checkout / "src" / "actors")
    drawn = draw(rooms, 20, seed=7)
    assert len(drawn) == len(set(drawn)) == 20
    assert drawn == draw(by_room(checkout / "src" / "actors"), 20, seed=7)
    assert drawn != draw(rooms, 20, seed=8)


def test_every_room_is_drawn(checkout: Path) -> None:
    rooms = by_room(checkout / "src" / "actors")
    drawn = draw(rooms, 20, seed=7)
    counts = {room: sum(each.room == room for each in drawn) for room in rooms}
    assert set(counts) == {"errors", "persist", "sequencer"}
    assert min(counts.values()) >= ROOM_MUTANTS_MIN
    assert max(counts, key=counts.__getitem__) == "persist"


def test_a_larger_room_changes_only_how_many_the_others_have(checkout: Path) -> None:
    actors = checkout / "src" / "actors"
    before = draw(by_room(actors), 20, seed=7)
    (actors / "persist" / "codec.py").write_text(SOURCE * 40)
    after = draw(by_room(actors), 20, seed=7)
    for room in ("errors", "sequencer"):
        fewer, more = sorted(
            ({e for e in each if e.room == room} for each in (before, after)), key=len
        )
        assert fewer <= more


def test_all_rooms_of_the_project_can_be_drawn(root: Path) -> None:
    actors = root / "src" / "actors"
    folders = {path.parent.name for path in actors.glob("*/*.py")}
    drawn = {name.partition("/")[0] for name in modules_of(actors) if "/" in name}
    assert drawn | ROOMS_APART.keys() == folders
    assert all((actors / f"{module}.py").is_file() for module in mutants.MODULES_APART)


def test_the_tests_of_a_module_follow_from_its_name_and_imports(checkout: Path) -> None:
    suite = ModuleTests(checkout)
    assert suite.of("persist/shard") == [
        "persist/test_shard_model.py",
        "persist/test_leases.py",
        "persist/test_named.py",
        "cluster/test_elsewhere.py",
    ]
    assert suite.of("sequencer") == ["test_sequencer.py", "cluster/test_order.py"]
    assert suite.of("errors") == []


def test_files_of_the_second_lane_are_chosen_for_that_lane_alone(checkout: Path) -> None:
    text = "import pytest, actors.sequencer\npytestmark = pytest.mark.second"
    (checkout / "tests" / "test_sequencer_drawn.py").write_text(text)
    assert "test_sequencer_drawn.py" not in ModuleTests(checkout).of("sequencer")
    assert "test_sequencer_drawn.py" in ModuleTests(checkout, second=True).of("sequencer")


def test_without_an_import_of_their_own_the_nearest_files_are_taken(checkout: Path) -> None:
    for number in range(FILES_MAX):
        text = "from actors.persist import Shard"
        (checkout / "tests" / "persist" / f"test_more_{number}.py").write_text(text)
    found = ModuleTests(checkout).of("persist/codec")
    assert len(found) == FILES_MAX
    assert {Path(each).parent.name for each in found} == {"persist"}
    (checkout / "tests" / "cluster" / "test_codecs.py").write_text("import actors.persist.codec")
    found = ModuleTests(checkout).of("persist/codec")
    assert found[0] == "cluster/test_codecs.py"
    assert len(found) == FILES_MIN


def test_all_names_in_the_tables_are_there(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    calls = [line for line in makefile.splitlines() if "tests/proof/mutations.py" in line]
    named = [word for line in calls for word in line.split()[2:] if "/" in word and word[0] != "-"]
    modules = [f"{module}.py" for module in (*TESTS, *named)]
    assert named
    assert [each for each in modules if not (root / "src" / "actors" / each).is_file()] == []
    files = {name for names in TESTS.values() for name in names}
    assert [each for each in files if not (root / "tests" / each).is_file()] == []


def test_the_examples_hold() -> None:
    for module in (mutants, module_tests):
        assert doctest.testmod(module).attempted
        assert not doctest.testmod(module).failed


@pytest.mark.parametrize(
    ("before", "now", "against", "expected"),
    [
        ("survived", "died", True, True),
        ("survived", "hung", True, True),
        ("survived", "survived", True, False),
        ("died", "survived", True, False),
        ("died", "survived", False, True),
        ("hung", "died", False, False),
    ],
)
def test_lost_is_what_the_older_suite_alone_notices(
    before: str, now: str, against: bool, expected: bool
) -> None:
    assert lost(before, now, against) is expected


@pytest.mark.long
def test_mutants_of_a_run_are_run_again(root: Path, tmp_path: Path) -> None:
    """The order of the sequencer, without one of its rules: its tests notice that."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    call = [sys.executable, "tests/proof/mutations.py", "--json"]
    for arguments in (
        [one, "--only", "boundary", "replica/sequencer"],
        [other, "--mutants", one, "--against", root],
    ):
        done = subprocess.run(
            [*call, *map(str, arguments)], cwd=root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 1 lost" in done.stdout
    verdicts = [json.loads(path.read_text())["mutants"][0]["verdict"] for path in (one, other)]
    assert set(verdicts) <= set(DIED)
    given = [one, "--resume", "--only", "boundary", "replica/sequencer"]
    done = subprocess.run(
        [*call, *map(str, given)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 mutants have run before, 0 are left" in done.stdout
