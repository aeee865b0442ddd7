"""The calls of a processor that takes and gives data frames."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import pyarrow as pa

from statebackend.spark_functions.pandas_frames import BY_NAME, IS_SAFE, MAX_BYTES, FramesOut, frames_by_key
from statebackend.spark_functions.processor_calls import ProcessorFunction
from statebackend.spark_functions.spark_rows import ALL, KeyRows, most_rows


class PandasProcessorFunction(ProcessorFunction):
    """The function of a processor that takes and gives data frames."""

    settings = (*ProcessorFunction.settings, BY_NAME, IS_SAFE, MAX_BYTES)

    def _groups(self, batch: pa.RecordBatch) -> Iterator[KeyRows]:
        most_bytes = int(str(self._settings.get(MAX_BYTES, ALL)).rstrip("b"))
        most = most_rows(self._settings)
        if most_bytes != ALL and batch.num_rows:
            most = max(1, min(most, ceil(most_bytes * batch.num_rows / batch.nbytes)))
        return frames_by_key(batch, self._key, self._timezone, most)

    def _out(self) -> Any:
        return FramesOut(self._schema, self._timezone, self._settings)
