"""Codecs turn Python objects into stored keys and values, and back.

A codec belongs to one role of one state. It converts numbers, strings and bytes itself, and leaves the rest, and every
error, to the serializer of the type. Batches do not come here: they take columns that are already in stored form.
"""
