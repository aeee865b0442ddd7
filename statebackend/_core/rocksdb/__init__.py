"""The compiled half of the backend on RocksDB, in three layers, each of which uses the ones above it.

binding   RocksDB, bound at run time
overlay   the changes of an open batch, in front of the database
handles   the scalar calls of a keyed backend
"""
