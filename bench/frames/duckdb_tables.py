"""DuckDB: a table that statements upsert into, merge into or replace; durable by its write-ahead log.

The log has a transaction, and is fsynced, when the transaction returns. A checkpoint moves the log into the database
file after 16 MiB, DuckDB's default, or after 1 GB. A large transaction may write a checkpoint instead of the log.
"""

from __future__ import annotations

import duckdb
import pyarrow as pa

__all__ = ["FORMS"]

BATCH = "SELECT k, sum(v)::BIGINT s, count(*) n FROM batch GROUP BY k"


class Table:
    key, log = "BIGINT", "16MiB"

    def __init__(self, folder: str | None, threads: int) -> None:
        database = ":memory:" if folder is None else f"{folder}/state.db"
        self.con = duckdb.connect(database, config={"threads": threads, "preserve_insertion_order": "false"})
        self.con.sql(f"SET wal_autocheckpoint = '{self.log}'; SET enable_progress_bar = false")
        self.con.sql(f"CREATE TABLE IF NOT EXISTS t (k {self.key}, s BIGINT, n BIGINT)")

    def fill(self, keys: pa.Array, sums: pa.Array) -> None:
        batch = pa.table({"k": keys, "v": sums})  # noqa: F841 - SQL names it
        self.con.sql("INSERT INTO t SELECT k, v, 1 FROM batch")

    def save(self) -> None: ...

    def contents(self, keys: pa.Array) -> pa.Table:
        return self.con.sql("SELECT k, s, n FROM t").to_arrow_table()


class Upsert(Table):
    key = "BIGINT PRIMARY KEY"

    def add(self, keys: pa.Array, values: pa.Array) -> pa.Table:
        batch = pa.table({"k": keys, "v": values})  # noqa: F841
        self.con.sql(
            f"INSERT INTO t {BATCH} ON CONFLICT (k) DO UPDATE SET s = s + excluded.s, n = n + excluded.n"
        )
        # Not by RETURNING: DuckDB 2.0.1 leaves out some of 200,000 rows there, on two threads.
        return self.con.sql("SELECT k, s, n FROM t SEMI JOIN batch USING (k)").to_arrow_table()


class UpsertLargeLog(Upsert):
    log = "1GB"


class Merge(Table):
    def add(self, keys: pa.Array, values: pa.Array) -> pa.Table:
        batch = pa.table({"k": keys, "v": values})  # noqa: F841
        changed = self.con.sql(
            f"""MERGE INTO t USING ({BATCH}) b ON t.k = b.k
            WHEN MATCHED THEN UPDATE SET s = t.s + b.s, n = t.n + b.n
            WHEN NOT MATCHED THEN INSERT VALUES (b.k, b.s, b.n) RETURNING t.k, t.s, t.n"""
        )
        return changed.to_arrow_table()


class MergeLargeLog(Merge):
    log = "1GB"


class Rebuild(Table):
    def add(self, keys: pa.Array, values: pa.Array) -> pa.Table:
        batch = pa.table({"k": keys, "v": values})  # noqa: F841
        changed = self.con.sql(
            f"""SELECT b.k, b.s + coalesce(t.s, 0) s, b.n + coalesce(t.n, 0) n
            FROM ({BATCH}) b LEFT JOIN t USING (k)"""
        ).to_arrow_table()
        self.con.sql(
            """CREATE OR REPLACE TABLE t AS
            SELECT * FROM t ANTI JOIN changed USING (k) UNION ALL FROM changed"""
        )
        return changed


_FORMS = {"upsert": Upsert, "merge": Merge, "rebuild": Rebuild}
#: By durability.
FORMS = {
    False: _FORMS,
    True: {**_FORMS, "upsert, log of 1 GB": UpsertLargeLog, "merge, log of 1 GB": MergeLargeLog},
}
