"""Data frames of functions with a group state: those that go in, and those that come out.

All rows of a batch become one frame by PySpark's own conversion, of which the rows of a key are a view. Frames that
come out are joined by their columns and types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql.pandas.types import from_arrow_schema

from statebackend.errors import UsageError
from statebackend.spark_functions.pandas_frames import BY_NAME, IS_SAFE, FramesOut, index_of
from statebackend.spark_functions.spark_rows import MOST_ROWS, ZONE, grouped, in_zone, most_rows

_INT_DTYPE = "spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype"
#: The settings of a session that frames depend on.
SETTINGS = (ZONE, MOST_ROWS, BY_NAME, IS_SAFE, _INT_DTYPE)


def frame_of(batch: pa.RecordBatch, settings: Mapping[str, str]) -> pd.DataFrame:
    """The frame of rows in Arrow, as Spark's workers make it."""
    try:
        from pyspark.sql.conversion import ArrowArrayToPandasConversion
    except ImportError as error:
        raise UsageError(
            "functions for applyInPandasWithState need PySpark 4.3 or newer", code="USAGE.NOT_AVAILABLE"
        ) from error

    zone = settings.get(ZONE, "UTC")
    columns = [
        ArrowArrayToPandasConversion.convert(
            column.cast(in_zone(column.type, zone)),
            field.dataType,
            ser_name=field.name,
            timezone=zone,
            struct_in_pandas="dict",
            ndarray_as_list=False,
            prefer_int_ext_dtype=_has_int_dtypes(settings),
            df_for_struct=False,
        )
        for column, field in zip(batch.columns, from_arrow_schema(batch.schema), strict=True)
    ]
    return pd.concat(columns, axis=1, keys=batch.schema.names)


def _has_int_dtypes(settings: Mapping[str, str]) -> bool:
    return settings.get(_INT_DTYPE, "false").lower() == "true"


def empty_frame(columns: Sequence[str]) -> pd.DataFrame:
    """The frame of a call without rows."""
    return pd.DataFrame(columns=list(columns))


