"""The heap backend: state in memory, in the compiled core."""
