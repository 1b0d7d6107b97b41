"""One-time conversion of a GGUF base model into a Hugging-Face-form folder, without torch or transformers."""

from loraplane_cli.model_import.errors import ModelImportError
from loraplane_cli.model_import.importer import ImportedModel, Progress, import_gguf

__all__ = ["ImportedModel", "ModelImportError", "Progress", "import_gguf"]