def scalars(keys: pa.StructArray, settings: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """The keys as functions get them: the first values of columns of frames, so numbers are numpy's."""
    frame = frame_of(pa.RecordBatch.from_struct_array(keys), settings)
    return zip(*(_values_of(frame.iloc[:, at], keys.field(at)) for at in range(frame.shape[1])), strict=True)


def _values_of(column: pd.Series, stored: pa.Array) -> list[Any]:
    if not _varies(stored) or not stored.null_count:
        is_numeric = isinstance(column.dtype, np.dtype) and column.dtype.kind in "iufb"
        return list(column.to_numpy() if is_numeric else column)
    if pa.types.is_boolean(stored.type):
        return [value if value is None else np.bool_(value) for value in column]
    values = stored.fill_null(0).to_numpy()
    nulls = stored.is_null().to_numpy(zero_copy_only=False)
    return [np.float64("nan") if is_null else value for is_null, value in zip(nulls, values, strict=True)]


def _varies(column: pa.Array) -> bool:
    """Return True if the type of a column in a frame depends on the nulls among its rows."""
    return bool(pa.types.is_integer(column.type) or pa.types.is_boolean(column.type))


class GroupFrames:
    """The rows of a batch as frames, for each key one or more, with their own index."""

    def __init__(self, batch: pa.RecordBatch, names: Sequence[str], settings: Mapping[str, str]) -> None:
        self._grouped = grouped(batch, names)
        self._names, self._settings = list(names), settings

    def keys(self) -> pa.StructArray:
        """The keys."""
        first = self._grouped.first_rows()
        return pa.StructArray.from_arrays([first.column(name) for name in self._names], names=self._names)

    def frames(self) -> Iterator[Iterator[pd.DataFrame]]:
        """The frames of each key, made when they are asked for."""
        rows, settings = self._grouped.batch, self._settings
        most = most_rows(settings)
        nulls = np.zeros(rows.num_rows, np.bool_)
        columns = list(rows.columns)
        for at, column in enumerate(columns):
            if column.null_count and _varies(column) and not _has_int_dtypes(settings):
                nulls |= column.is_null().to_numpy(zero_copy_only=False)
                columns[at] = pc.fill_null(column, pa.scalar(0).cast(column.type))
        cut = _cutter(frame_of(pa.RecordBatch.from_arrays(columns, names=rows.schema.names), settings))
        before = np.concatenate([[0], np.cumsum(nulls)]).tolist() if nulls.any() else None

        def frame(start: int, end: int) -> pd.DataFrame:
            if before is not None and before[start] != before[end]:
                return frame_of(rows.slice(start, end - start), settings)
            return cut(start, end)

        def of_key(start: int, end: int) -> Iterator[pd.DataFrame]:
            for at in range(start, end, most):
                yield frame(at, min(at + most, end))

        for start, end in zip(self._grouped.starts.tolist(), self._grouped.ends.tolist(), strict=True):
            yield of_key(start, end)


def _cutter(frame: pd.DataFrame) -> Any:
    """What gives some rows of a frame as a frame with its own index, without a copy."""
    made: Any = getattr(pd.DataFrame, "_from_mgr", None)
    manager: Any = getattr(frame, "_mgr", None)

    def cut(start: int, end: int) -> pd.DataFrame:
        part = frame.iloc[start:end]
        part.index = index_of(end - start)
        return part

    def cut_blocks(start: int, end: int) -> pd.DataFrame:
        part = manager.get_slice(slice(start, end), axis=1)
        part.axes[1] = index_of(end - start)
        return made(part, part.axes)

    # Of pandas' own, and four times as fast.
    return cut_blocks if made is not None and hasattr(manager, "get_slice") else cut


class GroupFramesOut(FramesOut):
    """Takes what functions with a group state give; joins frames by their columns and types."""

    def take(self, frames: Any) -> None:
        if isinstance(frames, pd.DataFrame):
            raise _not_frames("iterable of pandas.DataFrame", type(frames).__name__)
        try:
            given = iter(frames)
        except TypeError:
            raise _not_frames("iterable", type(frames).__name__) from None
        super().take(map(self._checked, given))

    def _checked(self, frame: Any) -> pd.DataFrame:
        if not isinstance(frame, pd.DataFrame):
            raise _not_frames("iterator of pandas.DataFrame", f"iterator of {type(frame).__name__}")
        width, expected = frame.shape[1], len(self._schema.arrow)
        if width != expected and not (width == 0 and frame.empty):
            raise PySparkRuntimeError(
                errorClass="RESULT_COLUMN_SCHEMA_MISMATCH",
                messageParameters={"expected": str(expected), "actual": str(width)},
            )
        return frame

    def taken(self) -> Iterator[pa.RecordBatch]:
        alike: dict[Any, list[pd.DataFrame]] = {}
        for frame in self._taken():
            alike.setdefault(_layout(frame), []).append(frame)
        for (_, types), frames in alike.items():
            joined = _joined(frames, by_blocks=bool(types))
            for name in self._schema.arrow.names if self._by_name else ():
                if name not in joined:  # null, as where Spark joins frames
                    joined[name] = None
            yield self._batch([joined])


def _not_frames(expected: str, actual: str) -> PySparkTypeError:
    return PySparkTypeError(
        errorClass="UDF_RETURN_TYPE", messageParameters={"expected": expected, "actual": actual}
    )


def _layout(frame: pd.DataFrame) -> tuple[Any, Any]:
    """The columns of a frame, and their types if its blocks are arrays, which can be joined one by one."""
    blocks = getattr(getattr(frame, "_mgr", None), "blocks", ())
    if not all(type(block.values) is np.ndarray for block in blocks):
        return tuple(frame.columns), None
    return tuple(frame.columns), tuple((block.dtype, block.mgr_locs.as_array.tobytes()) for block in blocks)


def _joined(frames: list[pd.DataFrame], by_blocks: bool) -> pd.DataFrame:
    if len(frames) == 1 or not by_blocks:
        return pd.concat(frames, ignore_index=True)
    first: Any = frames[0]
    columns: list[Any] = [None] * first.shape[1]
    for at, block in enumerate(first._mgr.blocks):
        values = np.concatenate([frame._mgr.blocks[at].values for frame in frames], axis=1)
        for place, column in zip(block.mgr_locs.as_array, values, strict=True):
            columns[place] = column
    joined = pd.DataFrame(dict(enumerate(columns)))
    joined.columns = first.columns
    return joined
