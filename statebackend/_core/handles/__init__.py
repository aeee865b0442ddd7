"""The scalar methods that a function calls once per record."""
