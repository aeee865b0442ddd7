from typing import final

@final
class CommittedClock:
    def __init__(self) -> None: ...
    now: int

@final
class ExpiryRules:
    def __init__(
        self,
        clock: CommittedClock,
        kind: str,
        *,
        ttl: int | None = None,
        timestamp_offset: int = 0,
        element_bytes: int = 0,
        query_every: int = 1000,
    ) -> None: ...
    def configure(
        self,
        kind: str,
        *,
        ttl: int | None = None,
        timestamp_offset: int = 0,
        element_bytes: int = 0,
        query_every: int = 1000,
    ) -> None: ...
    def follow(self, clock: CommittedClock) -> None: ...
    def counters(self) -> dict[str, int]: ...
