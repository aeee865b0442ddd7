"""The backends of this package by name: the one list that tests of what all of them do are made with."""

BACKENDS = ["heap", "reference", "rocksdb"]
