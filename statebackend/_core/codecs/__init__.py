"""Python objects to stored values and keys, and back."""
