"""Polars: a frame that joins replace; durable by Parquet files, of the changed rows or of all.

If a batch changes at least half of the keys, its file has all rows, and replaces the ones before it. Otherwise it has
the changed rows, and nothing merges it with others. Files are not compressed, which is the fastest.
"""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
import pyarrow as pa

__all__ = ["FORMS"]


class Frame:
    def __init__(self, folder: str | None, threads: int) -> None:
        self.folder, self.batch = Path(folder or ""), 0
        self.state = self.changed = pl.DataFrame(schema={"k": pl.Int64, "s": pl.Int64, "n": pl.Int64})
        if folder is not None and (files := sorted(self.folder.glob("*.parquet"))):
            newest = max(number for number, file in enumerate(files) if file.stem.endswith("full"))
            rows = pl.concat([pl.read_parquet(file) for file in files[newest:]])
            self.state = rows.unique("k", keep="last")
            self.batch = int(files[-1].name[:6])

    def fill(self, keys: pa.Array, sums: pa.Array) -> None:
        rows = pl.DataFrame({"k": keys, "s": sums}).with_columns(n=pl.lit(1, pl.Int64))
        self.state = self.changed = pl.concat([self.state, rows], rechunk=True)

    def sums_of(self, keys: pa.Array, values: pa.Array) -> pl.DataFrame:
        batch = pl.DataFrame({"k": keys, "v": values})
        return batch.group_by("k").agg(s=pl.sum("v"), n=pl.len().cast(pl.Int64))

    def changed_by(self, keys: pa.Array, values: pa.Array) -> pl.DataFrame:
        found = self.sums_of(keys, values).join(self.state, on="k", how="left")
        old_sum, old_count = pl.col("s_right").fill_null(0), pl.col("n_right").fill_null(0)
        return found.select("k", pl.col("s") + old_sum, pl.col("n") + old_count)

    def save(self) -> None:
        self.batch += 1
        full = 2 * self.changed.height >= self.state.height
        name = f"{self.batch:06}-{'full' if full else 'delta'}.parquet"
        with open(self.folder / "unfinished", "wb") as file:
            rows = self.state if full else self.changed
            rows.write_parquet(file, compression="uncompressed", statistics=False)
            file.flush()
            os.fsync(file.fileno())
        os.rename(self.folder / "unfinished", self.folder / name)
        descriptor = os.open(self.folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        for old in self.folder.glob("*.parquet") if full else ():
            if old.name < name:
                old.unlink()

    def contents(self, keys: pa.Array) -> pl.DataFrame:
        return self.state


class AntiJoin(Frame):
    def add(self, keys: pa.Array, values: pa.Array) -> pl.DataFrame:
        self.changed = self.changed_by(keys, values)
        self.state = pl.concat([self.state.join(self.changed, on="k", how="anti"), self.changed])
        return self.changed


class Streaming(Frame):
    def add(self, keys: pa.Array, values: pa.Array) -> pl.DataFrame:
        self.changed = self.changed_by(keys, values)
        kept = self.state.lazy().join(self.changed.lazy(), on="k", how="anti")
        self.state = pl.concat([kept, self.changed.lazy()]).collect(engine="streaming")
        return self.changed


class Update(Frame):
    def add(self, keys: pa.Array, values: pa.Array) -> pl.DataFrame:
        self.changed = self.changed_by(keys, values)
        self.state = self.state.update(self.changed, on="k", how="full")
        return self.changed


class Regroup(Frame):
    def add(self, keys: pa.Array, values: pa.Array) -> pl.DataFrame:
        batch = self.sums_of(keys, values)
        self.state = pl.concat([self.state, batch]).group_by("k").sum()
        self.changed = self.state.join(batch, on="k", how="semi")
        return self.changed


_FORMS = {"anti-join": AntiJoin, "anti-join, streaming": Streaming, "update": Update, "regroup": Regroup}
#: By durability.
FORMS = {False: _FORMS, True: _FORMS}
