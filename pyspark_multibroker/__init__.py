"""Makes `spark.read.format("multibroker")` known: Spark looks into packages named pyspark_*."""

from multibroker.spark.source import MultibrokerSource as DefaultSource

__all__ = ["DefaultSource"]
