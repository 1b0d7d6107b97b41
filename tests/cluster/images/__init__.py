"""Builds the images of images/ without a docker daemon: `make images`, or `python -m tests.cluster.images NAME`.

A test inside the cluster's namespace has no network; it takes what was built before by `archive`.
"""

from tests.cluster.images.builder import archive, build
from tests.cluster.images.errors import ImageError
from tests.cluster.images.recipes import IMAGES, Image, reference

__all__ = ["IMAGES", "Image", "ImageError", "archive", "build", "reference"]
