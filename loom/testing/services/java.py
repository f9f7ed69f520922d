"""Java, Maven, and the jars of Apache Kafka.

The jars come from the package registry through Maven's own client, once per version, into a cache folder of the user:
``$XDG_CACHE_HOME/loom`` (default ``~/.cache/loom``). A file lock and an atomic rename make that safe for two test runs
at once; a download that was cut short leaves nothing that looks complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from loom.errors import ServiceFailedError, ServiceMissingError

JAVA_AT_LEAST: Final = 17
_FETCH_TIMEOUT_S: Final = 600.0
_PROBE_TIMEOUT_S: Final = 20.0
_POM: Final = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>loom.testing</groupId>
  <artifactId>kafka-jars</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{version}</version>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId>
      <artifactId>slf4j-simple</artifactId>
      <version>1.7.36</version>
    </dependency>
  </dependencies>
</project>
"""


def cache_folder() -> Path:
    """Where loom keeps what it downloads for tests, demo and ``loom dev``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "loom"


def find_java() -> str:
    """The path of a Java of at least version 17, from ``JAVA_HOME`` or ``PATH``.

    Raises:
        ServiceMissingError: there is none; the message is one line that says what was found.
    """
    home = os.environ.get("JAVA_HOME")
    candidates = [str(Path(home) / "bin" / "java")] if home else []
    candidates += [found] if (found := shutil.which("java")) else []
    seen = "none was found"
    for candidate in candidates:
        version = _java_version(candidate)
        if version is not None and version >= JAVA_AT_LEAST:
            return candidate
        seen = f"{candidate} is {'not a working Java' if version is None else f'Java {version}'}"
    raise ServiceMissingError(
        f"Java {JAVA_AT_LEAST} or newer",
        seen,
        f"install it (Debian: openjdk-{JAVA_AT_LEAST}-jre-headless) or set JAVA_HOME",
    )


def kafka_jars(version: str) -> Path:
    """The folder with the jars of Apache Kafka ``version``, downloaded at the first call.

    Raises:
        ServiceMissingError: the jars are not in the cache and Maven is not there to get them.
        ServiceFailedError: Maven could not get them; the message ends with Maven's last lines.
    """
    pom = _POM.format(version=version)
    folder = cache_folder() / "kafka" / f"{version}-{hashlib.sha256(pom.encode()).hexdigest()[:8]}"
    if folder.is_dir():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        raise ServiceMissingError("Maven", "mvn is not on PATH", "install it (Debian: maven)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _fetch(maven, pom, folder)
    return folder


def _fetch(maven: str, pom: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name:
        work = Path(name)
        (work / "pom.xml").write_text(pom)
        command = [
            maven,
            "--batch-mode",
            "--quiet",
            "dependency:copy-dependencies",
            f"-DoutputDirectory={work / 'libs'}",
        ]
        try:
            done = subprocess.run(
                command, cwd=work, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ServiceFailedError("maven", f"no jars after {_FETCH_TIMEOUT_S:.0f} s", "") from error
        if done.returncode != 0 or not any((work / "libs").glob("kafka_2.13-*.jar")):
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
            raise ServiceFailedError("maven", f"could not get the jars of Apache Kafka {target.name}", tail)
        (work / "libs").rename(target)


def _java_version(path: str) -> int | None:
    try:
        done = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(\d+)(?:\.(\d+))?', done.stderr + done.stdout)
    if found is None:
        return None
    major = int(found[1])
    return int(found[2] or 0) if major == 1 else major  # Java 8 calls itself 1.8
