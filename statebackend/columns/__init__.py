"""Columns of Arrow to stored values and keys, and back: which codec a type gets, and how it converts whole columns.

Nothing is imported here: the modules load the compiled core.
"""
