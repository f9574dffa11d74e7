"""A Spark Connect server on loopback from the installed package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from standalone_cluster import (  # type: ignore[import-not-found]
    Daemon,
    environment_of,
    quick_java,
)

from actors.engine.spark.java import JavaHome

TOKEN = "open sesame; 100%"
"""Has every character that an address must write otherwise."""
TOKEN_WRITTEN = "open%20sesame%3B%20100%25"


STARTED = r"Spark Connect server started at: .*:(\d+)"
"""The line of its log that tells the port."""


def server_arguments(
    folder: Path, java: JavaHome, port: int, conf: Mapping[str, str], master: str = "local[2]"
) -> list[str]:
    """The arguments of `Daemon` for a server that keeps what it writes in a folder."""
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"{quick_java(java)} -Djava.io.tmpdir={folder}",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.maxResultSize": "32m",
        "spark.local.dir": str(folder),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.mapKeyDedupPolicy": "LAST_WIN",  # a step that is prepared here must know
        "spark.sql.session.timeZone": "Asia/Tokyo",  # ours must not depend on it
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        **conf,
    }
    program = "org.apache.spark.sql.connect.service.SparkConnectServer"
    arguments = ["org.apache.spark.deploy.SparkSubmit", "--master", master]
    for key, value in settings.items():
        arguments += ["--conf", f"{key}={value}"]
    return [*arguments, "--class", program, "spark-internal"]


class ConnectServer:
    """A running server: the process, and its port."""

    def __init__(self, folder: Path, java: JavaHome, *, port: int = 0, token: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        conf = {"spark.connect.authenticate.token": token} if token else {}
        arguments = server_arguments(folder, java, port, conf)
        memory = {"SPARK_DAEMON_MEMORY": "512m"}  # what this program's driver is given
        self.daemon = Daemon(arguments, environment_of(folder, java) | memory, folder)
        try:
            found = self.daemon.wait_for(STARTED)
        except BaseException:
            self.daemon.kill()
            raise
        self.port = int(found.group(1))

    @property
    def url(self) -> str:
        return f"sc://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Kills it: SIGKILL."""
        self.daemon.kill()


@contextlib.contextmanager
def running_server(folder: Path, java: JavaHome, *, token: str = "") -> Iterator[ConnectServer]:
    """A server; killed at the end."""
    server = ConnectServer(folder, java, token=token)
    try:
        yield server
    finally:
        server.kill()
