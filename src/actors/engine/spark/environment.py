"""The environment of the engine's process and its JVM, made of named variables only. Pure.

Everything that runs in the engine can read its environment: users' functions, and queries through
any hole in Spark that is still unknown. So it contains what Spark, Java, Python and the connection
to the store of parts need, and what the operator adds (`engine_environment`), but never the
passwords of the service's stores and sources.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from actors.engine.spark.java import JavaHome
from actors.engine.spark.remote_address import is_remote
from actors.runtime.settings import BUCKET_URL, Settings
from actors.runtime.threshold_probes import COUNTS_VARIABLE

DROPPED_VARIABLES: Final = (
    "SPARK_HOME",
    "SPARK_CONF_DIR",
    "SPARK_REMOTE",
    "SPARK_CONNECT_MODE_ENABLED",
    "PYSPARK_SUBMIT_ARGS",
    "PYSPARK_GATEWAY_PORT",
    "PYSPARK_GATEWAY_SECRET",
    "PYSPARK_PIN_THREAD",
)
"""Variables of other Spark installations; the child runs the Spark that it was installed with."""
PASSED: Final = (
    # The process.
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "LANG", "LANGUAGE", "LC_*", "TZ",
    "TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "DYLD_LIBRARY_PATH", "MALLOC_*", "GLIBC_TUNABLES", "OMP_NUM_THREADS", "ARROW_*",
    "SSL_CERT_FILE", "SSL_CERT_DIR",
    # Java and Python.
    "JAVA_HOME", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "PYTHON*",
    "VIRTUAL_ENV", "CONDA_PREFIX",
    # Spark, and the clusters that it runs on.
    "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_*", "SPARK_PUBLIC_DNS", "SPARK_USER",
    "SPARK_DIST_CLASSPATH", "SPARK_SCALA_VERSION", "HADOOP_HOME", "HADOOP_CONF_DIR",
    "HADOOP_USER_NAME", "HADOOP_TOKEN_FILE_LOCATION", "YARN_CONF_DIR", "KRB5_CONFIG", "KRB5CCNAME",
    "KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT*",
    # Counters of the test suite.
    COUNTS_VARIABLE,
)  # fmt: skip
"""Variables that the engine gets if the service has them; a ``*`` at the end matches any suffix."""
STORE_VARIABLES: Final = {
    "s3": ("AWS_*",),
    "gs": ("GOOGLE_*",),
    "az": ("AZURE_*", "IDENTITY_*", "MSI_*"),
}
"""Variables with the credentials with which Spark reads and writes parts in a bucket."""
PROXY_VARIABLES: Final = tuple(
    case(name)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    for case in (str.lower, str.upper)
)
REMOTE_TOKEN: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
"""Variable from which a client of Spark Connect takes its token."""


def engine_environment(
    given: Mapping[str, str], settings: Settings, java: JavaHome | None, *, here: bool = False
) -> dict[str, str]:
    """Return the environment of an engine's process, given the service's own environment.

    `here`: all of Spark runs on this machine, with this process's Python.
    """
    # Variables that are not named are left out, since they may hold anything.
    patterns = [*PASSED, *_store_variables(settings), *settings.engine_environment]
    if is_remote(settings.spark_master):
        patterns.append(REMOTE_TOKEN)
    source = str(Path(__file__).parents[3])
    path = os.pathsep.join([source, *filter(None, [given.get("PYTHONPATH")])])
    home = {} if java is None else {"JAVA_HOME": str(java.home)}
    kept = {
        name: value
        for name, value in given.items()
        if name not in DROPPED_VARIABLES and _matches(name, patterns)
    }
    # By default Spark uses the first `python3` on the path for clients' functions and for reading
    # buckets, and that may lack the packages they need.
    python = {"PYSPARK_PYTHON": sys.executable} if here else {}
    return python | kept | home | {"PYTHONPATH": path}


def _store_variables(settings: Settings) -> Sequence[str]:
    """Return patterns of the variables that Spark needs to reach the bucket of parts; () if there
    is no bucket, or Spark does not access it."""
    bucket = BUCKET_URL.match(settings.blob_url)
    if bucket is None or settings.engine_part_copies:
        return ()
    return (*STORE_VARIABLES[bucket["kind"]], *PROXY_VARIABLES)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )
