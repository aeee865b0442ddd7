"""What writing and reading columns of nested types share."""

from typing import final

FORMS: dict[str, int]

@final
class Block: ...
