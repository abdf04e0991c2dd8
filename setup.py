import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "([^"]+)"', (HERE / "multibroker" / "__init__.py").read_text()
).group(1)

SPARK = ["pyspark>=4.1", "pyarrow>=18", "pandas<3", "numpy>=1.26"]
TEST = ["hypothesis>=6.100", "numpy>=1.26", "selenium>=4.20"]
LINT = ["flake8>=7", "isort>=6", "mypy>=1.15", "mypy-zope>=1.0.11"]

setup(
    name="multibroker",
    version=VERSION,
    description="One Twisted service that speaks five messaging protocols over one durable log",
    license="MIT",
    python_requires=">=3.11",
    # twisted.plugins is not a package of ours (no __init__.py beside the plugin),
    # but listing it is what puts the plugin where twistd looks.
    # pyspark_multibroker is where Spark looks for the data source by itself.
    packages=find_packages(include=["multibroker*", "pyspark_multibroker"]) + ["twisted.plugins"],
    package_data={"multibroker": ["py.typed"], "multibroker.web": ["static/*", "*.json"]},
    install_requires=[
        "twisted[tls]>=25.5",
        "zope.interface>=6",
        "aioquic>=1.7",
        "cryptography>=43",
        "crcmod>=1.7",
        "cramjam>=2.8",
        "isal>=1.6",
        "prometheus-client>=0.20",
    ],
    extras_require={
        "fast": ["numpy>=1.26"],
        "spark": SPARK,
        "delta": ["deltalake>=1.0"],
        "plot": ["matplotlib>=3.8"],
        "test": TEST + SPARK + ["deltalake>=1.0", "matplotlib>=3.8"],
        "dev": TEST + LINT + ["tox>=4", "coverage>=7"],
    },
    entry_points={"console_scripts": ["multibroker = multibroker.cli.main:console"]},
    zip_safe=False,
)
