"""The hash of every key type, against values recorded from Spark 4.3.0: plain Python and compiled."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pytest
from type_samples import remainders, told_apart

from statebackend.keys import key_encoder

pytestmark = pytest.mark.checked

key_groups = pytest.importorskip("statebackend._core.key_groups", reason="the compiled core is not built")

D = decimal.Decimal
UTC = datetime.timezone.utc
TOKYO = datetime.timezone(datetime.timedelta(hours=9))
ONE_LONG = -1712319331

GOLDEN: list[tuple[Any, Any, int]] = [
    ("bigint", 0, -1670924195),
    ("bigint", 1, ONE_LONG),
    ("bigint", -1, -939490007),
    ("bigint", 42, 1316951768),
    ("bigint", 100, 1114849490),
    ("bigint", 2**63 - 1, -1604625029),
    ("int", 1, -559580957),
    ("smallint", 1, -559580957),
    ("tinyint", 1, -559580957),
    ("boolean", True, -559580957),
    ("boolean", False, 933211791),
    ("string", "", 142593372),
    ("string", "a", 1485273170),
    ("string", "ab", -97053317),
    ("string", "abc", 1322437556),
    ("string", "abcd", -396302900),
    ("string", "abcde", 814637928),
    ("string", "hello", -1008564952),
    ("string", "é", 2119106806),
    ("string", "日本", -336983209),
    ("binary", b"hello", -1008564952),
    ("binary", b"\xff", 1398487324),
    ("binary", b"\x80\x81\x82\x83\xff", 297163799),
    ("double", 0.0, -1670924195),
    ("double", -0.0, -1670924195),
    ("double", float("nan"), -1281358385),
    ("double", -float("nan"), -1281358385),
    ("double", 1.0, -460888942),
    ("float", 1.0, -466301895),
    ("float", -0.0, 933211791),
    ("float", float("nan"), -349261430),
    ("decimal(10,2)", D(1), 1114849490),
    ("decimal(18,2)", D(1), 1114849490),
    ("decimal(10,3)", D(1), -803323719),
    ("decimal(19,2)", D(1), -295670906),
    ("decimal(38,0)", D(1), -386724586),
    ("decimal(38,0)", D(-1), 1398487324),
    ("date", datetime.date(1970, 1, 2), -559580957),
    ("timestamp", datetime.datetime(1970, 1, 1, tzinfo=UTC), -1670924195),
    ("timestamp", datetime.datetime(1970, 1, 1, tzinfo=TOKYO), 2072899405),
    ("timestamp_ntz", datetime.datetime(1970, 1, 1), -1670924195),
    (tuple[int, int], (1, 2), -1181176833),
    (tuple[tuple[int, int]], ((1, 2),), -1181176833),
    (tuple[int, tuple[int]], (1, (2,)), -1181176833),
    (tuple[int, int], (None, 1), ONE_LONG),
    (tuple[int, int], (1, None), ONE_LONG),
    (tuple[tuple[int, int], int], (None, 1), ONE_LONG),
    (tuple[tuple[int, int], int], ((None, None), 1), ONE_LONG),
    (tuple[str, int], (None, 1), ONE_LONG),
    (tuple[int], (None,), 42),
]


@pytest.mark.parametrize(("spec", "key", "wanted"), GOLDEN)
def test_hashes_recorded_from_spark(spec: Any, key: Any, wanted: int) -> None:
    encoder = key_encoder(spec)
    canonical = encoder.encode(key)
    assert encoder.spark_hash(canonical) == wanted
    plan = key_groups.HashPlan(encoder.hash_plan)
    assert (told_apart(plan, encoder.encode_many([key])) == remainders([wanted])).all()


def test_the_key_group_recorded_from_spark() -> None:
    assert key_encoder("bigint").key_group(-1, 128) == 41
    assert key_groups.HashPlan("int64").key_groups(np.array([-1]), 128) == 41
