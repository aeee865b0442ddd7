from typing import final

OPERATIONS: dict[str, int]
ORDERED: tuple[str, ...]

@final
class AddPlan:
    operation: str
    number: str | None
    value_width: int
    def __init__(self, operation: str, number: str | int | None = None, digits: int = 0) -> None: ...
    def step(self, old: bytes | None, value: bytes) -> bytes | None: ...
