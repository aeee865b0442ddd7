"""Hashes and key groups of a million keys of all types, in five parts, against a real Spark session."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from type_samples import remainders, told_apart

from statebackend import types as t
from statebackend.keys import key_encoder

key_groups = pytest.importorskip("statebackend._core.key_groups", reason="the compiled core is not built")

ROWS = 12_000
MAX_PARALLELISM = 1_000

Make = Callable[[np.random.Generator], pa.Array]


def _integers(declared: t.Type, bits: int) -> Make:
    def make(rng: np.random.Generator) -> pa.Array:
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        values = rng.integers(low, high, ROWS, endpoint=True)
        values[: ROWS // 2] >>= rng.integers(0, bits, ROWS // 2)
        values[:4] = (low, high, 0, -1)
        return pa.array(values).cast(declared.arrow)

    return make


def _floats(declared: t.Type) -> Make:
    def make(rng: np.random.Generator) -> pa.Array:
        bits = np.uint64 if declared is t.DOUBLE else np.uint32
        values = rng.integers(0, np.iinfo(bits).max, ROWS, dtype=bits, endpoint=True).view(
            declared.arrow.to_pandas_dtype()
        )
        values[: ROWS // 4] = rng.integers(-1000, 1000, ROWS // 4) / 8
        values[:5] = (0.0, -0.0, math.nan, math.inf, -math.inf)
        return pa.array(values)

    return make


def _bytes(rng: np.random.Generator) -> pa.Array:
    lengths = rng.integers(0, 20, ROWS)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    data = rng.integers(0, 256, int(offsets[-1]), dtype=np.uint8)
    return pa.Array.from_buffers(pa.binary(), ROWS, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _strings(rng: np.random.Generator) -> pa.Array:
    alphabet = np.array(list("abcdefghijé日本\U0001f600 "))
    letters = alphabet[rng.integers(0, len(alphabet), ROWS * 12)].view("U12")
    cut = rng.integers(0, 13, ROWS)
    return pa.array([text[:length] for text, length in zip(letters.tolist(), cut.tolist(), strict=True)])


def _decimals(declared: t.DecimalType) -> Make:
    def make(rng: np.random.Generator) -> pa.Array:
        limit = 10**declared.precision
        high = rng.integers(-(2**62), 2**62, ROWS).astype(object)
        numbers = high * 2**64 + rng.integers(0, 2**63, ROWS).astype(object)
        digits = rng.integers(1, declared.precision + 1, ROWS)
        numbers = [
            number % 10 ** int(d) * (-1 if number < 0 else 1)
            for number, d in zip(numbers, digits, strict=True)
        ]
        numbers[:4] = (limit - 1, 1 - limit, 0, -1)
        words = b"".join(number.to_bytes(16, "little", signed=True) for number in numbers)
        return pa.Array.from_buffers(declared.arrow, ROWS, [None, pa.py_buffer(words)])

    return make


def _with_nulls(array: pa.Array, rng: np.random.Generator) -> pa.Array:
    indices = pa.array(np.arange(len(array)), mask=rng.random(len(array)) < 0.2)
    return array.take(indices)


def _structs(declared: Any) -> Make:
    def make(rng: np.random.Generator) -> pa.Array:
        children = [_with_nulls(MAKERS[part](rng), rng) for part in declared.types]
        return pa.StructArray.from_arrays(children, fields=list(declared.arrow))

    return make


WIDE = t.DECIMAL(38, 5)
INNER = t.ROW(c=t.STRING, d=t.INT)
MAKERS: dict[t.Type, Make] = {
    t.LONG: _integers(t.LONG, 64),
    t.INT: _integers(t.INT, 32),
    t.SHORT: _integers(t.SHORT, 16),
    t.BYTE: _integers(t.BYTE, 8),
    t.BOOL: lambda rng: pa.array(rng.random(ROWS) < 0.5),
    t.DOUBLE: _floats(t.DOUBLE),
    t.FLOAT: _floats(t.FLOAT),
    t.STRING: _strings,
    t.BYTES: _bytes,
    t.DATE: lambda rng: pa.array(rng.integers(-700_000, 2_900_000, ROWS).astype(np.int32)).cast(pa.date32()),
    t.TIMESTAMP: lambda rng: pa.array(rng.integers(-(2**55), 2**57, ROWS)).cast(t.TIMESTAMP.arrow),
    t.TIMESTAMP_NTZ: lambda rng: pa.array(rng.integers(-(2**55), 2**57, ROWS)).cast(t.TIMESTAMP_NTZ.arrow),
    t.DECIMAL(10, 2): _decimals(t.DECIMAL(10, 2)),
    t.DECIMAL(18, 0): _decimals(t.DECIMAL(18, 0)),
    WIDE: _decimals(WIDE),
}
COMPOSITES = (
    t.ROW(a=t.LONG, b=t.STRING),
    INNER,
    t.ROW(a=INNER, b=t.FLOAT, c=WIDE),
    t.TUPLE(t.BYTES, t.BOOL, t.DATE),
)
MAKERS.update({declared: _structs(declared) for declared in COMPOSITES})


@pytest.mark.spark
@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(5))
def test_a_million_keys_hash_as_in_spark(
    spark: Any, tmp_path: Path, np_rng: np.random.Generator, part: int
) -> None:
    columns = {f"c{i}": make(np_rng) for i, make in enumerate(MAKERS.values())}
    table = pa.table({"row": pa.array(np.arange(ROWS)), **columns})
    pq.write_table(table, tmp_path / "keys.parquet")
    frame = spark.read.parquet(str(tmp_path / "keys.parquet"))
    wanted = [f"hash({name}) AS h{name}" for name in columns]
    wanted += [f"CAST(pmod(hash({name}), {MAX_PARALLELISM}) AS SMALLINT) AS g{name}" for name in columns]
    found = frame.selectExpr("row", *wanted).toArrow().sort_by("row")
    assert found.num_rows == ROWS

    for (name, column), declared in zip(columns.items(), MAKERS, strict=True):
        encoder = key_encoder(declared)
        plan = key_groups.HashPlan(encoder.hash_plan)
        canonical = encoder.encode_many(column)
        hashes = found[f"h{name}"].to_numpy()
        groups = plan.key_groups(canonical, MAX_PARALLELISM)
        differs = np.flatnonzero((told_apart(plan, canonical) != remainders(hashes)).any(axis=0))
        assert not len(differs), f"{declared!r}: {len(differs)} hashes differ, the first in row {differs[0]}"
        assert (groups == found[f"g{name}"].to_numpy()).all(), declared
        for row in range(0, ROWS, ROWS // 50):
            if encoder.kind == "int":
                one = int(canonical[row])
            else:
                one = bytes(canonical[1][slice(*canonical[0][row : row + 2])])
            assert encoder.spark_hash(one) == hashes[row]
