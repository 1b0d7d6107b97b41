"""The release that this is. Images hold sources and no package metadata, so it is written here."""

VERSION = "0.1.0"
