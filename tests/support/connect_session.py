"""A session through Spark Connect whose server listens on a port of its own: `connect_session`.

The server that ``SparkSession.builder.remote("local")`` starts always listens on port 15002, so that two programs at
once cannot have one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def connect_session(master: str, conf: dict[str, str]) -> SparkSession:
    """Start a server on ``master`` in this process, and connect to it."""
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    builder = SparkSession.builder.master(master).config("spark.api.mode", "classic")
    builder = builder.config("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")
    builder = builder.config("spark.connect.grpc.binding.port", "0")
    # What Spark sets for a server that it starts by itself.
    builder = builder.config("spark.sql.artifact.isolation.enabled", "true")
    builder = builder.config("spark.sql.artifact.isolation.alwaysApplyClassloader", "true")
    for name, value in conf.items():
        builder = builder.config(name, value)
    server = builder.getOrCreate()
    service = getattr(server._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$")
    port = getattr(service, "MODULE$").localPort()
    return RemoteSession.builder.remote(f"sc://127.0.0.1:{port}").getOrCreate()


def started(writer: Any) -> Any:
    """The query. Spark gives its worker ten seconds to load all that it needs, too few on a busy machine: once more."""
    for _ in range(9):
        try:
            return writer.start()
        except Exception as error:
            if "worker failed to connect back" not in str(error):
                raise
    return writer.start()
