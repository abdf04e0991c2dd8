"""Spark's Python workers must be the Python that runs the tests, whatever is on the path."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
