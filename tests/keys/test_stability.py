"""Canonical forms and key groups do not depend on the process: not on its hash seed, not on its time zone."""

from __future__ import annotations

from processes import run

PROGRAM = """
import datetime, hashlib
from decimal import Decimal
from statebackend import types as t
from statebackend.keys import TimeWindow, encode_namespace, key_encoder
from statebackend.keys.key_groups import flink_key_group
from statebackend.types.serializers import serializer_for

digest = hashlib.sha256()
when = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.timezone.utc)
for spec, keys in {
    "bigint": range(1000),
    "string": [f"user-{i}" for i in range(1000)],
    "double": [i / 7 for i in range(100)],
    "decimal(38,3)": [Decimal(i) / 8 for i in range(-100, 100)],
    "timestamp": [when + datetime.timedelta(hours=i) for i in range(100)],
    "timestamp_ntz": [when.replace(tzinfo=None)],
    "struct<a:string,b:struct<c:bigint>>": [(str(i), (i,)) for i in range(100)],
}.items():
    encoder = key_encoder(spec)
    for key in keys:
        digest.update(repr((encoder.encode(key), encoder.key_group(key, 1000))).encode())
    try:
        from statebackend._core.key_groups import HashPlan
    except ImportError:
        continue
    plan, batch = HashPlan(encoder.hash_plan), encoder.encode_many(list(keys))
    assert plan.key_groups(batch, 1000).tolist() == [encoder.key_group(key, 1000) for key in keys]
digest.update(repr([flink_key_group(f"user-{i}", 128) for i in range(100)]).encode())
digest.update(encode_namespace(("a", TimeWindow(0, 1))))
digest.update(serializer_for(dict[str, list[int]]).serialize({"b": [1], "a": [2]}))
print(digest.hexdigest())
"""


def test_processes_agree() -> None:
    places = (("1", "UTC"), ("2", "Asia/Tokyo"), ("random", "America/New_York"))
    digests = {run(PROGRAM, variables={"PYTHONHASHSEED": seed, "TZ": zone}).stdout for seed, zone in places}
    assert len(digests) == 1
