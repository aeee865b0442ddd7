"""Counting in windows over columns."""
