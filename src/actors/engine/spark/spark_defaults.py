"""Reads the user's `spark-defaults.conf`, in the service, whose environment tells where Spark's
configuration is. The engine's own process does not get these variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from actors.runtime.errors import EngineUnavailable

FILE: Final = "spark-defaults.conf"
_LINE: Final = re.compile(r"([^\s=:#!][^\s=:]*)(?:\s*[=:\s]\s*(.*))?")


def read_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in `SPARK_CONF_DIR` or `SPARK_HOME/conf`; {} if there is no file.

    Raises `EngineUnavailable` if the file cannot be read.
    """
    folder = environment.get("SPARK_CONF_DIR", "")
    if not folder and environment.get("SPARK_HOME"):
        folder = str(Path(environment["SPARK_HOME"]) / "conf")
    if not folder:
        return {}
    path = Path(folder) / FILE
    try:
        return parse_defaults(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise EngineUnavailable(
            f"cannot read Spark's settings in {path}: {error}; fix the file, or unset"
            " SPARK_CONF_DIR and SPARK_HOME for this service"
        ) from None


def parse_defaults(text: str) -> dict[str, str]:
    """Return the settings in the text of a Java properties file.

    >>> parse_defaults("# ours\\nspark.executor.memory 4g\\nspark.a=b c\\nother.key 1\\n")
    {'spark.executor.memory': '4g', 'spark.a': 'b c'}
    """
    found = {}
    for line in re.sub(r"\\\r?\n\s*", "", text).splitlines():
        given = _LINE.fullmatch(line.strip())
        # Spark also ignores all other names.
        if given is not None and given[1].startswith("spark."):
            found[given[1]] = re.sub(r"\\(.)", r"\1", (given[2] or "").strip())
    return found
