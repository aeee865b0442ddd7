"""Settings: Flink's names, RocksDB's own, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rocks import CommittedClock, Database, ExpiryRules, MemoryBudget, Options, open_database, put

from statebackend.backends.rocksdb.settings import (
    COMPRESSIONS,
    PREDEFINED,
    column_family_settings,
    predefined,
)
from statebackend.errors import UsageError

pytestmark = pytest.mark.checked


def written(folder: Path) -> str:
    """The options that RocksDB says it runs with."""
    return max(folder.glob("OPTIONS-*")).read_text()


def setting(text: str, name: str) -> str:
    section = text[text.index('[CFOptions "a"]') :]
    found = re.search(rf"^  {name}=(.*)$", section, re.M) or re.search(rf"^  {name}=(.*)$", text, re.M)
    assert found, name
    return found[1]


@pytest.mark.parametrize("name", PREDEFINED)
def test_flinks_options_arrive(tmp_path: Path, name: str) -> None:
    chosen = predefined(name)
    family = Options(
        column_family_settings(chosen, compression="lz4", periodic_compaction_seconds=12_345),
        block_size=chosen.block_size,
        bloom_bits=chosen.bloom_bits,
    )
    with Database(tmp_path, Options(dict(chosen.database), threads=chosen.threads), {"a": family}):
        text = written(tmp_path)
    assert setting(text, "stats_dump_period_sec") == "0"
    assert setting(text, "info_log_level") == "HEADER_LEVEL"
    assert setting(text, "compression") == "kLZ4Compression"
    assert setting(text, "periodic_compaction_seconds") == "12345"
    assert setting(text, "compaction_style") == "kCompactionStyleLevel"
    if chosen.threads:
        assert setting(text, "max_background_jobs") == "4"
    if name == "SPINNING_DISK_OPTIMIZED_HIGH_MEM":
        expected = {
            "target_file_size_base": 256 << 20,
            "max_bytes_for_level_base": 1 << 30,
            "write_buffer_size": 64 << 20,
            "min_write_buffer_number_to_merge": 3,
            "max_write_buffer_number": 4,
            "block_size": 128 << 10,
        }
        assert {key: int(setting(text, key)) for key in expected} == expected
        assert setting(text, "filter_policy").startswith("bloomfilter")


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compressions_of_the_library(tmp_path: Path, name: str) -> None:
    settings = column_family_settings(predefined("DEFAULT"), compression=name)
    with open_database(tmp_path, settings=settings) as db:
        a = db.column_family("a")
        for i in range(2_000):
            put(db, a, b"%d" % i, b"x" * 200)
        db.flush()
        assert db.get(a, b"7") == b"x" * 200
        (file,) = db.live_files()
        assert (file["bytes"] > 300_000) == (name == "none")


def test_index_and_filters_are_partitioned_and_cached(tmp_path: Path) -> None:
    budget = MemoryBudget(16 << 20)
    with open_database(tmp_path / "1", budget=budget, bloom_bits=10):
        text = written(tmp_path / "1")
    assert setting(text, "index_type") == "kTwoLevelIndexSearch"
    for name in ("partition_filters", "cache_index_and_filter_blocks", "pin_top_level_index_and_filter"):
        assert setting(text, name) == "true"
    assert setting(text, "pin_l0_filter_and_index_blocks_in_cache") == "true"
    with open_database(tmp_path / "2", partitioned=False, bloom_bits=10):
        text = written(tmp_path / "2")
    assert setting(text, "index_type") == "kBinarySearch"


@pytest.mark.parametrize(
    "wrong",
    [
        {"settings": {"no_such_option": 1}},
        {"settings": {"write_buffer_size": "many"}},
        {"settings": {"compression": "kBestOfAll"}},
        {"settings": {"write_buffer_size": "1;compression=kZSTD"}},
        {"threads": 0},
        {"block_size": 5},
        {"bloom_bits": -1},
        {"is_list": True},
    ],
)
def test_senseless_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Options(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "tree"},
        {"kind": "value", "ttl": 0},
        {"kind": "value", "ttl": 1, "timestamp_offset": -1},
        {"kind": "value", "query_every": 0},
        {"kind": "fixed_list", "ttl": 1, "element_bytes": 7},
        {"kind": "fixed_list"},
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        ExpiryRules(CommittedClock(), **wrong)  # type: ignore[arg-type]
