"""The one error of an import; `code` is stable, the message is for a person."""

from typing import Literal

ImportErrorCode = Literal[
    "source_not_found",
    "not_a_gguf",
    "truncated_file",
    "unsupported_architecture",
    "unsupported_model",
    "target_occupied",
    "import_in_progress",
    "disk_full",
]


class ModelImportError(Exception):
    def __init__(self, code: ImportErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ImportErrorCode = code
        self.message = message
