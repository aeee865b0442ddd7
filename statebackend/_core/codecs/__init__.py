"""Codecs turn Python objects into stored keys and values, and back.

A codec belongs to one role of one state. It converts numbers, strings and bytes itself, and the values of other
declared types by a `TypeCodec`. Other values, and every error, it leaves to the serializer of the type.
`value_bytes` does so where every value is stored as bytes. Batches take columns that are already in stored form;
`nested_writer` brings columns of nested types to it, `nested_reader` brings them back.

Jobs that go row by row have `row_maker`, which makes rows of Python objects out of Arrow's buffers, and `row_writer`,
which makes columns out of the rows that a function gives.
"""
