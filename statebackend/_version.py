"""The version of the package, read from here by setup.py and by ``statebackend.__version__``."""

__version__ = "0.1.0.dev0"
