from local_spark import spark

__all__ = ["spark"]
