"""Clusters for tests of queries: the program of `executors_query` under command, and Spark's own master and workers."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import executors_query
from executors_query import MARK, marked, waits_for
from processes import environment
from refusing_disks import may_mount

#: Two executors with three slots each.
CLUSTER = "local-cluster[2,3,1024]"
#: Whatever becomes of the tests, a master and its workers end by themselves after so many seconds.
LONGEST = "1500"


class Cluster:
    """The program of `executors_query`, in processes of its own."""

    def __init__(self, folder: Path, master: str = CLUSTER, **conf: str) -> None:
        self.mark = secrets.token_hex(8)
        #: Where all its processes have their temporary files.
        self.temporary = folder / f"tmp-{self.mark}"
        self.temporary.mkdir()
        java_options = os.environ.get("SPARK_SUBMIT_OPTS", "")
        conf = {
            "spark.local.dir": str(self.temporary),
            "spark.executor.extraJavaOptions": java_options,
            **conf,
        }
        self.log = folder / f"log-{self.mark}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, executors_query.__file__, master, json.dumps(conf)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(**{MARK: self.mark, "TMPDIR": str(self.temporary)}),
                cwd=folder,
                text=True,
            )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, do: str, **options: Any) -> None:
        """Let it do something, and do not wait."""
        self.process.stdin.write(json.dumps({"do": do, **options}, default=str) + "\n")
        self.process.stdin.flush()

    def ask(self, do: str, **options: Any) -> Any:
        """Let it do something; what it gave."""
        self.tell(do, **options)
        return self.answer()

    def answer(self) -> Any:
        """Wait for the end of what it was told to do; what it gave."""
        for line in self.process.stdout:
            if line.startswith("answer "):
                answer = json.loads(line.removeprefix("answer "))
                assert "failed" not in answer, f"{answer['failed']}\n{self.log.read_text()[-6000:]}"
                return answer["answer"]
        raise AssertionError(self.log.read_text()[-6000:])

    def signal_driver(self, number: signal.Signals) -> None:
        """Send a signal to the driver, its JVM first, and to no other process."""
        jvms = [pid for pid, command in marked(self.mark).items() if "SparkSubmit" in command]
        for pid in [*jvms, self.process.pid]:
            os.kill(pid, number)

    def kill(self) -> None:
        self.signal_driver(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """End it; all that came from it must end by itself."""
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        try:
            self.process.wait(120)
            waits_for("the end of all processes", lambda: not marked(self.mark), 120)
        finally:
            left = marked(self.mark)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert left_in(self.temporary) == []


def left_in(folder: Path) -> list[Path]:
    return [path for name in ("staging", "copies") for path in folder.rglob(f"statebackend-{name}-*")]


def can_hide() -> bool:
    """Whether a worker may have its own view of the file system."""
    return may_mount() and shutil.which("unshare") is not None


@contextmanager
def standalone(folder: Path, hosts: Sequence[str], *sizes: str) -> Iterator[str]:
    """The address of a master with a worker on each of these addresses: Spark takes them for as many machines. All see
    nothing in the folder ``hidden``, if that can be had.
    """
    import pyspark

    home = Path(pyspark.__file__).parent
    started = ExitStack()

    def start(name: str, kind: str, host: str, *options: str, before: Sequence[str] = ()) -> Path:
        log = folder / f"{name}.log"
        command = [*before, "timeout", LONGEST, str(home / "bin" / "spark-class")]
        command += [f"org.apache.spark.deploy.{kind}", "--host", host, "--webui-port", "0", *options]
        with log.open("wb") as file:
            variables = environment(SPARK_HOME=str(home))
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=variables)
        started.callback(process.wait)
        started.callback(process.terminate)
        return log

    def says(log: Path, text: str) -> None:
        waits_for(text, lambda: text in log.read_text())

    (folder / "hidden").mkdir(exist_ok=True)
    mount = 'mount -t tmpfs none "$0" && exec "$@"'
    hiding = ["unshare", "-m", "sh", "-c", mount, str(folder / "hidden")] if can_hide() else []
    with started:
        log = start("master", "master.Master", "127.0.0.1", "--port", "0")
        says(log, "New state: ALIVE")
        address = re.findall(r"Starting Spark master at (spark://\S+)", log.read_text())[0]
        for host in hosts:
            work = ["--work-dir", str(folder / f"work-{host}"), address]
            log = start(f"worker-{host}", "worker.Worker", host, *sizes, *work, before=hiding)
            says(log, "Successfully registered")
        yield address
