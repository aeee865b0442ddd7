"""Plans for adding to stored values: the operation, and the bytes that it works on."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint64_t

from statebackend._core.tables.reductions cimport (
    OP_ALL, OP_ANY, OP_COUNT, OP_FIRST, OP_LAST, OP_MAX, OP_MIN, OP_PRODUCT, OP_SUM)
from statebackend._core.tables.values cimport CODE_BLOB, CODE_RAW, TYPE_BOOL, TYPE_LONG

from statebackend._core.tables.state_table import FIXED_CODES
from statebackend.errors import UsageError

OPERATIONS = {
    "sum": OP_SUM, "min": OP_MIN, "max": OP_MAX, "first": OP_FIRST, "last": OP_LAST, "product": OP_PRODUCT,
    "any": OP_ANY, "all": OP_ALL, "count": OP_COUNT}
ORDERED = ("min", "max", "first", "last")


@cython.final
cdef class AddPlan:
    """A plan for adding values to stored ones.

    `operation` is a reduction over `number` (one of `FIXED_CODES`, "decimal" with `digits` up
    to 18 or 38, "bytes", or a width for "first" and "last" of any bytes), or "average" or "moments" over doubles.

    >>> plan = AddPlan("sum", "short")
    >>> plan.step(None, b"\\x01\\x00"), plan.step(b"\\x01\\x00", b"\\x02\\x01")
    (b'\\x01\\x00', b'\\x03\\x01')
    >>> plan.step(b"\\xff\\x7f", b"\\x01\\x00") is None                     # it does not fit
    True
    """

    def __init__(self, str operation not None, number=None, int digits=0):
        cdef int code, width, _i
        self.operation = operation
        self.number = None if number is None else str(number)
        if operation in ("average", "moments"):
            self.adding.kind = ADD_AVERAGE if operation == "average" else ADD_MOMENTS
            self.adding.width = AVERAGE_WIDTH if operation == "average" else MOMENTS_WIDTH
            self.value_width = 8
            return
        if operation not in OPERATIONS:
            raise UsageError("unknown operation", detail=repr(operation),
                             hint=f"one of {', '.join(OPERATIONS)}, average, moments")
        self.adding.op = OPERATIONS[operation]
        if number in FIXED_CODES:
            code, width = FIXED_CODES[number]
            if ((operation in ("any", "all")) != (code == TYPE_BOOL) and operation not in ORDERED
                    or operation == "count" and number != "long"):
                raise self.refuse()
            self.adding.kind = ADD_NUMBER
            self.adding.code = code
            self.adding.width = self.value_width = width
        elif number == "decimal":
            if not 1 <= digits <= 38 or operation not in ("sum", *ORDERED):
                raise self.refuse()
            self.adding.digits = digits
            self.adding.kind = ADD_DECIMAL if digits <= 18 else ADD_WIDE_DECIMAL
            self.adding.code = TYPE_LONG
            self.adding.width = self.value_width = 8 if digits <= 18 else 16
            self.adding.limit = 1
            for _i in range(digits if digits <= 18 else 0):
                self.adding.limit *= 10
        elif number == "bytes":
            if operation not in ORDERED:
                raise self.refuse()
            self.adding.kind = ADD_BYTES
            self.adding.width = 8
        else:
            if operation not in ("first", "last") or type(number) is not int or not 0 < number <= 65536:
                raise self.refuse()
            self.adding.kind = ADD_WHOLE
            self.adding.width = self.value_width = number

    cdef object refuse(self):
        return UsageError("there is no such operation on such values", detail=f"{self.operation} of {self.number}")

    cdef int fits(self, int value_code, uint64_t width) except -1:
        """Raise unless entries of this layout can hold the plan's results."""
        if self.adding.kind == ADD_BYTES:
            if value_code == CODE_BLOB:
                return 0
        elif width == self.adding.width and (
                value_code == CODE_RAW or self.adding.kind == ADD_WHOLE and value_code < CODE_BLOB
                or self.adding.kind == ADD_NUMBER and value_code == self.adding.code):
            return 0
        raise UsageError("the table's values are not those of the plan",
                         detail=f"{self.operation} of {self.number}, width {width}")

    def step(self, bytes old, bytes value not None):
        """The stored bytes after adding `value` to `old` (None: to nothing); None if the result does not fit."""
        cdef char out[32]
        cdef const char *before = NULL
        if self.adding.kind == ADD_BYTES or self.adding.kind == ADD_WHOLE:
            raise UsageError("first, last and byte strings are not computed")
        if len(value) != self.value_width or (old is not None and <uint64_t>len(old) != self.adding.width):
            raise UsageError("values of this plan have another width", detail=f"{self.value_width}")
        if old is not None:
            before = PyBytes_AS_STRING(old)
        if not add_fixed(&self.adding, before, PyBytes_AS_STRING(value), out):
            return None
        return PyBytes_FromStringAndSize(out, self.adding.width)
