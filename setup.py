"""The build entry; everything it needs to know stands in pyproject.toml."""

from setuptools import setup

setup()
