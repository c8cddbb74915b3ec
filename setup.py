"""Metadata and the C++ extension. The extension is required: where it does not compile, the installation fails."""

import re
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

VERSION = re.search(r'__version__ = "(.+)"', Path("megatron_simple/__init__.py").read_text(encoding="utf-8"))[1]

native = Pybind11Extension(
    "megatron_simple.data._native",
    sources=["csrc/bindings.cpp", "csrc/dataset_writer.cpp", "csrc/index_builders.cpp"],
    depends=["csrc/dataset_format.h", "csrc/dataset_writer.h", "csrc/index_builders.h"],
    include_dirs=["csrc"],
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra"],
)

setup(
    name="megatron_simple",
    version=VERSION,
    description="Pretraining of normalised transformers with tensor, pipeline and data parallelism",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_simple", "megatron_simple.*"]),
    ext_modules=[native],
    cmdclass={"build_ext": build_ext},
    zip_safe=False,
)
