"""CRC-32C against its published values, a bit-by-bit reference, and itself in pieces."""

from __future__ import annotations

import random
import threading

import numpy as np
import pyarrow as pa
import pytest

from statebackend._core.crc32c import crc32c, implementation
from statebackend.errors import UsageError

pytestmark = pytest.mark.checked


def reference(data: bytes, value: int = 0) -> int:
    crc = value ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("portable", [False, True], ids=["instruction", "tables"])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_published_values(data: bytes, expected: int, portable: bool) -> None:
    assert crc32c(data, portable=portable) == expected
    assert reference(data) == expected


@pytest.mark.parametrize("portable", [False, True], ids=["instruction", "tables"])
def test_every_length_and_offset(rng: random.Random, portable: bool) -> None:
    data = rng.randbytes(400)
    for start in range(9):
        for length in [*range(50), 255, 256, 257, 391]:
            piece = memoryview(data)[start : start + length]
            value = rng.getrandbits(32)
            assert crc32c(piece, value, portable=portable) == reference(bytes(piece), value)


def test_both_agree_and_pieces_add_up(rng: random.Random) -> None:
    for _ in range(50):
        data = rng.randbytes(rng.randrange(20_000))
        cut = rng.randrange(len(data) + 1)
        whole = crc32c(data)
        assert crc32c(data, portable=True) == whole
        assert crc32c(data[cut:], crc32c(data[:cut])) == whole


def test_anything_contiguous_is_taken() -> None:
    expected = crc32c(b"abcdefgh")
    for data in (bytearray(b"abcdefgh"), memoryview(b"abcdefgh"), pa.py_buffer(b"abcdefgh")):
        assert crc32c(data) == expected
    assert crc32c(np.frombuffer(b"abcdefgh", np.int64)) == expected
    for bad in ("text", 7, None, np.arange(10)[::2]):
        with pytest.raises(UsageError, match="no contiguous bytes"):
            crc32c(bad)
    for value in (-1, 2**32):
        with pytest.raises(OverflowError):
            crc32c(b"", value)


def test_large_buffers_are_read_without_the_gil() -> None:
    """Two threads at a time give the same as one."""
    data = np.random.default_rng(1).bytes(8 << 20)
    expected, found = crc32c(data), []
    threads = [threading.Thread(target=lambda: found.append(crc32c(data))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_the_processor_of_this_machine_has_an_instruction() -> None:
    flags = ""
    try:
        with open("/proc/cpuinfo") as file:
            flags = file.read()
    except OSError:
        pytest.skip("no /proc/cpuinfo here")
    assert (implementation() == "tables") == (" sse4_2" not in flags and " crc32" not in flags)
