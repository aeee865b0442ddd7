"""Data frames for Spark's functions: the frames of each key, and the frames that such functions give.

A batch becomes one frame, and each key gets slices of it. Spark infers the types of each frame from Python's values, so
integers are ``int64``, or ``float64`` in a batch with a null among them, and numbers with fractions are ``float64``.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkTypeError, PySparkValueError

from statebackend.runtime.arrow_rows import OutputSchema
from statebackend.spark_functions.spark_rows import KeyRows, grouped, in_zone, python_values
from statebackend.types import TIMESTAMP

BY_NAME = "spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName"
IS_SAFE = "spark.sql.execution.pandas.convertToArrowArraySafely"
MAX_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


def frame_of(batch: pa.RecordBatch, timezone: str) -> pd.DataFrame:
    """The frame of a batch, with the types that Spark infers."""
    columns = [_series(column, timezone) for column in batch.columns]
    names = [name if _is_field(name) else f"_{at}" for at, name in enumerate(batch.schema.names)]
    return pd.DataFrame(dict(enumerate(columns))).set_axis(names, axis=1)


def _is_field(name: str) -> bool:
    """True for a name that a named tuple can have: Spark calls other columns by their places."""
    return name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")


def _series(column: pa.Array, timezone: str) -> Any:
    kind = in_zone(column.type, timezone)
    if kind != column.type:
        column = column.cast(kind)
    if pa.types.is_integer(kind):
        return column.cast(pa.int64() if not column.null_count else pa.float64(), safe=False).to_numpy(
            zero_copy_only=False
        )
    if pa.types.is_floating(kind):
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    if pa.types.is_timestamp(kind):
        series = column.to_pandas()
        naive = series if kind.tz is None else series.dt.tz_localize(None)
        return naive.astype("datetime64[ns]").to_numpy()
    if pa.types.is_boolean(kind) and column.null_count:
        return np.array(column.to_pylist(), object)
    return column.to_pandas(date_as_object=True).to_numpy()


def frames_by_key(batch: pa.RecordBatch, names: Sequence[str], timezone: str, most: int) -> Iterator[KeyRows]:
    """Each key, as state has it and as a function gets it, with its frames of at most so many rows.

    A null among numbers is NaN, which is not a key of others.
    """
    rows = grouped(batch, names, nan_apart=True, nulls_apart=True)
    frame = frame_of(rows.batch, timezone)
    places = [batch.schema.get_field_index(name) for name in names]
    starts, first = rows.starts, rows.first_rows()
    stored = zip(*[python_values(first.column(at), timezone) for at in places], strict=True)
    keys = zip(*[frame.iloc[:, at].iloc[starts].tolist() for at in places], strict=True)
    for own, key, start, end in zip(stored, keys, starts.tolist(), rows.ends.tolist(), strict=True):
        yield own, key, _chunks(frame, start, end, most)


def _chunks(frame: pd.DataFrame, start: int, end: int, most: int) -> Iterator[pd.DataFrame]:
    for at in range(start, end, most):
        chunk = frame.iloc[at : min(at + most, end)]
        chunk.index = index_of(len(chunk))
        yield chunk


_INDEXES: dict[int, pd.RangeIndex] = {}


def index_of(count: int) -> pd.RangeIndex:
    """An index of so many rows; small ones are made once, because an index cannot change."""
    if count > 64:
        return pd.RangeIndex(count)
    if count not in _INDEXES:
        _INDEXES[count] = pd.RangeIndex(count)
    return _INDEXES[count]


class FramesOut:
    """Takes the frames of a function, and makes Arrow of them as Spark's workers do."""

    few = 2_048

    def __init__(self, schema: OutputSchema, timezone: str, settings: Mapping[str, str]) -> None:
        self._schema = schema
        self._timezone = timezone
        self._by_name = settings.get(BY_NAME, "true").lower() == "true"
        self._is_safe = settings.get(IS_SAFE, "false").lower() == "true"
        #: The frames that have come, always in this list, which callers hold.
        self.pending: list[pd.DataFrame] = []
        #: The number of rows that have come.
        self.count = 0

    def take(self, frames: Iterable[Any]) -> None:
        """Take the frames of a call; a generator runs to its end here."""
        for frame in frames:
            if not isinstance(frame, pd.DataFrame):
                raise PySparkValueError(
                    "Invalid return type. Please make sure that the UDF returns a pandas.DataFrame when the "
                    "specified return type is StructType."
                )
            if len(frame):
                self.pending.append(frame)
                self.count += len(frame)

    def settled(self) -> Iterator[pa.RecordBatch]:
        """The same as `taken`, to be called when `few` frames are pending."""
        return self.taken()

    def taken(self) -> Iterator[pa.RecordBatch]:
        """The rows that have come, which are then gone."""
        alike: list[pd.DataFrame] = []
        for frame in self._taken():
            if alike and not frame.columns.equals(alike[0].columns):
                yield self._batch(alike)
                alike = []
            alike.append(frame)
        if alike:
            yield self._batch(alike)

    def _taken(self) -> list[pd.DataFrame]:
        frames = self.pending.copy()
        self.pending.clear()
        self.count = 0
        return frames

    def _batch(self, frames: list[pd.DataFrame]) -> pa.RecordBatch:
        frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True, copy=False)
        names = self._schema.arrow.names
        if self._by_name and any(isinstance(name, str) for name in frame.columns):
            frame = frame[names]
        columns = [
            self._column(frame.iloc[:, at], field, kind)
            for at, (field, kind) in enumerate(
                zip(self._schema.arrow, self._schema.row_type.types, strict=True)
            )
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema.arrow)

    def _column(self, series: Any, field: pa.Field, kind: Any) -> pa.Array:
        if isinstance(series.dtype, pd.CategoricalDtype):
            series = series.astype(series.dtype.categories.dtype)
        series = self._converted(series, field.type, kind)
        mask = None if hasattr(series.array, "__arrow_array__") else series.isnull()
        try:
            try:
                return pa.Array.from_pandas(series, mask=mask, type=field.type, safe=self._is_safe)
            except pa.ArrowInvalid:
                return pa.Array.from_pandas(series, mask=mask).cast(field.type, safe=self._is_safe)
        except TypeError as error:
            raise PySparkTypeError(
                f"Cannot convert the output value of the column '{field.name}' with type '{series.dtype}' to the "
                f"specified return type of the column: '{field.type}'. Please check if the data types match and "
                "try again."
            ) from error
        except ValueError as error:
            raise PySparkValueError(
                f"Failed to convert the value of the column '{field.name}' with type '{series.dtype}' to Arrow type "
                f"'{field.type}'."
            ) from error

    def _converted(self, series: Any, arrow: pa.DataType, kind: Any) -> Any:
        if kind == TIMESTAMP:
            dtype = series.dtype
            if isinstance(dtype, pd.DatetimeTZDtype):
                return series.dt.tz_convert("UTC")
            if pd.api.types.is_datetime64_dtype(dtype):
                return series.dt.tz_localize(self._timezone, ambiguous=False).dt.tz_convert("UTC")
            return series
        if pa.types.is_nested(arrow):
            from pyspark.sql.pandas.types import _create_converter_from_pandas, from_arrow_type

            return _create_converter_from_pandas(from_arrow_type(arrow), timezone=self._timezone)(series)
        return series
