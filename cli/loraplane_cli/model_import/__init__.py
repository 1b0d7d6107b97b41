"""One-time conversion of a GGUF base model into a Hugging-Face-form folder, without torch or transformers."""

from loraplane_cli.model_import.errors import ModelImportError
from loraplane_cli.model_import.importer import ImportedModel, import_gguf
from loraplane_cli.model_import.source import Progress

__all__ = ["ImportedModel", "ModelImportError", "Progress", "import_gguf"]
